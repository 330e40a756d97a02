"""Turn events into epsilon: the accountants by name.

=============  =================================================  ==========================================
accountant     bound                                              used for
=============  =================================================  ==========================================
``pld``        privacy loss distributions, composed by FFT and    every reported epsilon: the tightest
               rounded up; exact if every release is an
               unsampled Gaussian release
``rdp``        Renyi divergences on Opacus' orders, converted by  reproduction of the published tables
               Balle et al. 2020, Theorem 21
``rdp-2017``   the same divergences, converted by Mironov 2017,   reproduction of older tables
               Proposition 3
=============  =================================================  ==========================================

An accountant is a value. It states which events it ``supports`` and refuses the others with a
:class:`~fedveil.errors.PrivacyError`: it never approximates an event by another event. All accountants support
:class:`NoGuarantee`, whose epsilon is infinite.
"""

from __future__ import annotations

from fedveil.errors import PrivacyError
from fedveil.privacy.accountant import Accountant
from fedveil.privacy.events import Adjacency, Event
from fedveil.privacy.loss_distributions import PldAccountant
from fedveil.privacy.renyi import Conversion, RdpAccountant

ACCOUNTANTS = ("pld", "rdp", "rdp-2017")


def make_accountant(name: str, adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE) -> Accountant:
    """Return the accountant of a name (one of ``ACCOUNTANTS``) with its default settings.

    Raises:
        PrivacyError: an unknown name.
    """
    match name:
        case "pld":
            return PldAccountant(adjacency=adjacency)
        case "rdp" | "rdp-2017":
            return RdpAccountant(adjacency=adjacency, conversion=Conversion(name))
    raise PrivacyError(f"accountant {name!r} is unknown; choose one of {', '.join(ACCOUNTANTS)}")


def epsilon(
    event: Event,
    delta: float,
    accountant: str = "pld",
    adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
) -> float:
    """Return the event's epsilon at ``delta`` by the named accountant (infinite without a guarantee).

    >>> from fedveil.privacy.events import GaussianEvent, SelfComposedEvent
    >>> rounds = SelfComposedEvent(event=GaussianEvent(noise_multiplier=5.0), count=200)
    >>> round(epsilon(rounds, 1e-5, "rdp"), 4), round(epsilon(rounds, 1e-5), 4)
    (16.5129, 15.4562)
    """
    return make_accountant(name=accountant, adjacency=adjacency).epsilon(event, delta)
