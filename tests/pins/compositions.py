"""Every composition whose guarantee is pinned: methods, with channels, samplers and protections that go with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial

from fedveil.errors import CompositionError, PrivacyError
from fedveil.methods.client_messages import Layered
from fedveil.methods.contributions import ClientContribution
from fedveil.methods.correlated import CorrelatedNoise, with_correlated_noise
from fedveil.methods.dp_fed_ls import CentralGaussian, client_sampler
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.guarantee import PublicFacts
from fedveil.methods.method import Method
from fedveil.methods.named_channels import LayeredShares, through_messages
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.privacy.sampling import PoissonUsers
from fedveil.registry import find
from fedveil.training.steps import LocalSgd
from tests.contract.test_methods import METHOD_CASES

SILOS, CLIENTS, DIMENSION = 5, 6, 30
SIGMA = 4.0
_OF_PAIRS = ("uldp-sgd", "uldp-sgd-w", "uldp-avg", "uldp-avg-w")

Change = Callable[[Method], Method]


def public(method: Method) -> PublicFacts:
    """Return the public facts that the guarantee of a pinned method is derived for."""
    n_silos = CLIENTS if isinstance(method.contribution, ClientContribution) else SILOS
    return PublicFacts(n_silos=n_silos, n_users=CLIENTS, silo_records=(10,) * n_silos, dimension=DIMENSION)


def _channels(name: str) -> dict[str, Change]:
    def layered(method: Method) -> Method:
        if isinstance(method.channel, CentralGaussian):
            return replace(
                method, channel=through_messages(method.channel, method.sampler, CLIENTS, Layered())
            )
        if not isinstance(method.channel, GaussianShares):
            raise CompositionError("no shares")
        return replace(method, channel=LayeredShares(shares=method.channel))

    def colluding(method: Method) -> Method:
        return replace(method, channel=replace(method.channel, colluding_silos=2))

    found: dict[str, Change] = {"": lambda method: method, "lrsuq": layered}
    if name in _OF_PAIRS:
        found["correlated"] = lambda method: with_correlated_noise(method, CorrelatedNoise(period=3), 12)
    return found | ({"colluding": colluding} if name.startswith("uldp") else {})


def _samplers(name: str) -> dict[str, Change]:
    found: dict[str, Change] = {"": lambda method: method}
    if name in (*_OF_PAIRS, "dp-fed", "dp-fed-ls"):
        found["poisson"] = lambda method: replace(method, sampler=PoissonUsers(rate=0.5))
    if name in ("dp-fed", "dp-fed-ls"):
        found["uniform"] = lambda method: replace(method, sampler=client_sampler("uniform", 0.5, CLIENTS))
        found["actual"] = lambda method: replace(method, sampler=PoissonUsers(rate=0.5), denominator="actual")
    return found


def _secure(protection: SecureAggregation) -> Change:
    def change(method: Method) -> Method:
        shares = replace(method.channel, max_dropouts=protection.max_dropouts)
        return replace(method, channel=shares, protection=protection)

    return change


def _partial(protection: PartialEncryption) -> Change:
    return lambda method: protection.apply_to(method, CLIENTS)


PROTECTIONS: dict[str, Change] = {
    "": lambda method: method,
    "secagg": _secure(SecureAggregation()),
    "secagg-missing": _secure(SecureAggregation(on_dropout="recover", max_dropouts=1)),
    "weighting": lambda method: replace(method, protection=PrivateWeighting(n_max=60)),
    "weighting-ot": lambda method: replace(
        method, protection=PrivateWeighting(n_max=60, cipher="rlwe", private_sampling=True)
    ),
    "partial": _partial(PartialEncryption()),
    "partial-released": _partial(PartialEncryption(partition="released", he_noise=2.0)),
    "partial-noisy": _partial(
        PartialEncryption(partition="noisy-votes", votes="secagg", vote_noise=30.0, he_noise=1.0)
    ),
    "partial-random": _partial(PartialEncryption(strategy="random", he_noise=1.0, decay=0.9)),
    "partial-all": _partial(PartialEncryption(ratio=1.0, he_noise=1.0)),
    "partial-none": _partial(PartialEncryption(ratio=0.0)),
}


@cache
def compositions() -> tuple[tuple[str, Method], ...]:
    """Return every composition that fedveil allows, by name."""
    return tuple(_compositions())


def _compositions() -> Iterator[tuple[str, Method]]:
    methods: dict[str, Callable[[], Method]] = {
        name: lambda case=case: case(SIGMA) for name, case in METHOD_CASES.items()
    }
    methods["uldp-avg without noise"] = lambda: METHOD_CASES["uldp-avg"](0.0)
    methods["dp-fed without noise"] = lambda: METHOD_CASES["dp-fed"](0.0)
    methods["varying-dp, decay 0.5"] = lambda: replace(METHOD_CASES["varying-dp"](SIGMA), noise_decay=0.5)
    own = {"noise_multiplier": SIGMA, "scale": "norm"}
    local = LocalSgd(learning_rate=0.5, steps=2, epochs=1, batch_size=1)
    for name in ("cepam-gaussian", "cepam-laplace", "fl-gaussian"):
        methods[f"{name} as published"] = partial(
            find("methods", name).load(), local=local, n_users=CLIENTS, **own
        )
    for name, build in methods.items():
        for channel, through in _channels(name).items():
            for sampler, sampled in _samplers(name).items():
                for protection, protected in PROTECTIONS.items():
                    try:
                        method = protected(through(sampled(build())))
                    except (CompositionError, PrivacyError, TypeError):
                        continue  # refused: tests/test_protected_methods.py and its like say why
                    yield ", ".join(part for part in (name, channel, sampler, protection) if part), method
