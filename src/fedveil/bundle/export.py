"""Export of a bundle's model for other programs: ONNX, or a PyTorch state."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from fedveil.bundle.bundle import Bundle
from fedveil.bundle.manifest import BundleError
from fedveil.errors import ConfigError
from fedveil.files import as_path, writing
from fedveil.sanitize import sanitize
from fedveil.statistics.inference.families import REACH
from fedveil.training.newton import WhitenedHazards, WhitenedLinear, WhitenedRates
from fedveil.training.trees import LEAVES, BoostedTrees

_Graph: TypeAlias = tuple[list[Any], int, list[Any]]
"""Operators from ``features`` to ``outputs``, number of outputs, constants."""

_NOTES: Final = ("doc_string", "metadata_props")
"""Fields of ONNX that hold words for readers."""

_WRITTEN: Final = (BoostedTrees, WhitenedLinear, WhitenedRates, WhitenedHazards)
"""Models that are written without tracing."""


def export_onnx(bundle: Bundle, path: str | Path) -> Path:
    """Write the model as ONNX: input ``features`` (records, ...) float32, output ``outputs`` (records, k).

    Boosted trees are one TreeEnsembleRegressor of the operator set ai.onnx.ml, and the models of newton one linear
    layer; other models are traced, and the file names no path and no line of code. The number of records is free. The
    input must be in the form that the model sees: encoded by the schema, scaled by the manifest's factor and shift.

    Raises:
        ConfigError: the extra ``onnx`` is not installed.
        BundleError: ONNX cannot express a part of the model, or for one number of records only; or the file cannot be
            written.
    """
    path = as_path(path, "export_onnx")
    try:
        import_module("onnx")
        import_module("onnxscript")
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'fedveil[onnx]'") from None
    model = bundle.model
    # A subclass may compute something else.
    if type(model) in _WRITTEN and isinstance(model, BoostedTrees | WhitenedLinear):
        graph = _tree_ensemble(model) if isinstance(model, BoostedTrees) else _linear_layer(model)
        nodes, outputs, tensors = graph
        with writing(path, BundleError):
            path.write_bytes(_onnx_model(nodes, bundle.manifest.input.shape, outputs, tensors))
        return path
    # Two records: torch.export would specialise a dimension of size 1 instead of keeping it dynamic.
    made_up = torch.zeros(2, *bundle.manifest.input.shape)
    options: dict[str, Any] = {
        "input_names": ["features"],
        "output_names": ["outputs"],
        "dynamic_shapes": ({0: torch.export.Dim("records")},),
        "verbose": False,
    }
    log = logging.getLogger(
        "torch.onnx"
    )  # it warns about every optional operator library that is not installed
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter of PyTorch uses deprecated functions of PyTorch
            torch.onnx.export(
                bundle.model, (made_up,), str(path), dynamo=True, external_data=False, **options
            )
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        reason = sanitize(str(error.__cause__ or error).splitlines()[0])
        raise BundleError(f"{bundle.path}: the model cannot be written as ONNX: {reason}") from error
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        log.setLevel(level)
    _finish(path)
    return path


def _finish(path: Path) -> None:
    """Refuse a traced graph that takes one number of records only, and rewrite it without what tracing noted.

    Tracing may fix a size that the model reads. It notes the lines of code by which it came to every operator, with the
    paths of their files on this machine.

    Raises:
        BundleError: the graph takes one number of records only; the file is removed.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    if not all(
        value.type.tensor_type.shape.dim[0].dim_param for value in (*model.graph.input, *model.graph.output)
    ):
        path.unlink()
        raise BundleError(
            f"{path}: the model cannot be written as ONNX: its graph takes one number of records only; the model's "
            "forward must not depend on the number of records"
        )
    _drop_notes(model)
    with writing(path, BundleError):
        path.write_bytes(model.SerializeToString())


def _drop_notes(message: Any) -> None:
    """Clear the notes in a message of ONNX and in all messages inside of it: they are no part of the computation."""
    for field, value in message.ListFields():
        if field.name in _NOTES:
            message.ClearField(field.name)
        elif field.message_type is not None:
            for inner in [value] if hasattr(value, "ListFields") else value:
                _drop_notes(inner)


def _linear_layer(model: WhitenedLinear) -> _Graph:
    """Return a linear model of newton as one layer: the coefficients of the features, without the basis.

    Mean counts are the exponential of the layer, cut as in :class:`fedveil.training.newton.WhitenedRates`.
    """
    from onnx import helper, numpy_helper

    with torch.no_grad():
        weight, bias = (tensor.cpu().numpy() for tensor in model.coefficients())
    nodes = [
        helper.make_node("Flatten", ["features"], ["rows"]),
        helper.make_node("Gemm", ["rows", "weight", "bias"], ["linear"], transB=1),
    ]
    constants = {"weight": weight, "bias": bias}
    if isinstance(model, WhitenedRates):
        constants |= {"low": np.array(-REACH, np.float32), "high": np.array(REACH, np.float32)}
        nodes += [
            helper.make_node("Clip", ["linear", "low", "high"], ["cut"]),
            helper.make_node("Exp", ["cut"], ["outputs"]),
        ]
    else:
        nodes.append(helper.make_node("Identity", ["linear"], ["outputs"]))
    tensors = [numpy_helper.from_array(value, name) for name, value in constants.items()]
    return nodes, len(weight), tensors


def _onnx_model(nodes: Sequence[Any], shape: Sequence[int], outputs: int, tensors: Sequence[Any]) -> bytes:
    """Return a checked ONNX model of some nodes.

    Args:
        nodes: its operators, from ``features`` to ``outputs``.
        shape: shape of a record.
        outputs: number of outputs.
        tensors: constants.
    """
    from onnx import TensorProto, checker, helper

    read = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["records", *shape])
    shown = helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["records", outputs])
    graph = helper.make_graph(nodes, "model", [read], [shown], tensors)
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    model = helper.make_model(graph, opset_imports=sets, ir_version=8, producer_name="fedveil")
    checker.check_model(model)
    return bytes(model.SerializeToString())


def _tree_ensemble(model: BoostedTrees) -> _Graph:
    """Return trees as one operator; trees that have not grown are left out.

    The nodes of a tree are numbered level by level, so that node i has the children 2 i + 1 and 2 i + 2; a record goes
    to the second where its feature exceeds the cut.
    """
    from onnx import helper

    leaves = model.leaves.detach().cpu().flatten(0, 1)
    grown = leaves.flatten(1).any(dim=1).nonzero().flatten()
    feature, rank = (tensor.cpu().flatten(0, 1)[grown] for tensor in (model.feature, model.rank))
    level = torch.tensor([number.bit_length() - 1 for number in range(1, LEAVES)])
    trees, outputs = len(grown), leaves.shape[-1]
    cut = model.cuts.detach().cpu()[feature, rank][:, level]
    inner, nodes = torch.arange(LEAVES - 1).repeat(trees), 2 * LEAVES - 1
    of_tree = torch.arange(trees).repeat_interleave(nodes)
    node = torch.arange(nodes).repeat(trees)
    is_leaf = node >= LEAVES - 1
    zero = torch.zeros(len(node), dtype=torch.int64)
    above, below, column = (zero.clone() for _ in range(3))
    value = torch.zeros(len(node))
    above[~is_leaf], below[~is_leaf] = 2 * inner + 2, 2 * inner + 1
    column[~is_leaf], value[~is_leaf] = feature[:, level].flatten(), cut.flatten()
    ensemble = helper.make_node(
        "TreeEnsembleRegressor",
        ["rows"],
        ["outputs"],
        domain="ai.onnx.ml",
        n_targets=outputs,
        nodes_treeids=of_tree.tolist(),
        nodes_nodeids=node.tolist(),
        nodes_modes=["LEAF" if leaf else "BRANCH_GT" for leaf in is_leaf.tolist()],
        nodes_featureids=column.tolist(),
        nodes_values=value.tolist(),
        nodes_truenodeids=above.tolist(),
        nodes_falsenodeids=below.tolist(),
        target_treeids=of_tree[is_leaf].repeat_interleave(outputs).tolist(),
        target_nodeids=node[is_leaf].repeat_interleave(outputs).tolist(),
        target_ids=torch.arange(outputs).repeat(trees * LEAVES).tolist(),
        target_weights=leaves[grown].flatten().tolist(),
    )
    return [helper.make_node("Flatten", ["features"], ["rows"]), ensemble], outputs, []


def export_torch(bundle: Bundle, path: str | Path) -> Path:
    """Write the model's tensors in the format of ``torch.load(path, weights_only=True)``.

    Raises:
        BundleError: the file cannot be written.
    """
    path = as_path(path, "export_torch")
    with writing(path, BundleError), open(path, "wb") as stream:
        torch.save(bundle.tensors(), stream)
    return path
