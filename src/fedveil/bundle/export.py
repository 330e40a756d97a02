"""Export of a bundle's model for other programs: ONNX, or a PyTorch state."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from fedveil.bundle.archive import BundleError
from fedveil.bundle.bundle import Bundle
from fedveil.errors import ConfigError
from fedveil.files import as_path, writing
from fedveil.sanitize import sanitize
from fedveil.training.trees import LEAVES, BoostedTrees


def export_onnx(bundle: Bundle, path: str | Path) -> Path:
    """Write the model as ONNX: input ``features`` (records, ...) float32, output ``outputs`` (records, k).

    Boosted trees are one TreeEnsembleRegressor of the operator set ai.onnx.ml, other models a graph. The input must be
    in the form that the model sees: encoded by the schema, scaled by the manifest's factor and shift.

    Raises:
        ConfigError: the extra ``onnx`` is not installed.
        BundleError: ONNX cannot express a part of the model, or the file cannot be written.
    """
    path = as_path(path, "export_onnx")
    try:
        import_module("onnx")
        import_module("onnxscript")
    except ImportError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'fedveil[onnx]'") from None
    if isinstance(bundle.model, BoostedTrees):
        with writing(path, BundleError):
            path.write_bytes(_tree_ensemble(bundle.model))
        return path
    # Two records: torch.export would specialise a dimension of size 1 instead of keeping it dynamic.
    made_up = torch.zeros(2, *bundle.manifest.input.shape)
    given: dict[str, Any] = {
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
            torch.onnx.export(bundle.model, (made_up,), str(path), dynamo=True, external_data=False, **given)
    except (torch.onnx.errors.OnnxExporterError, RuntimeError) as error:
        why = sanitize(str(error.__cause__ or error).splitlines()[0])
        raise BundleError(f"{bundle.path}: the model cannot be written as ONNX: {why}") from error
    except OSError as error:
        raise BundleError(f"{path} cannot be written: {error.strerror}") from None
    finally:
        log.setLevel(level)
    return path


def _tree_ensemble(model: BoostedTrees) -> bytes:
    """Return trees as an ONNX model of one operator; trees that have not grown are left out.

    The nodes of a tree are numbered level by level, so that node i has the children 2 i + 1 and 2 i + 2; a record goes
    to the second where its feature exceeds the cut.
    """
    from onnx import TensorProto, checker, helper

    leaves = model.leaves.detach().cpu().flatten(0, 1)
    grown = leaves.flatten(1).any(dim=1).nonzero().flatten()
    feature, rank = (one.cpu().flatten(0, 1)[grown] for one in (model.feature, model.rank))
    level = torch.tensor([place.bit_length() - 1 for place in range(1, LEAVES)])
    trees, outputs = len(grown), leaves.shape[-1]
    cut = model.cuts.detach().cpu()[feature, rank][:, level]
    inner, nodes = torch.arange(LEAVES - 1).repeat(trees), 2 * LEAVES - 1
    of_tree = torch.arange(trees).repeat_interleave(nodes)
    place = torch.arange(nodes).repeat(trees)
    is_leaf = place >= LEAVES - 1
    zero = torch.zeros(len(place), dtype=torch.int64)
    above, below, column = (zero.clone() for _ in range(3))
    value = torch.zeros(len(place))
    above[~is_leaf], below[~is_leaf] = 2 * inner + 2, 2 * inner + 1
    column[~is_leaf], value[~is_leaf] = feature[:, level].flatten(), cut.flatten()
    ensemble = helper.make_node(
        "TreeEnsembleRegressor",
        ["features"],
        ["outputs"],
        domain="ai.onnx.ml",
        n_targets=outputs,
        nodes_treeids=of_tree.tolist(),
        nodes_nodeids=place.tolist(),
        nodes_modes=["LEAF" if one else "BRANCH_GT" for one in is_leaf.tolist()],
        nodes_featureids=column.tolist(),
        nodes_values=value.tolist(),
        nodes_truenodeids=above.tolist(),
        nodes_falsenodeids=below.tolist(),
        target_treeids=of_tree[is_leaf].repeat_interleave(outputs).tolist(),
        target_nodeids=place[is_leaf].repeat_interleave(outputs).tolist(),
        target_ids=torch.arange(outputs).repeat(trees * LEAVES).tolist(),
        target_weights=leaves[grown].flatten().tolist(),
    )
    read = helper.make_tensor_value_info("features", TensorProto.FLOAT, ["records", len(model.cuts)])
    shown = helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["records", outputs])
    graph = helper.make_graph([ensemble], "boosted-trees", [read], [shown])
    sets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.ml", 3)]
    found = helper.make_model(graph, opset_imports=sets, ir_version=8, producer_name="fedveil")
    checker.check_model(found)
    return bytes(found.SerializeToString())


def export_torch(bundle: Bundle, path: str | Path) -> Path:
    """Write the model's tensors in the format of ``torch.load(path, weights_only=True)``.

    Raises:
        BundleError: the file cannot be written.
    """
    path = as_path(path, "export_torch")
    with writing(path, BundleError), open(path, "wb") as stream:
        torch.save(bundle.tensors(), stream)
    return path
