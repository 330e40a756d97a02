"""The tests, one thread each."""

import os

# Two workers fill two cores; idle threads of linear algebra would spin on them. Before numpy and torch are imported;
# processes that tests start inherit it.
for _library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{_library}_NUM_THREADS", "1")
