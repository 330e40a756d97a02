"""Every error a user can cause, so that the command line can answer with one line and the exit code of its kind.

An error names the file, key, silo or row, says what was found and what would be right, and never repeats a private
value.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

_SHORTEST: Final = 3
"""Characters of a beginning that is taken for a name."""


def did_you_mean(asked: str, known: Iterable[str]) -> str:
    """Return the end of an error about a name that nothing has: which name was meant, empty where none is near."""
    lowered = {one.lower(): one for one in reversed(list(known))}
    begun = [one for one in lowered if len(asked) >= _SHORTEST and one.startswith(asked.lower())]
    near = begun or get_close_matches(asked.lower(), lowered, n=1)
    return f"; did you mean '{lowered[near[0]]}'?" if near else ""


class FedveilError(Exception):
    """Base of every error that a user can cause and can mend."""

    exit_code = 2


class ConfigError(FedveilError):
    """An experiment asks for something that does not exist or cannot be; names the key's path."""


class CompositionError(ConfigError):
    """Stages that cannot go together in one method; gives the reason."""


class DataError(FedveilError):
    """A table, a schema or a download is not what it claims to be; names the file, the column or the row."""


class ModelError(FedveilError):
    """A model, loss or metric that cannot be trained as asked (a layer that mixes records, for instance)."""


class PrivacyError(FedveilError):
    """A privacy parameter outside its domain, or an event that an accountant does not support."""


class BudgetError(PrivacyError):
    """The privacy budget does not allow what was asked."""

    exit_code = 4


class UserCodeError(FedveilError):
    """Code of a user's own has raised: names function, file, line and the kind of exception, and no value."""


class RunFolderError(FedveilError):
    """A run folder that is missing, damaged, locked or of another version."""


class RefusedRunError(FedveilError):
    """A run between institutions that ended before its first round; says why."""

    exit_code = 3


class SilentSiloError(FedveilError):
    """A run between institutions that ended because silos did not answer; names them, and says how to go on."""

    exit_code = 5


class CoordinatorGoneError(RunFolderError):
    """The coordinator's process ended before the run that it played; says how to go on."""

    exit_code = 6


class BusyError(ConfigError):
    """What is asked for is not there at the moment (not served yet, in use): asked again later it may be."""

    exit_code = 75


class IntegrityError(RunFolderError):
    """What a party keeps is not what it was: lines of a ledger are missing, a signature or a digest does not fit."""

    exit_code = 7
