"""Options and arguments that several commands have in common."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType
from typing import Annotated, Final

import typer

from fedveil.console import Terminal

OUT: Final = Terminal()
"""Where commands print."""

Json = Annotated[bool, typer.Option("--json", help="print one JSON object and nothing else")]
Source = Annotated[str, typer.Argument(metavar="PRESET_OR_TOML", help="a preset's name or a TOML file")]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="KEY=VALUE laid over every experiment; KEY= takes KEY away")
]
Quick = Annotated[bool, typer.Option("--quick", help="the preset's small scale: about a minute")]
Scenario = Annotated[
    list[str] | None, typer.Option("--scenario", help="only this scenario (may be repeated)")
]
Variant = Annotated[list[str] | None, typer.Option("--variant", help="only this variant (may be repeated)")]
Seeds = Annotated[int, typer.Option("--seeds", min=1, help="runs per variant, with consecutive seeds")]
Listed = Annotated[bool, typer.Option("--transcript", help="list every message of a protocol")]
Runs = Annotated[Path, typer.Option("--runs", help="folder that run folders are made in")]


def end_by_terminate() -> None:
    """Let SIGTERM end a command as Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
