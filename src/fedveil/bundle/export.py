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


def export_onnx(bundle: Bundle, path: str | Path) -> Path:
    """Write the model as ONNX: input ``features`` (records, ...) float32, output ``outputs`` (records, k).

    The input must be in the form that the model sees: encoded by the schema, scaled by the manifest's factor and
    shift.

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


def export_torch(bundle: Bundle, path: str | Path) -> Path:
    """Write the model's tensors in the format of ``torch.load(path, weights_only=True)``.

    Raises:
        BundleError: the file cannot be written.
    """
    path = as_path(path, "export_torch")
    with writing(path, BundleError), open(path, "wb") as stream:
        torch.save(bundle.tensors(), stream)
    return path
