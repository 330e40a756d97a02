"""Every error a user can cause, so that the command line can answer with one line and the exit code of its kind.

An error names the file, key, silo or row, says what was found and what would be right, and never repeats a private
value.
"""


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
