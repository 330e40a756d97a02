"""Check whether a method can run between institutions, where each silo sends one message a round."""

from __future__ import annotations

from fedveil.errors import CompositionError, OwnRecordsError
from fedveil.methods.capabilities import ClientSender, count_dropouts
from fedveil.methods.weights import NOT_WHOLE
from fedveil.privacy.events import Adjacency
from fedveil.run.setup import Prepared
from fedveil.stage import redefined


def check_deployable(prepared: Prepared) -> None:
    """Check that the silos and the coordinator of a federation can run an experiment's method.

    Raises:
        CompositionError: the method needs one of these: DP-SGD inside the silos, messages whose scale or number is
            private, simulated dropout, or clients that are not silos.
    """
    method = prepared.method
    if method.contribution.per == "client":
        _check_clients(prepared)
    elif method.contribution.per == "record":
        raise CompositionError(
            f"{method.name}: DP-SGD keeps a number of records of each user over all silos, and between institutions "
            "nobody knows whose: use fedavg, uldp-naive, uldp-sgd, uldp-sgd-w, uldp-avg or uldp-avg-w"
        )
    if method.weights.by_records and not method.weights.supports_user_totals:
        raise CompositionError(
            f"{method.name}: weights {method.weights.description}: between institutions {NOT_WHOLE}"
        )
    if method.weights.by_records and redefined(method.weights, "for_groups", "for_population"):
        raise CompositionError(
            f"{method.name}: {type(method.weights).__name__} defines for_groups(), and between institutions weights by "
            "records are computed from the silos' scores alone"
        )
    if redefined(method.sampler, "draw") and not method.draws:
        raise CompositionError(
            f"{method.name}: {type(method.sampler).__name__} defines draw(), and between institutions nobody is drawn "
            "where the sampler says that everyone takes part: set samples = True and a rate below 1"
        )
    if method.sampler.adjacency is Adjacency.REPLACE_ONE:
        unit = method.contribution.unit
        raise CompositionError(
            f"{method.name}: a sample without replacement is guaranteed against replacing a {unit}, and a silo's "
            f"ledger counts {unit}s that come or go; between institutions take Poisson sampling, or everyone"
        )
    if count_dropouts(method.channel) and method.protection.on_dropout != "recover":
        raise CompositionError(
            f'{method.name}: protection.on_dropout = "retry" with max_dropouts = {count_dropouts(method.channel)}: '
            'between institutions a round goes on without silos by on_dropout = "recover"; "end" waits for all of them'
        )
    if method.protection.dropout_rate:
        raise CompositionError(
            f"{method.name}: protection.dropout_rate lets silos vanish in a simulation; institutions do so by "
            "themselves: remove it"
        )
    if method.protection.divides and prepared.experiment.model.sha256 is not None:
        raise CompositionError(
            f"{method.name}: model.initial, model.sha256: under partial encryption the coordinator gives no model; "
            "silos begin with the one that the terms describe"
        )


def _check_clients(prepared: Prepared) -> None:
    """Refuse clients that are not silos, and settings that need facts about other silos' records."""
    method, population = prepared.method, prepared.population
    if population.n_users != population.n_silos:
        raise CompositionError(
            f"{method.name}: a client is a silo that holds one user; between {population.n_silos} institutions that "
            f"takes {population.n_silos} users, not {population.n_users}"
        )
    if method.calibrated_to == "nobody":
        raise CompositionError(
            f'{method.name}: calibration = "as-published" needs the records of the largest client, which no '
            "institution tells"
        )
    if isinstance(method.channel, ClientSender) and not method.channel.noise_known:
        raise CompositionError(
            f'{method.name}: scale = "norm" measures the noise in a private number; between institutions take "clip"'
        )


def check_own_client(prepared: Prepared, number: int) -> None:
    """Check that a silo holds the records of its own user only, where each client is one user.

    Args:
        prepared: the experiment as the silo holds it.
        number: number of the silo, and of the user whose records it holds.

    Raises:
        OwnRecordsError: the silo's table has a record of another user.
    """
    if prepared.method.contribution.per != "client":
        return
    if (prepared.population.train.user != number).any():
        raise OwnRecordsError(
            f"{prepared.method.name}: silo {number} stands for user {number}, and its table names another"
        )
