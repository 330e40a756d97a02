"""Models that cannot be trained per contribution are refused, with the reason and the replacement.

The privacy unit is a contribution, and inside it the loss is a mean over records: a layer whose output for
one record depends on the other records of the batch, or that carries state from batch to batch outside the
parameters, leaks past the bound or makes the result depend on how records are batched.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel

from fedveil.errors import ModelError
from fedveil.local.copying import copy_module, is_compiled
from fedveil.local.dropout import with_seeded_dropout
from fedveil.local.stillness import WHY, difference, fingerprint

_REPLACEABLE = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def validate_layers(model: nn.Module) -> None:
    """Refuse layers known not to treat records one by one.

    Raises:
        ModelError: names the layer, says why it cannot be trained and what to put in its place.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise ModelError(
                f"{name} is on the meta device, where tensors have no numbers: build the model on the processor, or "
                "call to_empty(device='cpu') and initialise it"
            )
    for name, module in model.named_modules():
        reason = _refusal(module)
        if reason is not None:
            raise ModelError(f"layer {name or '(the model)'} is {type(module).__name__}: {reason}")


def _refusal(module: nn.Module) -> str | None:
    if is_compiled(module):
        return "it is compiled, and gradients of contributions are taken of what was compiled; hand over its _orig_mod"
    if isinstance(module, torch.jit.ScriptModule):
        return "TorchScript cannot be differentiated per contribution; hand over the Python module it was made from"
    if isinstance(module, nn.DataParallel | DistributedDataParallel):
        return "it spreads the records of a batch over devices; hand over its module"
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if module.sparse:
            return "its gradient is sparse, and a bound is computed of dense ones; set sparse=False"
        if module.scale_grad_by_freq:
            return (
                "it divides a record's gradient by how often other records of its batch have the same index; set "
                "scale_grad_by_freq=False"
            )
        return None
    if isinstance(module, LazyModuleMixin) and module.has_uninitialized_params():
        return "its shape is not known before the first batch; give the number of input features, or run the model once"
    if isinstance(module, _InstanceNorm):
        if not module.track_running_stats:
            return None
        return "it carries running statistics of private records outside the update; set track_running_stats=False"
    if isinstance(module, _BatchNorm):
        groups = next(g for g in (32, 16, 8, 4, 2, 1) if module.num_features % g == 0)
        return (
            "it normalises each record by the others of its batch and keeps running statistics outside the update; use "
            f"torch.nn.GroupNorm({groups}, {module.num_features}), which normalises each record by itself"
        )
    if isinstance(module, _DropoutNd) and not isinstance(module, _REPLACEABLE):
        return "its random mask cannot be drawn per contribution; use torch.nn.Dropout"
    if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and module.dropout > 0:
        return (
            "the dropout inside it cannot be drawn per contribution; "
            "set dropout=0 and put torch.nn.Dropout between layers"
        )
    return None


@torch.no_grad()
def validate_behaviour(model: nn.Module, features: Tensor) -> None:
    """Run a model on made-up records and refuse it if it does not treat each of them by itself.

    Finds what no list of layers can: a forward pass that mixes records, draws from torch's global random
    stream or writes to anything that the next pass reads.

    Args:
        model: the model; a copy of it is run, in training mode.
        features: at least three float32 records, all different, none of them private.

    Raises:
        ModelError: says which of the three it does, or that it fails on features of this shape.
    """
    assert len(features) >= 3
    probe = with_seeded_dropout(copy_module(model)).train()
    before = fingerprint(probe)
    with torch.random.fork_rng(devices=[]):
        try:
            first, again = probe(features), probe(features)
            others = probe(torch.cat([features[:1], 1 - 2 * features[1:]]))
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            shape = tuple(features.shape[1:])
            raise ModelError(f"the model fails on records of shape {shape}: {error}") from error
    if not isinstance(first, Tensor) or first.shape[:1] != features.shape[:1]:
        raise ModelError("the model must return one tensor whose first axis is the records")
    changed = difference(before, probe)
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
    if not torch.allclose(first[0], others[0], rtol=1e-4, atol=1e-5):
        raise ModelError(
            "the output for one record changes with the other records of its batch; normalise each record by "
            "itself (torch.nn.GroupNorm or torch.nn.LayerNorm)"
        )
