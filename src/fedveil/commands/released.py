"""Folders of releases, by the document in them: what goes on with one that was interrupted, and what shows one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from fedveil.commands.inference import go_on_with_inference, print_inference
from fedveil.commands.statistics import go_on_with_release, print_release
from fedveil.engine.experiments.release_document import INFERENCE, STATISTICS

_Command = Callable[[Path, bool], None]

GO_ON: Final[Mapping[str, _Command]] = {STATISTICS: go_on_with_release, INFERENCE: go_on_with_inference}
RELEASES: Final[Mapping[str, _Command]] = {STATISTICS: print_release, INFERENCE: print_inference}
