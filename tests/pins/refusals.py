"""Every combination of stages of a method: those that fit together, and each reason against others with an example."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Final

from fedveil.errors import CompositionError
from fedveil.methods.channels import Identity
from fedveil.methods.client_messages import ClientMessages, Dithered, Layered, Numbers
from fedveil.methods.contributions import (
    ClientContribution,
    RecordContribution,
    SiloContribution,
    SiloUserContribution,
)
from fedveil.methods.dp_fed_ls import CentralGaussian
from fedveil.methods.gaussian_shares import GaussianShares
from fedveil.methods.method import Method
from fedveil.methods.named_channels import LayeredShares
from fedveil.methods.partial_encryption import PartialEncryption
from fedveil.methods.private_weighting import PrivateWeighting
from fedveil.methods.protection_stage import NoProtection
from fedveil.methods.secure_aggregation import SecureAggregation
from fedveil.methods.weights import Weights
from fedveil.privacy.bounds import Clip, ClipL1, Unbounded
from fedveil.privacy.sampling import Everyone, PoissonUsers, UniformClients
from fedveil.training.server.denoise import JamesStein, NoDenoiser
from fedveil.training.server.optimizers import ServerSgd
from fedveil.training.steps import LocalDpSgd, LocalGradient

FILE: Final = Path(__file__).parent / "refusals.json"
_SHARES: Final = GaussianShares(noise_multiplier=2.0, scale=1.0)
_LACKING: Final = GaussianShares(noise_multiplier=2.0, scale=1.0, max_dropouts=1)


def _messages(**given: Any) -> ClientMessages:
    return ClientMessages(
        **{"senders": 3, "noise": "gaussian", "noise_multiplier": 2.0, "bound": 1.0, "form": Numbers()}
        | given
    )


STAGES: Final[Mapping[str, Mapping[str, Any]]] = {
    "contribution": {
        "silos": SiloContribution(),
        "pairs": SiloUserContribution(),
        "clients": ClientContribution(),
        "records": RecordContribution(per_user=2),
    },
    "sampler": {
        "everyone": Everyone(),
        "poisson": PoissonUsers(rate=0.5),
        "uniform": UniformClients(population=6, sample=3),
    },
    "local": {
        "gradient": LocalGradient(),
        "dp-sgd": LocalDpSgd(learning_rate=0.1, epochs=1, batch_size=2, noise_multiplier=1.0),
    },
    "bound": {"l2": Clip(norm=1.0), "l1": ClipL1(norm=1.0), "none": Unbounded()},
    "weights": {"one": Weights.ONE, "uniform": Weights.UNIFORM, "records": Weights.BY_RECORDS},
    "channel": {
        "identity": Identity(),
        "shares": _SHARES,
        "shares-lacking": _LACKING,
        "layered": LayeredShares(shares=_SHARES),
        "central": CentralGaussian(noise_multiplier=2.0, scale=1.0),
        "messages": _messages(),
        "messages-bare": _messages(noise=None, noise_multiplier=0.0, bound=None),
        "messages-own-norm": _messages(bound=None),
        "messages-laplace": _messages(noise="laplace"),
        "messages-dithered": _messages(form=Dithered(step=0.5)),
        "messages-layered": _messages(form=Layered()),
        "messages-of-four": _messages(senders=4),
    },
    "protection": {
        "open": NoProtection(),
        "masks": SecureAggregation(),
        "masks-retry": SecureAggregation(on_dropout="retry", max_dropouts=1),
        "masks-end-lacking": SecureAggregation(max_dropouts=1),
        "masks-recover": SecureAggregation(on_dropout="recover"),
        "weighting": PrivateWeighting(),
        "weighting-drawing": PrivateWeighting(private_sampling=True),
        "partial": PartialEncryption(),
        "partial-parts": PartialEncryption(clip="parts"),
    },
    "denoiser": {"as-it-is": NoDenoiser(), "james-stein": JamesStein()},
    "denominator": {"expected": "expected", "actual": "actual"},
    "noise_decay": {"steady": 1.0, "falling": 0.9},
}


def every() -> list[tuple[str, ...]]:
    """Return all combinations, as the names of their stages."""
    return list(product(*STAGES.values()))


def found(combinations: Iterable[tuple[str, ...]]) -> dict[str, Any]:
    """Return which combinations are allowed, and every reason against others with the first one that has it."""
    server, allowed, reasons = ServerSgd(1.0), [], dict[str, str]()
    for names in combinations:
        stages = {field: STAGES[field][name] for field, name in zip(STAGES, names, strict=True)}
        try:
            Method(name="any", server=server, **stages)
        except CompositionError as error:
            reasons.setdefault(str(error), " ".join(names))
        else:
            allowed.append(" ".join(names))
    return {"allowed": allowed, "reasons": dict(sorted(reasons.items()))}
