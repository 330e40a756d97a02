"""Record the pins anew: ``python -m tests.pins.record [CASE ...]``.

A difference is a change of what a run computes or sends.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from tests.pins.cases import TRAINED, WHOLE, fingerprint, play

PINS = Path(__file__).with_name("pins.json")


def main() -> None:
    """Play every case and write what it gave."""
    torch.set_num_threads(1)
    asked = sys.argv[1:]
    kept = json.loads(PINS.read_text()) if asked else {"whole": {}, "trained": {}}
    found: dict[str, Any] = {"trained_on": fingerprint(), "whole": {}, "trained": {}}
    for kind, names in (("whole", WHOLE), ("trained", TRAINED)):
        for name in names:
            if asked and name not in asked:
                found[kind][name] = kept[kind][name]
                continue
            with tempfile.TemporaryDirectory() as folder:
                found[kind][name] = play(name, Path(folder), whole=kind == "whole")
    PINS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
