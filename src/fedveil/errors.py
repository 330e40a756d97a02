"""Define the errors that a user can cause; the command line shows each as one line with its exit code.

A message names the file, key, silo or row, states the value found and the accepted value, and never repeats a private
value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Final, Self, TypeVar

_Error = TypeVar("_Error", bound="FedveilError")

_SHORTEST: Final = 3
"""Fewest characters for which a name's beginning counts as that name."""
_LONGEST: Final = 200
"""Longest text that an error repeats."""
_MOST_BITS: Final = 128
"""Longest whole number that an error repeats."""


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return the end of an error about an unknown name: a suggestion, or "" if no known name is near."""
    lowered = {candidate.lower(): candidate for candidate in reversed(list(names))}
    begun = [
        candidate for candidate in lowered if len(name) >= _SHORTEST and candidate.startswith(name.lower())
    ]
    near = begun or get_close_matches(name.lower(), lowered, n=1)
    return f"; did you mean '{lowered[near[0]]}'?" if near else ""


def show_argument(value: object) -> str:
    """Return an argument for an error: a single word or number as it is, anything else by its type alone.

    A table, a list or a long text that was handed over by mistake may hold private values.

    >>> show_argument(-1), show_argument("lineer"), show_argument([1, 2])
    ('-1', "'lineer'", 'a value of list')
    """
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        with suppress(RuntimeError, TypeError, ValueError):  # no tensor on the meta device has a value
            value = value.item()  # type: ignore[attr-defined]  # a number of numpy or PyTorch
    simple = value is None or isinstance(value, bool | float | str) or type(value) is int
    if not simple or (isinstance(value, int) and value.bit_length() > _MOST_BITS):
        return f"a value of {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"a text of {len(text) - 2} characters"


class FedveilError(Exception):
    """Base of every error that a user can cause and can correct."""

    exit_code = 2

    def __reduce__(self) -> Any:
        """Return the error for pickle: a worker process of a sweep hands its errors on.

        By default an error is read back by a call of its class with the message alone, and a class may take more.
        """
        return _restored, (type(self), self.args, vars(self))

    def with_place(self, place: str) -> Self:
        """Return the error, of the same class and with the same attributes, with a place before its message."""
        return _restored(type(self), (f"{place}: {self}",), vars(self))


def _restored(kind: type[_Error], args: tuple[Any, ...], attributes: Mapping[str, Any]) -> _Error:
    """Return an error of a class with this message and these attributes, without a call of the class."""
    error = kind.__new__(kind)
    error.args = args
    vars(error).update(attributes)
    return error


class ConfigError(FedveilError):
    """Experiment that requests something nonexistent or impossible; names the key's path."""


class CompositionError(ConfigError):
    """Stages that cannot be combined in one method; gives the reason."""


class DataError(FedveilError):
    """Table, schema or download with unexpected content; names the file, the column or the row."""


class ModelError(FedveilError):
    """Model, loss or metric that cannot be trained as requested (for instance, a layer mixes records)."""


class PrivacyError(FedveilError):
    """A privacy parameter outside its domain, or an event that an accountant does not support."""


class BudgetError(PrivacyError):
    """Request that exceeds the privacy budget."""

    exit_code = 4


class TooFewPeopleWarning(UserWarning):
    """So few people that noise is a large part of a model at an epsilon; computed from public numbers."""


class LargeDeltaWarning(UserWarning):
    """A delta that allows to publish the records of a share of a person in expectation."""


class UserCodeError(FedveilError):
    """Exception in the user's own code; names function, file, line and kind of exception, and no value."""


class RunFolderError(FedveilError):
    """Run folder that is missing, damaged, locked or of another version."""


class RefusedRunError(FedveilError):
    """Run between institutions that ended before its first round; gives the reason."""

    exit_code = 3


class SilentSiloError(FedveilError):
    """Run between institutions that ended because silos did not answer; names them, and how to resume."""

    exit_code = 5


class CoordinatorGoneError(RunFolderError):
    """Coordinator process that ended before its run did; says how to resume the run."""

    exit_code = 6


class BusyError(ConfigError):
    """Resource that is not available now (not served yet, or in use); a later attempt may succeed."""

    exit_code = 75


class HostError(FedveilError):
    """Fault of this host: a full disk, no memory, a process that was killed; the same command may succeed later."""

    exit_code = 74


class IntegrityError(RunFolderError):
    """Stored data that was changed: ledger lines are missing, or a signature or digest does not match."""

    exit_code = 7


# --- cryptography ---


class CryptoError(FedveilError):
    """Invalid key, signature, ciphertext or key file; the message never contains secret material."""


# --- quantization ---


class ChannelError(FedveilError):
    """Base of the errors of the quantization package."""


class UnsupportedPairError(ChannelError, CompositionError):
    """Law and lattice that cannot form a channel together; the message gives the reason."""


class UpdateError(ChannelError):
    """Update that must not be sent: not finite, too large for the noise, or of the wrong shape."""


class StreamReuseError(ChannelError):
    """Second use of a shared stream, which would reveal the difference of two updates."""


class MessageError(ChannelError):
    """Bytes that are no message of this version, or are truncated, altered or oversized."""


class ForeignStreamError(MessageError):
    """Well-formed message made with another shared stream: another key, run, client, round or attempt."""


# --- protocols ---


class ProtocolError(FedveilError):
    """Refused message, or violated condition of the protocol; it ends the round.

    Attributes:
        silo: number of the silo that caused the error; None for the server or for a setting.
        reason: the value found and the value that would be right; never a private value.
    """

    def __init__(self, reason: str, *, silo: int | None = None) -> None:
        self.silo, self.reason = silo, reason
        super().__init__(reason if silo is None else f"silo {silo}: {reason}")


class OwnRecordsError(ProtocolError):
    """A request does not fit the silo's own records; the refusal sent to the coordinator does not say how."""


class RefusedSumError(ProtocolError):
    """A silo refuses the decrypted sum of a round. The sum depends on the messages of other silos."""


class SiloVanished(ProtocolError):
    """Silos did not answer; the attempt is over, their vectors stay masked, the round may be repeated.

    Attributes:
        silos: numbers of the silos that did not answer.
        may_have_released: whether the opening of the sum had begun; if so, the attempt must be charged.
    """

    def __init__(self, silos: tuple[int, ...], *, may_have_released: bool) -> None:
        self.silos, self.may_have_released = silos, may_have_released
        when = (
            "after the opening of the sum had begun: the attempt counts as released"
            if may_have_released
            else "before the opening of the sum had begun: nothing was revealed"
        )
        super().__init__(f"silos {', '.join(map(str, silos))} vanished {when}")
