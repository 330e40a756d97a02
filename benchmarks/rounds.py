"""CPU time of whole rounds, against another checkout of fedveil: training, messages, ledger, evaluation and files.

``FEDVEIL_OTHER`` names the other checkout (``git worktree add --detach OTHER COMMIT``); it is run by the same
interpreter. Both play the same rounds in turn, each in a process of its own that prepares once and plays one run
uncounted. A row has the medians of a round over the runs; its ratio is the median of the pairs', ours by the other's,
so less is better. Noise is the system's, so the two runs of a pair do not end in the same model. What dp-fed pays
for is that nobody's update depends on who else takes part: 50 clients fill 64 rows, and their 50 records two tiles of
48.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from benchmarks.harness import Row

_LIMIT: Final = 1.05
_PUBLISHED: Final = (
    'method = { name = "uldp-avg-w", clip = %s, noise_multiplier = 5.0 }\nserver.learning_rate = %s'
)
CASES: Final = {
    "digits, 100 users": f"""
rounds = 30
model = {{ name = "linear" }}
{_PUBLISHED % (1.0, 0.5)}
local = {{ learning_rate = 0.5, epochs = 10, batch_size = 16 }}
privacy = {{ delta = 1e-5 }}
data = {{ name = "digits", n_users = 100, n_silos = 5, allocation = {{ law = "zipf" }} }}
""",
    "HeartDisease, 50 users, Q = 50": f"""
rounds = 30
{_PUBLISHED % (0.1, 2.5)}
local = {{ learning_rate = 0.001, epochs = 50, batch_size = 4 }}
privacy = {{ delta = 1e-5 }}
data = {{ name = "heart_disease", n_users = 50, allocation = {{ law = "zipf" }} }}
""",
    "dp-fed, 1,000 clients of 50 images": """
rounds = 15
evaluate_every = 15
model = { name = "linear" }
method.name = "dp-fed"
method.clip = 0.3
method.noise_multiplier = 1.0
method.client_sampling = "uniform"
method.client_sampling_rate = 0.05
local = { learning_rate = 0.1, epochs = 5, batch_size = 10, weight_decay = 4e-5, decay = 0.99 }
privacy = { delta = 5e-4, accountant = "rdp" }
data = { name = "mnist_canonical", n_users = 1000, allocation = { law = "clients" } }
""",
    "CEPAM, 30 clients, mlp": """
rounds = 5
evaluate_every = 10
model = { name = "mlp_32_16" }
method = { name = "cepam-gaussian", scale = "norm", noise_multiplier = 0.1, lattice = "Z2" }
local = { learning_rate = 0.01, epochs = 1, steps = 15, batch_size = 1, momentum = 0.5 }
data = { name = "mnist_centred", n_users = 30, allocation = { law = "clients" } }
""",
    "MNIST, linear, 10,000 users": f"""
rounds = 5
model = {{ name = "linear" }}
{_PUBLISHED % (0.1, 100.0)}
local = {{ learning_rate = 0.01, epochs = 50, batch_size = 64 }}
privacy = {{ delta = 1e-5 }}
data = {{ name = "mnist", n_silos = 5, n_users = 10000, allocation = {{ law = "zipf" }} }}
""",
}


def rows(quick: bool) -> Iterator[Row]:
    """Compare the first two cases in 5 pairs, or all in 9; without another checkout, measure our own."""
    some = {case: CASES[case] for case in list(CASES)[: 2 if quick else None]}
    yield from _compared(some, 5 if quick else 9)


def smallest() -> Iterator[Row]:
    """Play two rounds on digits of few users, once."""
    case = CASES["digits, 100 users"]
    for long, short in (
        ("rounds = 30", "rounds = 2"),
        ("n_users = 100", "n_users = 10"),
        ("epochs = 10", "epochs = 1"),
    ):
        case = case.replace(long, short)
    yield from _compared({"digits, 10 users": case}, 1)


def _compared(cases: Mapping[str, str], turns: int) -> Iterator[Row]:
    """Play cases so many times, in turn with another checkout where there is one."""
    other = os.environ.get("FEDVEIL_OTHER")
    for case, text in cases.items():
        with ExitStack() as stack:
            ours = stack.enter_context(_player(Path.cwd(), text))
            peer = None if other is None else stack.enter_context(_player(Path(other), text))
            pairs = []
            for turn in range(turns):
                first, second = (ours, peer) if turn % 2 == 0 else (peer, ours)
                spent = {id(one): _round_of(one) for one in (first, second) if one is not None}
                pairs.append((spent[id(ours)], None if peer is None else spent[id(peer)]))
        ratio = None if other is None else statistics.median(a / b for a, b in pairs if b is not None)
        yield Row(
            case=f"{case}: a round",
            unit="CPU ms",
            ours=1000 * statistics.median(a for a, _ in pairs),
            peer=None if other is None else 1000 * statistics.median(b for _, b in pairs if b is not None),
            ratio=ratio,
            target=_LIMIT,
            met=None if ratio is None else ratio <= _LIMIT,
        )


@contextmanager
def _player(checkout: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Return a process that has prepared a case, and has played it once."""
    paths = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    player = Path(__file__).with_name("rounds_player.py")
    command = [sys.executable, "-P", str(player), text]  # -P: this folder's modules hide others
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=os.environ | paths) as process:
        _round_of(process)
        yield process


def _round_of(process: subprocess.Popen[str]) -> float:
    """Let a process play a run; return the mean CPU seconds of its rounds but the first."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    marks: list[float] = json.loads(process.stdout.readline())
    return (marks[-1] - marks[0]) / (len(marks) - 1)
