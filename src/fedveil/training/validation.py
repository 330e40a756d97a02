"""Refuse models and losses that cannot be trained per contribution, with the reason and a replacement.

The privacy unit is a contribution, and inside it the loss is a mean over records. A layer leaks past the bound, or
makes the result depend on how records are batched, if its output for one record depends on the other records of the
batch, or if it carries state from batch to batch outside the parameters.
"""

from __future__ import annotations

from contextlib import suppress

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from fedveil.errors import FedveilError, ModelError
from fedveil.registry import is_own
from fedveil.stage import ignored, redefined
from fedveil.training.copying import copy_module, is_compiled
from fedveil.training.counters import with_seeded_dropout
from fedveil.training.losses import Loss, TaskKind
from fedveil.training.pretrained import frozen_norm_refusal, with_frozen_norms
from fedveil.training.shapes import single_threaded
from fedveil.training.state_leak_check import WHY, fingerprint, first_difference, snapshot
from fedveil.user_code import failed_at

_REPLACEABLE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def validate_layers(model: nn.Module) -> None:
    """Refuse layers that are known to mix records or to carry state.

    Raises:
        ModelError: names the layer, says why it cannot be trained, and gives a replacement.
    """
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32:
            raise ModelError(
                f"parameter {name} is {parameter.dtype}; models are trained in torch.float32: call float() on it"
            )
        # Training computes gradients of copies, which carry no hooks: the hook would be ignored without a word.
        if getattr(parameter, "_backward_hooks", None) or getattr(
            parameter, "_post_accumulate_grad_hooks", None
        ):
            raise ModelError(
                f"{name} has a gradient hook, which training would ignore: remove it, and change the loss or "
                "the learning "
                "rate instead"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name} is on the meta device, where tensors have no numbers: build the model on the processor, or "
                "call to_empty(device='cpu') and initialise it"
            )
    names: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        reason = _refusal(module)
        if reason is not None:
            raise ModelError(f"layer {name or '(the model)'} is {type(module).__name__}: {reason}")
        first = names.setdefault(id(module), name)
        # PyTorch replaces the tensors of such a module twice and restores them once (torch.func.functional_call).
        if first != name and any(True for _ in (*module.parameters(), *module.buffers())):
            raise ModelError(
                f"layers {first or '(the model)'} and {name} are one {type(module).__name__} under two names, which "
                "PyTorch cannot train functionally: keep it under one name and call it twice in forward, or give two "
                f"layers one tensor ({name}.weight = {first}.weight)"
            )


def _refusal(module: nn.Module) -> str | None:
    if is_compiled(module):
        return "it is compiled, and gradients of contributions are taken of what was compiled; hand over its _orig_mod"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript cannot be differentiated per contribution; hand over the Python module it was made from"
    if isinstance(module, nn.DataParallel | DistributedDataParallel):
        return "it spreads the records of a batch over devices; hand over its module"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return _embedding_refusal(module)
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "its shape is not known before the first batch; give the number of input features, or run the model once"
    if isinstance(module, _InstanceNorm):
        if not module.track_running_stats:
            return None
        return "it carries running statistics of private records outside the update; set track_running_stats=False"
    if isinstance(module, _BatchNorm):
        unfrozen = frozen_norm_refusal(module)
        if unfrozen is None:
            return None
        groups = next(g for g in (32, 16, 8, 4, 2, 1) if module.num_features % g == 0)
        return (
            "it normalises each record by the others of its batch and keeps running statistics outside the update; use "
            f"torch.nn.GroupNorm({groups}, {module.num_features}), which normalises each record by itself. A "
            "pretrained layer is taken as a constant if it is frozen, requires_grad_(False).eval(); this one "
            f"{unfrozen}"
        )
    if isinstance(module, _DropoutNd) and not isinstance(module, _REPLACEABLE):
        return "its random mask cannot be drawn per contribution; use torch.nn.Dropout"
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
        return (
            "the dropout inside it cannot be drawn per contribution; "
            "set dropout=0 and put torch.nn.Dropout between layers"
        )
    return None


def _embedding_refusal(module: nn.Embedding | nn.EmbeddingBag) -> str | None:
    if module.sparse:
        return "its gradient is sparse, and a bound is computed of dense ones; set sparse=False"
    if module.scale_grad_by_freq:
        return (
            "it divides a record's gradient by how often other records of its batch have the same index; set "
            "scale_grad_by_freq=False"
        )
    return None


@torch.no_grad()
def validate_behaviour(model: nn.Module, features: Tensor) -> None:
    """Run a model on made-up records, and refuse it if it does not treat each record separately.

    The trial finds behaviour that no list of layers can: a forward pass that mixes records, reads torch's global
    random stream, or writes state that the next pass reads.

    Args:
        model: the model; a copy is run, in training mode.
        features: at least three float32 records, all different, none of them private.

    Raises:
        ModelError: says which of the three the model does, or that it fails on features of this shape or gives
            non-finite outputs.
    """
    assert len(features) >= 3
    probe = with_seeded_dropout(with_frozen_norms(copy_module(model))).train()
    before = fingerprint(probe)
    with torch.random.fork_rng(devices=[]):
        try:
            # Two equal passes detect random numbers and state. Each further pass keeps one record and changes the
            # others: a cumulative sum reaches the later records alone, so the first record is not enough.
            first, again = probe(features), probe(features)
            passes = {row: probe(_with_other_records(features, row)) for row in (0, len(features) // 2, -1)}
        except FedveilError:
            raise
        except (RuntimeError, ValueError, IndexError, TypeError) as error:  # what PyTorch's operations raise
            shape = tuple(features.shape[1:])
            raise ModelError(
                f"the model fails on made-up records of shape {shape}, which are standard normal numbers: {error}; "
                "where a feature is an index, round and clamp it in forward"
            ) from error
        except Exception as error:  # the words of other errors are the user's own, and may quote records
            shape, location = tuple(features.shape[1:]), failed_at(error) or type(model).__name__
            raise ModelError(
                f"the model fails on made-up records of shape {shape}, which are standard normal numbers: "
                f"{location} raised "
                f"{type(error).__name__}"
            ) from error
    if not isinstance(first, Tensor) or first.shape[:1] != features.shape[:1]:
        raise ModelError("the model must return one tensor whose first axis is the records")
    changed = first_difference(before, probe)
    if changed is not None:
        raise ModelError(
            f"the model writes to its {changed} while it trains: {WHY}; use a layer without running statistics, such "
            "as torch.nn.GroupNorm, and neither count nor remember passes"
        )
    if not first.isfinite().all():
        raise ModelError(
            "the model gives outputs that are not finite for made-up records of ordinary size: look at its initial "
            "parameters, and at logarithms and divisions"
        )
    if not torch.equal(first, again):
        raise ModelError(
            "two passes over the same records differ: the model draws random numbers itself; use "
            "torch.nn.Dropout layers, whose masks are drawn per contribution"
        )
    if not all(
        torch.allclose(first[row], outputs[row], rtol=1e-4, atol=1e-5) for row, outputs in passes.items()
    ):
        raise ModelError(
            "the output for one record changes with the other records of its batch; normalise each record by "
            "itself (torch.nn.GroupNorm or torch.nn.LayerNorm)"
        )


def _with_other_records(features: Tensor, row: int) -> Tensor:
    """Return made-up records of which one is the same and all others are changed."""
    changed = 1 - 2 * features
    changed[row] = features[row]
    return changed


# --- validate loss -------------------------------------------------------------------------------------------------
# A loss must be a function of one batch, and of nothing before it.
#
# A bound on each contribution limits a user's influence only if no other contribution reads the user's records. A
# loss with state carries records from one contribution to the next. If a term depends on other rows, the gradient of
# a record depends on its batch neighbours, padding included. The trials use made-up records only.

_ROWS = 40  # more rows than the smallest number that a loss of hard examples selects
_FIXED = ("__call__", "in_closed_form", "by_row")
_WORDS = ("name", "tasks", "check_targets", "check_task")
_CALLS = 4  # calls between two equal ones, with growing outputs: a running mean of losses would follow them


@single_threaded()  # the trials are too small for threads
def validate_loss(loss: Loss, task: TaskKind, outputs: int, like: Shaped[Tensor, "n *target"]) -> None:
    """Try a loss on made-up data, and refuse it if its terms depend on more than their batch.

    Args:
        loss: a built-in or third-party loss.
        task: the kind of the targets.
        outputs: k, the number of outputs of the model per record.
        like: targets of the right dtype and shape; no value is read.

    Raises:
        ModelError: the loss fails, gives no finite term per record, keeps a state, draws random numbers, lets a
            record's term depend on other rows although it declares itself separable, counts padding rows, or defines
            its own ``slopes``.
    """
    if not is_own(type(loss)) and type(loss).slopes is not Loss.slopes:
        raise ModelError(
            f"loss {loss.name} brings slopes of its own, or derives from a loss that has some: "
            "they are computed for many contributions at once, which is untested; derive from fedveil's Loss, "
            "and give `records` alone"
        )
    unused = redefined(loss, *_FIXED)
    if unused:
        raise ModelError(
            f"loss {loss.name} defines {', '.join(unused)}: trainers take the mean over a batch themselves and decide "
            "how they compute it; give `records` alone"
        )
    if reason := ignored(loss, ("records", "check_targets"), _WORDS):
        raise ModelError(f"loss {loss.name} {reason}: trainers use `records`; define that")
    generator = torch.Generator().manual_seed(0)
    made_up = torch.randn(_ROWS, outputs, generator=generator)
    targets = _targets(task, outputs, like)
    present = torch.ones(_ROWS)
    with torch.random.fork_rng(devices=[]):
        with suppress(Exception):  # a first call may build constants, from made-up rows; they are not state
            loss.records(made_up.clone(), targets.clone(), present.clone())
        terms = _terms(loss, made_up, targets, present)
        for call in range(_CALLS):
            _terms(loss, made_up * 3.0 ** (call + 1), targets.roll(1, 0), present)
        again = _terms(loss, made_up, targets, present)
        if not torch.equal(terms, again):
            raise ModelError(
                f"loss {loss.name} gives other terms when it is called again: it keeps a state, or draws random "
                f"numbers; {WHY}: compute each batch by itself"
            )
        if loss.separable:
            # A separable loss must give the same terms in a crowd, alone, and in the batch itself.
            beside = torch.cat([made_up, 2 - 3 * made_up])
            crowd = _terms(loss, beside, torch.cat([targets, targets.flip(0)]), torch.ones(2 * _ROWS))
            alone = [
                _terms(loss, made_up[row : row + 1], targets[row : row + 1], present[:1])
                for row in range(_ROWS)
            ]
            if not all(
                torch.allclose(terms, other, rtol=1e-4, atol=1e-5)
                for other in (crowd[:_ROWS], torch.cat(alone))
            ):
                raise ModelError(
                    f"loss {loss.name}: the term of a record changes with the other records of its batch, or with "
                    "their number (a mean, a weight or a rank over the batch): compute each term from its own row; "
                    "weights of classes are declared: model.class_weights"
                )
        else:
            # A loss that couples records (Cox) must still ignore padding: three ways to leave out two rows must
            # agree.
            absent = torch.cat([present[:-2], torch.zeros(2)])
            padded = torch.cat([made_up[:-2], 1 - made_up[-2:]])
            variants = [_terms(loss, rows, targets, absent)[:-2] for rows in (made_up, padded)] + [
                _terms(loss, made_up[:-2], targets[:-2], present[:-2])
            ]
            if not all(
                torch.allclose(variants[0], variant, rtol=1e-4, atol=1e-5) for variant in variants[1:]
            ):
                raise ModelError(
                    f"loss {loss.name}: terms change with rows whose mask is 0; such rows pad a batch, as many of them "
                    "as others need: leave them out of everything"
                )


def _terms(
    loss: Loss, outputs: Float[Tensor, "n k"], targets: Shaped[Tensor, "n *target"], mask: Float[Tensor, " n"]
) -> Float[Tensor, " n"]:
    """Return the terms of a loss, and refuse a loss that holds other values afterwards."""
    before = snapshot(loss)
    originals, copies = (outputs, targets, mask), (outputs.clone(), targets.clone(), mask.clone())
    try:
        terms = loss.records(*copies)
    except ModelError as error:
        raise ModelError(
            f"{error}; return one term a record: no mean over them (reduction='none'), and no second axis"
        ) from None
    except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as error:
        raise ModelError(
            f"loss {loss.name} fails on outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}: "
            f"{str(error).splitlines()[0]}"
        ) from error
    if terms.shape != mask.shape:
        raise ModelError(f"loss {loss.name} must give one term a record, not {tuple(terms.shape)}")
    if snapshot(loss) != before:
        raise ModelError(
            f"loss {loss.name} writes to what it holds (a buffer, an attribute, a variable that it closes over): "
            f"{WHY}; compute each batch by itself"
        )
    if not all(map(torch.equal, originals, copies)):
        raise ModelError(
            f"loss {loss.name} writes to the outputs or targets that it is given, which are read again: compute with "
            "operations that return new tensors"
        )
    return terms.detach()


def _targets(task: TaskKind, outputs: int, like: Shaped[Tensor, "n *target"]) -> Shaped[Tensor, "r *target"]:
    """Return made-up targets: classes in turn, combinations of labels, events and censored records, numbers."""
    shape = (_ROWS, *like.shape[1:])
    row = torch.arange(_ROWS)
    if task == "survival":
        columns = ((row % 2 == 0), row + 1, row / 2)  # event, time, entry
        return torch.stack([column.to(like.dtype) for column in columns[: shape[1]]], -1)
    if task == "multi-label":
        return ((row[:, None] >> torch.arange(shape[1]) % 3) % 2).to(like.dtype)
    values = row % max(outputs, 2) if task == "classification" else row / _ROWS
    return values.to(like.dtype).reshape(_ROWS, *(1 for _ in shape[1:])).expand(shape)
