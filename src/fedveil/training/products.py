"""Whether Intel's oneMKL, from which PyTorch on x86 takes its matrix products, is in its reproducible mode.

Outside of this mode the last bits of a product may depend on where in memory its arrays start, and so on the slot of a
contribution in a batch. ``import fedveil`` asks for the mode (``MKL_CBWR``), but the library reads the variable at the
first product of a process. This module asks the library which mode it is in.
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
"""Of the library within PyTorch's own wheels, and of one beside it."""
_BRANCH, _OFF = 1, 1
"""``MKL_CBWR_BRANCH``: which code path is asked for; ``MKL_CBWR_BRANCH_OFF``: none."""


def rounds_by_place() -> bool:
    """Return whether oneMKL says that its reproducible mode is off; False where PyTorch uses another library.

    A library that cannot be asked is judged by the trials of :mod:`fedveil.training.batch_independence` alone.
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
