"""Run folders for the tests of reports: every file as the engine writes it, with made-up numbers.

And a reader of pages that sees what in them could act.
"""

import json
import math
from html.parser import HTMLParser
from pathlib import Path

from fedveil.privacy.claims import Role
from fedveil.privacy.events import Adjacency, GaussianEvent, NoGuarantee
from fedveil.privacy.statement import AsPublished, Disclosure, Statement, Unit

JsonFields = dict[str, object]


def statement(*, epsilon: float | None = 2.5, unit: Unit = "user") -> JsonFields:
    """A statement as the privacy package writes it."""
    none = epsilon is None
    return dict(
        Statement(
            unit=unit,
            adjacency=Adjacency.REPLACE_ONE if unit == "record" else Adjacency.ADD_OR_REMOVE_ONE,
            epsilon=epsilon,
            delta=1e-5,
            accountant="pld",
            epsilons=(("pld", epsilon), ("rdp", None if epsilon is None else 1.12 * epsilon)),
            event=NoGuarantee(reason="no noise is added") if none else GaussianEvent(noise_multiplier=5.0),
            units=100,
            mechanisms=()
            if none
            else ("Gaussian noise, noise multiplier 5, every user in each of 30 rounds",),
            trust=(
                Disclosure(
                    role=Role.SERVER,
                    party="the server",
                    sees="every silo's sum before noise",
                    epsilon=None,
                    event=NoGuarantee(reason="no noise is added"),
                ),
                Disclosure(
                    role=Role.READER,
                    party="a reader of the models",
                    sees="the model of every round",
                    epsilon=epsilon,
                    event=NoGuarantee(reason="no noise is added")
                    if none
                    else GaussianEvent(noise_multiplier=5.0),
                ),
            ),
            randomness="the operating system's cryptographic source",
            secure_randomness=True,
            uncovered=("the learning rate was chosen by hand",),
            as_published=(AsPublished(name="one-round epsilon", value=1.25, gap="rounds are not composed"),),
            reasons=("contributions are not clipped", "no noise is added") if none else (),
        ).to_json()
    )


def metric_rows(*, rounds: int, epsilon: float | None = 2.5, best: float = 0.9) -> list[JsonFields]:
    """Row 0 is the initial model; accuracy climbs to `best`, epsilon as the square root of the rounds."""
    rows: list[JsonFields] = []
    for number in range(rounds + 1):
        progress = 1 - math.exp(-number / 6)
        norm = 1.4 - 0.8 * progress
        row: JsonFields = {
            "schema_version": 1,
            "round": number,
            "seconds": 0.8 + 0.02 * (number % 3),
            "test": {"accuracy": 0.1 + (best - 0.1) * progress, "loss": 2.3 - 1.6 * progress},
            "epsilon": None
            if epsilon is None and number
            else (epsilon or 0.0) * math.sqrt(number / max(rounds, 1)),
            "clip": 1.0 if epsilon is not None else None,
        }
        if number:
            row |= {
                "contributions": 500,
                "participants": 100,
                "nonfinite": 0,
                "norms": [norm * f for f in (0.1, 0.4, 0.7, 1.0, 1.3, 1.7, 3.1)],
                "clipped": 0.9 - 0.6 * progress if epsilon is not None else None,
            }
        rows.append(row)
    return rows


def diagnostics() -> JsonFields:
    return {
        "schema_version": 1,
        "records_per_user": {
            "quantiles": [1, 3, 4, 6, 8, 11, 14, 18, 26, 41, 133],
            "users_with_records": 97,
            "users": 100,
        },
        "records_per_silo": [702, 352, 176, 118, 89],
        "silo_names": ["north", "south", "east", "west", "harbour"],
    }


def write_run(
    folder: Path,
    *,
    name: str = "digits-avg-w",
    seed: int = 0,
    rounds: int = 30,
    epsilon: float | None = 2.5,
    unit: Unit = "user",
    best: float = 0.9,
    settings: str = "[method]\nname = 'uldp-avg-w'\n",
) -> Path:
    """A complete run folder."""
    folder.mkdir(parents=True)
    folder.joinpath("experiment.toml").write_text(
        f"schema_version = 2\nname = '{name}'\nseed = {seed}\n\n{settings}"
    )
    lines = [json.dumps(row) + "\n" for row in metric_rows(rounds=rounds, epsilon=epsilon, best=best)]
    folder.joinpath("metrics.jsonl").write_text("".join(lines))
    environment = {
        "schema_version": 1,
        "fedveil": "0.1.0",
        "python": "3.11.2",
        "torch": "2.13.0",
        "threads": 2,
    }
    for file, value in (
        ("privacy.json", statement(epsilon=epsilon, unit=unit)),
        ("diagnostics.json", diagnostics()),
        ("environment.json", environment),
    ):
        folder.joinpath(file).write_text(json.dumps(value))
    return folder


class Tags(HTMLParser):
    """Counts what could act: scripts, event handlers, anything that loads."""

    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[dict[str, str | None]] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "script":
            self.scripts.append(dict(attrs))
        if tag in {"img", "link", "iframe", "object", "embed", "base", "form"}:
            self.loads.append(tag)
        for name, value in attrs:
            if name.startswith("on"):
                self.handlers.append(name)
            if name in {"src", "href"} and not (value or "").startswith("#"):
                self.loads.append(f"{tag} {name}")
