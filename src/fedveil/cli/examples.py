"""Examples of every command, printed at the end of its ``--help``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EXAMPLES: Final[Mapping[str, tuple[str, ...]]] = {
    "run": (
        "fedveil run digits",
        "fedveil run digits --variant uldp-avg-w --set method.noise_multiplier=2.0",
        "fedveil run hospitals.toml --runs results",
    ),
    "resume": ("fedveil resume runs/hospitals",),
    "check": ("fedveil check hospitals.toml", "fedveil check digits --quick"),
    "check-data": ("fedveil check-data schema.toml north.csv south.csv --page look.html",),
    "sweep": ("fedveil sweep hospitals.toml --over method.clip=0.5,1.0 --over rounds=10,20 --processes 2",),
    "plan": (
        "fedveil plan --users 300 --silos 3 --rounds 20 --epsilon 2",
        "fedveil plan --users 300 --silos 3 --epsilon 2 --over rounds=10,20,50 --parameters 6",
    ),
    "stats": ("fedveil stats cohort.toml --plan", "fedveil stats cohort.toml"),
    "infer": ("fedveil infer odds.toml --plan", "fedveil infer odds.toml"),
    "show": (
        "fedveil show runs/odds",
        "fedveil show runs/cohort --cross sick,ward --quantile age=.1,.9",
    ),
    "spent": ("fedveil spent runs/cohort runs/odds runs/model",),
    "report": ("fedveil report runs/hospitals",),
    "compare": ("fedveil compare runs/digits", "fedveil compare runs/sweep --against method.clip"),
    "bundle": ("fedveil bundle runs/hospitals -o hospitals.zip --about 'Tells who needs a bed.'",),
    "predict": ("fedveil predict hospitals.zip new.csv -o predicted.csv --keep patient",),
    "export": ("fedveil export hospitals.zip --onnx model.onnx",),
    "sign": ("fedveil sign hospitals.zip --key identity.pem --new-key",),
    "verify": ("fedveil verify runs/hospitals", "fedveil verify hospitals.zip"),
    "audit": ("fedveil audit runs/hospitals",),
    "presets": ("fedveil presets", "fedveil presets digits > mine.toml"),
    "methods": ("fedveil methods",),
    "stages": ("fedveil stages denoisers",),
    "data": ("fedveil data", "fedveil data heart_disease"),
    "schema": ("fedveil schema sample.csv --user patient --label sick -o schema.toml",),
    "bench": ("fedveil bench accounting --quick",),
    "reproduce": ("fedveil reproduce", "fedveil reproduce figure-6 --seeds 1"),
    "federation": ("fedveil federation demo demo --rounds 5",),
    "federation create": ("fedveil federation create founder --host learn.example.org --schema schema.toml",),
    "federation admit": (
        "fedveil federation admit founder coordinator.request north.request",
        "fedveil federation admit founder north.request --fingerprint "
        "'request 9f31 0d2c 55e8 7a46 11b9 e0c7 6a2f 84d3'",
    ),
    "federation revoke": ("fedveil federation revoke founder north --reason 'left the study'",),
    "federation seal": ("fedveil federation seal founder",),
    "federation demo": ("fedveil federation demo demo --rounds 5",),
    "federation status": ("fedveil federation status coordinator --html federation.html",),
    "federation check": ("fedveil federation check north",),
    "federation run": (
        "fedveil federation run hospitals.toml --home coordinator --dry-run",
        "fedveil federation run hospitals.toml --home coordinator",
        "fedveil federation run --home coordinator --resume coordinator/runs/hospitals",
    ),
    "status": ("fedveil status north",),
    "health": ("fedveil health north",),
    "deploy flower": ("fedveil deploy flower app --bridge /srv/fedveil/coordinator/link/run/bridge",),
    "deploy nvflare": (
        "fedveil deploy nvflare job --bridge /srv/fedveil/coordinator/link/run/bridge --silo site-1=north",
    ),
    "deploy write": ("fedveil deploy write units --memory 4G",),
    "coordinator join": (
        "fedveil coordinator join coordinator --charter charter.toml --listen 0.0.0.0:9443",
    ),
    "coordinator accept": (
        "fedveil coordinator accept coordinator sealed/membership.toml --fingerprint "
        "'membership b7d4 1f60 2a9c e835 0c41 97fe d6a2 5b13'",
    ),
    "coordinator serve": (
        "fedveil coordinator serve coordinator",
        "fedveil coordinator serve coordinator --accept sealed/membership.toml",
    ),
    "silo join": ("fedveil silo join north --name north --charter charter.toml --table north.csv",),
    "silo accept": (
        "fedveil silo accept north sealed/membership.toml --fingerprint "
        "'membership b7d4 1f60 2a9c e835 0c41 97fe d6a2 5b13'",
    ),
    "silo serve": ("fedveil silo serve north", "fedveil silo serve north --accept sealed/membership.toml"),
    "silo ledger export": ("fedveil silo ledger export north --output north.json",),
}
"""By the words of a command behind ``fedveil``."""


def show_examples(command: Any, words: str) -> None:
    """Have the help of a command, and of those in its group, end with their examples.

    Args:
        command: click's object of it.
        words: of the command, behind ``fedveil``.
    """
    if examples := EXAMPLES.get(words):
        command.epilog = "\n\n".join(("Examples:", *examples))
    for name, inner in getattr(command, "commands", {}).items():
        show_examples(inner, f"{words} {name}")
