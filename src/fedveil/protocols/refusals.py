"""Encode a silo's refusal as a code and numbers; the reader's own software turns them into a sentence.

Claim: a refusal carries no text of its sender, no path and no name. About the silo's private records it discloses at
most that they do not allow the request. Condition: the numbers of a code come from the request or from the silo's
policy. :class:`Refusal` enforces the claim: it has no other fields and refuses numbers that its code does not name.
``tests/test_refusal_codes.py`` checks every statement of the code base that raises a refusal.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from string import Formatter
from typing import Final, Literal

from fedveil.errors import FedveilError, ProtocolError
from fedveil.protocols.field_codecs import FieldCodec, fixed_bytes, number, pair, repeated

Cause = Literal["policy", "budget", "schema", "replay", "state", "storage", "request", "integrity"]
"""Kind of the reason for a refusal.

    policy     the silo's policy does not allow the request
    budget     the users' privacy budget does not suffice
    schema     the federation documents (membership, schema, main silos) differ, or cannot be used
    replay     the request repeats or contradicts an earlier exchange, round or charge
    state      the silo's persisted state contradicts the request or itself
    storage    the silo cannot read or write its disk
    request    the request itself is not valid
    integrity  lines are missing from the silo's ledger
"""


class Code(Enum):
    """Reason for a refusal: its number on the wire, its kind, and a sentence template with named numbers."""

    METHOD = 1, "policy", "its policy does not allow method.name"
    MODEL = 2, "policy", "its policy does not allow model.name"
    LOSS = 3, "policy", "its policy does not allow model.loss"
    PROTECTION = 4, "policy", "its policy does not allow protection.name"
    PACKAGE = (
        5,
        "policy",
        "no package in the silo's policy provides a component that the experiment names, or several do",
    )
    VERSION = (
        68,
        "policy",
        "the silo has another version of a package that provides a component of the experiment; the "
        "silo's log names both",
    )
    KNOWN_SEED = (
        6,
        "policy",
        "privacy.insecure_seed: noise from a known seed gives no privacy; remove the key",
    )
    CLIP = (
        7,
        "policy",
        "method.clip: this silo allows at most {clip:g}, for an adaptive clip as the value of "
        "method.clip.most",
    )
    UNBOUNDED = (
        8,
        "policy",
        "the method does not bound one user's contribution",
    )
    DISCLOSES_COUNTS = (
        9,
        "policy",
        "the coordinator would learn the number of records of each user at each silo, and every silo the "
        "total of each user, without noise; use uldp-avg or private weighting, or allow it by "
        "disclose_counts with trust_coordinator and trust_silos",
    )
    NOT_AGAINST_READERS = (
        10,
        "policy",
        "nothing is guaranteed against readers of the models; allow it by without_guarantee",
    )
    NOT_AGAINST_COORDINATOR = (
        11,
        "policy",
        "nothing is guaranteed against the coordinator; allow it by trust_coordinator",
    )
    NOT_AGAINST_SILOS = 12, "policy", "nothing is guaranteed against another silo; allow it by trust_silos"
    RUN_BUDGET = (
        13,
        "budget",
        "{rounds:.0f} rounds would exceed the privacy budget of this silo's users, epsilon {epsilon:g} at "
        "delta {delta:g} over all runs; use fewer rounds, or more noise",
    )
    ROUND_BUDGET = (
        14,
        "budget",
        "the round would exceed the privacy budget of this silo's users over all runs",
    )
    MEMBERSHIP = 15, "schema", "the coordinator has another membership or schema; compare membership.toml"
    EXCHANGE_OVER = (
        17,
        "replay",
        "exchange {number:.0f} has ended; the last exchange was {last:.0f}",
    )
    OTHER_MESSAGE = (
        18,
        "replay",
        "the silo has already received another message in this exchange",
    )
    NO_SUCH_ROUND = 19, "replay", "the run has rounds 1 to {rounds:.0f}"
    ROUND_OVER = (
        20,
        "replay",
        "round {round:.0f} has ended; the last answered round is {last:.0f}",
    )
    ROUND_AHEAD = (
        21,
        "replay",
        "round {round:.0f} does not follow round {last:.0f}, the last answered round",
    )
    REPEATED = (
        73,
        "replay",
        "the answer to round {round:.0f} was sent {times:.0f} times, the most that the guarantee covers; "
        "begin another run",
    )
    ASKED_OTHERWISE = (
        22,
        "replay",
        "round {round:.0f} was answered for another experiment, model, clip or sample of users",
    )
    OTHER_BINDING = (
        23,
        "replay",
        "round {round:.0f} was answered for other records of its users, or silo 0 lost the secret that "
        "orders the votes",
    )
    OTHER_LENGTH = (
        24,
        "replay",
        "the stored model of round {round:.0f} has {found:.0f} parameters instead of {asked:.0f}",
    )
    OTHER_SERVER = (
        25,
        "replay",
        "the stored state of round {round:.0f} belongs to another server optimiser",
    )
    UNENDED = (
        26,
        "state",
        "round {round:.0f} is not complete at this silo and must be repeated",
    )
    OTHER_SUM = (
        27,
        "state",
        "in round {round:.0f} the silo decrypted a value that cannot be the silos' sum, or two different "
        "sums; it contributes nothing more to the run, and its log gives the reason",
    )
    REPLACED = (
        28,
        "state",
        "the ledger and the stored answers of this run disagree: one of them was replaced",
    )
    WEIGHTS = (
        29,
        "state",
        "the weights differ from those that the guarantee was computed for",
    )
    RECORDS = (
        69,
        "state",
        "the records, or their users, differ from those at the beginning of the correlated noise",
    )
    STORAGE = (
        30,
        "storage",
        "the silo cannot read or write its state; its log gives the reason",
    )
    SHAPE = (
        31,
        "request",
        "a message of another shape than the state of the session allows: its sender runs another "
        "version, or is in another state; nothing was changed",
    )
    USERS = 32, "request", "{found:.0f} users instead of {expected:.0f}"
    PARAMETERS = 33, "request", "the model has {found:.0f} parameters instead of {expected:.0f}"
    EXPERIMENT_LENGTH = (
        34,
        "request",
        "the experiment exceeds a silo's limits on length, depth or number of values ({bytes:.0f} bytes)",
    )
    EXPERIMENT = (
        35,
        "request",
        "this silo's version cannot read the experiment, or cannot run it between institutions; its log "
        "gives the reason",
    )
    PROTOCOL = (
        36,
        "request",
        "a message of the protocol is invalid; the silo's log gives the reason",
    )
    OF_SILO = (
        74,
        "request",
        "a message that was relayed from silo {silo:.0f} is invalid; the log of the refusing silo gives "
        "the reason",
    )
    OWN_RECORDS = (
        37,
        "request",
        "the silo's records do not fit the request; its log gives the reason",
    )
    ASKED_APART = (
        38,
        "request",
        "silo {silo:.0f} received another request in this round than this silo",
    )
    ASKED_FEW = (
        39,
        "request",
        "{silos:.0f} silos signed the request of this round; {least:.0f} are needed",
    )
    UNSHOWN = (
        71,
        "request",
        "silo {silo:.0f} counts as a contributor to the round, but its ledger head after its contribution "
        "was not relayed",
    )
    HEADS = (
        40,
        "request",
        "silo {silo:.0f} did not sign the ledger heads that were relayed as its own",
    )
    HEADS_FEW = (
        46,
        "request",
        "{silos:.0f} other silos sent the last ledger head that they know of this silo; {least:.0f} are "
        "needed",
    )
    RELEASE = (
        60,
        "policy",
        "its policy does not allow one of the requested releases",
    )
    COLUMN = 70, "policy", "its policy does not allow one of the columns that a release reads"
    CLIP_MOVED = (
        65,
        "request",
        "method.clip cannot be {clip:g} in round {round:.0f} (0 replaces a number that is not finite)",
    )
    DIMENSION = 61, "policy", "a release has {numbers:.0f} numbers; this silo allows at most {most:.0f}"
    PRECISION = (
        62,
        "policy",
        "the noise on a release has a standard deviation of {std:g} people; this silo requires at least "
        "{least:g}",
    )
    BY_SILO = (
        63,
        "policy",
        "its policy does not allow figures by silo",
    )
    RELEASED = (
        64,
        "request",
        "the earlier releases do not fit the request",
    )
    ROUNDS = (
        41,
        "policy",
        "rounds = {asked:.0f}: this silo allows at most {most:.0f}",
    )
    EPOCHS = 42, "policy", "local.epochs = {asked:.0f}: this silo allows at most {most:.0f}"
    LARGE_MODEL = (
        43,
        "policy",
        "the model has {found:.0f} parameters; this silo allows at most {most:.0f}",
    )
    OTHER_EXPERIMENT = (
        66,
        "replay",
        "the run was charged under another experiment",
    )
    OVERTIME = (
        44,
        "policy",
        "the round took longer than this silo's limit of {seconds:.0f} s",
    )
    STATEMENT = (
        49,
        "request",
        "the statement of the run differs from the one that this silo computes from its terms",
    )
    RUN_OVER = (
        50,
        "replay",
        "this silo has signed the end of the run: it contributes to no further round, and signs no other end",
    )
    STANDING = (
        45,
        "schema",
        "the silo's membership or policy cannot be read, has expired, or was replaced since the silo "
        "opened it; its log gives the reason",
    )
    MAIN_SILOS = (
        67,
        "schema",
        "its file of main silos is not the one that method.power names; compare the files that silo.toml names",
    )
    LATER_HEAD = (
        72,
        "integrity",
        "silo {silo:.0f} has signed that it knows a ledger head of this silo that is not in its ledger: "
        "lines are missing here, or that silo is wrong",
    )
    INTEGRITY = (
        16,
        "integrity",
        "lines are missing from the silo's ledger; its log gives the reason",
    )

    def __init__(self, number: int, cause: Cause, template: str) -> None:
        self.number, self.cause, self.template = number, cause, template
        self.names = tuple(name for _, name, _, _ in Formatter().parse(template) if name)


_CODES: Final = {code.number: code for code in Code}
_FLOAT: Final = struct.Struct(">d")


@dataclass(frozen=True)
class Refusal:
    """Code of a refusal and the numbers that its sentence names.

    Attributes:
        code: reason for the refusal.
        numbers: finite numbers, in the order in which the sentence names them.

    Raises:
        ProtocolError: more or fewer numbers than the sentence names, or a number that is not finite.
    """

    code: Code
    numbers: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        """Check that the numbers are finite and fit the sentence."""
        if len(self.numbers) != len(self.code.names) or not all(map(math.isfinite, self.numbers)):
            raise ProtocolError(f"a refusal of code {self.code.number} has {len(self.code.names)} numbers")

    @property
    def sentence(self) -> str:
        """Reason for the refusal in words."""
        return self.describe(())

    def describe(self, silos: Sequence[str]) -> str:
        """Return the reason in words, with a silo's name in place of its number.

        Args:
            silos: names, by number; a number without a name stays a number.
        """
        values: dict[str, object] = dict(zip(self.code.names, self.numbers, strict=True))
        number = values.get("silo")
        if isinstance(number, float) and number.is_integer() and 0 <= number < len(silos):
            values["silo"] = _Name(silos[int(number)])
        return self.code.template.format(**values)


class RefusalError(FedveilError):
    """Refusal of a silo to do what the coordinator requests.

    Args:
        code: the reason.
        numbers: values for the sentence of the code; never private ones.
        detail: text for the silo's own log, in place of the sentence. The coordinator does not receive it.
        silo: name of the silo, if the coordinator reports the refusal.

    Attributes:
        why: the refusal that is sent to the coordinator: code and numbers.
    """

    exit_code = 3

    def __init__(
        self, code: Code, *numbers: float, detail: str | None = None, silo: str | None = None
    ) -> None:
        self.why = Refusal(code, tuple(map(float, numbers)))
        subject = "" if silo is None else f"silo {silo} "
        super().__init__(
            f"{subject}refuses ({code.cause}): {self.why.sentence if detail is None else detail}"
        )

    @property
    def cause(self) -> Cause:
        """Category of the reason."""
        return self.why.code.cause


class _Name(str):
    """Text that stands where a template formats a number."""

    def __format__(self, spec: str) -> str:
        return str(self)


def _code(number: int) -> Code:
    if number not in _CODES:
        raise ProtocolError(f"a refusal gives code {number}, which does not exist")
    return _CODES[number]


def _float(raw: bytes) -> float:
    value: float = _FLOAT.unpack(raw)[0]
    return value


REFUSAL: Final[FieldCodec[Refusal]] = pair(
    number(1).mapped(lambda code: code.number, _code),
    repeated(fixed_bytes(_FLOAT.size).mapped(_FLOAT.pack, _float), size=1),
).mapped(lambda refusal: (refusal.code, refusal.numbers), lambda read: Refusal(*read))
"""Codec of a refusal: the code (1 byte), the count of numbers (1 byte), and each number as a float64."""
