"""Check whether Intel's oneMKL is in its reproducible mode.

PyTorch on x86 computes its matrix products with oneMKL.

Outside this mode, the last bits of a product may depend on the memory addresses of its arrays, and so on the slot of
a contribution in a batch. ``import fedveil`` requests the mode (``MKL_CBWR``), but the library reads the variable
only at the first product of a process. This module asks the library for its mode.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

import torch

HOW_TO_ASK: Final = (
    "Intel's oneMKL is not in its reproducible mode, in which where an array lies in memory rounds no product: a "
    "matrix product was computed before `import fedveil`, or MKL_CBWR is set to OFF; import fedveil first, or start "
    "Python with MKL_CBWR=AUTO"
)
_GETTERS: Final = ("mkl_serv_cbwr_get", "MKL_CBWR_Get")
"""Getter of the library inside PyTorch's own wheels, and of a separately installed one."""
_BRANCH, _OFF = 1, 1
"""``MKL_CBWR_BRANCH``: asks for the selected code path; ``MKL_CBWR_BRANCH_OFF``: no reproducible path."""


def rounds_by_place() -> bool:
    """Return whether oneMKL reports that its reproducible mode is off.

    The answer is False if PyTorch uses another library.

    A library without the getter gives False, too: the trials of :mod:`fedveil.training.batch_independence` alone
    judge it.
    """
    if not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        return False
    folder = Path(torch.__file__).parent / "lib"
    for name in ("libtorch_cpu.so", "libtorch_cpu.dylib", "torch_cpu.dll"):
        try:
            library = ctypes.CDLL(str(folder / name))
        except OSError:
            continue
        for getter in _GETTERS:
            if hasattr(library, getter):
                return int(getattr(library, getter)(_BRANCH)) == _OFF
    return False
