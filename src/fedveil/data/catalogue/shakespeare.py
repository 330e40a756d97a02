"""Shakespeare's plays by speaking role: next-character prediction from the plain text, as in LEAF.

A client is a role of a play. A sample is a window of 80 characters of the role's speech and the next character. The
windows of a role are split in the order of the play: 0.7 for training, 0.1 set aside (validation), 0.2 for testing.
Clients are the roles with at least 100 training samples.

In the text, a speech begins with two blanks, the role and a full stop, and continues in lines with an indent of four.
The Comedy of Errors has lost its indentation: any line continues the speech, and a stage direction (``<``) ends it.
Roles with at most two lines and plays with a single role are left out. Caldas et al., "LEAF: A Benchmark for
Federated Settings", 2018; McMahan et al., AISTATS 2017.
"""

import re
from dataclasses import dataclass

import numpy as np
from jaxtyping import UInt8

from fedveil.data.catalogue.data_set import DataFile, DataSet, Request, Store
from fedveil.data.records import Affine, Population, Records
from fedveil.errors import ConfigError, DataError

WINDOW = 80
LEAST_TRAINING_SAMPLES = 100
ALPHABET = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"  # LEAF's 80 characters
CLASSES = 82
TEST_WINDOWS_PER_ROLE = 50

_BY_LINE = "by William Shakespeare"
_LAST_LINE = 124_195  # of the plays; the licence follows
_BEFORE_TITLE = 5
_SPEECH, _MORE = re.compile(r"  ([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"    (.*)")
_FLUSH_SPEECH, _FLUSH_MORE = re.compile(r"([a-zA-Z][a-zA-Z ]*)\. (.*)"), re.compile(r"(.*)")
_FLUSH_PLAY = "THE COMEDY OF ERRORS"


@dataclass
class _Play:
    """Parser state of one play: the lines of each role, and the current speaker (None outside a speech)."""

    title: str
    roles: dict[str, list[str]]
    speaker: str | None = None

    def read(self, line: str) -> None:
        """Add one line of the text to the current or a new speech."""
        flush = self.title == _FLUSH_PLAY
        begins = (_FLUSH_SPEECH if flush else _SPEECH).match(line)
        if begins:
            role = begins[1].upper()
            self.speaker = None if flush and role.startswith("ACT ") else role
            if self.speaker is not None:
                self.roles.setdefault(role, []).append(begins[2])
            return
        match = (_FLUSH_MORE if flush else _MORE).match(line) if self.speaker else None
        if match is None or self.speaker is None:
            return
        if flush and match[1].startswith("<"):
            self.speaker = None
        else:
            self.roles[self.speaker].append(match[1])


def roles_of(text: str) -> dict[str, str]:
    """Return the speech of every role, by play and role, in the order of the text.

    Raises:
        DataError: the text does not contain plays in the expected form.
    """
    lines = text.splitlines()[1:]
    # The eBook begins with the sonnets, so the plays begin with the second line that names the author.
    works = [i for i, line in enumerate(lines) if _BY_LINE in line]
    if len(works) < 2:
        raise DataError(
            f"the text has no two lines with '{_BY_LINE}'; take Project Gutenberg's eBook 100 of 2011"
        )
    plays: list[_Play] = []
    for i in range(works[1] - _BEFORE_TITLE, min(len(lines), _LAST_LINE + 1)):
        if _BY_LINE in lines[i]:
            title = next((lines[i - k].strip() for k in range(2, 8) if lines[i - k].strip()), "")
            plays.append(_Play(title, {}))
        elif plays:
            plays[-1].read(lines[i])
    spoken: dict[str, list[str]] = {}
    for play in plays:
        if len(play.roles) > 1:
            for role, speech in play.roles.items():
                if len(speech) > 2:
                    spoken.setdefault(f"{play.title}: {role}", []).extend(speech)
    return {name: re.sub("  +", " ", " ".join(speech) + " ") for name, speech in spoken.items()}


def encode(text: str) -> UInt8[np.ndarray, " n"]:
    """Return the (n,) index of each character in :data:`ALPHABET`; an unknown character has the index 80."""
    table = np.full(0x110000, len(ALPHABET), dtype=np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return np.asarray(table[np.array([ord(character) for character in text], dtype=np.int64)])


def _build(request: Request, source: Store, files: tuple[DataFile, ...]) -> Population:
    if request.allocation.law != "clients":
        raise ConfigError('shakespeare comes by role: give data.allocation.law = "clients"')
    text = source.path(files[0]).read_text(encoding="utf-8-sig")
    codes = {name: encode(speech) for name, speech in roles_of(text).items()}
    eligible = [
        name for name, speech in codes.items() if int(0.7 * (len(speech) - WINDOW)) >= LEAST_TRAINING_SAMPLES
    ]
    if request.n_users > len(eligible):
        raise ConfigError(
            f"n_users = {request.n_users}: {len(eligible)} roles have {LEAST_TRAINING_SAMPLES} training samples or more"
        )
    drawn = request.randomness.numpy("shakespeare", "roles").choice(
        len(eligible), request.n_users, replace=False
    )
    names = [eligible[i] for i in np.sort(drawn)]
    windows = [np.lib.stride_tricks.sliding_window_view(codes[name], WINDOW + 1) for name in names]
    # LEAF's split in the order of the play: 0.7 for training, up to 0.8 unused, the rest for testing.
    sizes = np.array([int(0.7 * len(rows)) for rows in windows])
    train = np.concatenate([rows[:size] for rows, size in zip(windows, sizes, strict=True)])
    held_out = [rows[int(0.8 * len(rows)) :] for rows in windows]
    test = np.concatenate([rows[:: max(1, len(rows) // TEST_WINDOWS_PER_ROLE)] for rows in held_out])
    user = np.repeat(np.arange(len(names), dtype=np.int32), sizes)
    part = (
        f"{len(names)} of the {len(eligible)} roles, drawn by the seed"
        if len(names) < len(eligible)
        else "all"
    )
    return Population(
        name="shakespeare",
        train=Records(
            features=np.ascontiguousarray(train[:, :WINDOW]),
            targets=train[:, WINDOW].astype(np.int64),
            silo=user.copy(),
            user=user,
        ),
        test_features=np.ascontiguousarray(test[:, :WINDOW]),
        test_targets=test[:, WINDOW].astype(np.int64),
        n_users=request.n_users,
        silo_names=tuple(names),
        task="classification",
        n_classes=CLASSES,
        scale=Affine(),
        notes=(
            f"Clients are speaking roles with at least {LEAST_TRAINING_SAMPLES} training samples: {part}.",
            "The first 0.7 of a role's windows are trained on, the next 0.1 are not used; of the last 0.2 about "
            f"{TEST_WINDOWS_PER_ROLE} windows a role, evenly spaced, are tested on. Windows overlap, so that the last "
            "training windows share text with the first unused ones, not with the test.",
        ),
    )


SHAKESPEARE = DataSet(
    name="shakespeare",
    title="The plays of William Shakespeare by speaking role, next character after 80",
    records="975 roles with 2.9 million training windows; about 50 test windows a role",
    terms="Project Gutenberg eBook 100; electronic version copyright 1990-1993 World Library, Inc., free to copy for "
    "non-commercial use with its notices.",
    variants=(
        (
            DataFile(
                path="shakespeare/pg100.txt",
                sha256="7a8203c516f67bc90e1dba9e3de401a3c4118cd21bc93dbe9724eee1c83660c7",
            ),
        ),
    ),
    build=_build,
    model="lstm",
)
