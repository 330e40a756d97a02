"""Privacy: bounds, noise, samplers, events, accountants, calibration, group privacy, ledger and statement."""

from fedveil.privacy.accountant import Accountant
from fedveil.privacy.accounting import ACCOUNTANTS, epsilon, make_accountant
from fedveil.privacy.bounds import Clip, Unbounded
from fedveil.privacy.calibration import calibrate_noise, calibrate_rounds, gaussian_rounds
from fedveil.privacy.events import (
    Adjacency,
    ComposedEvent,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    NoGuarantee,
    PoissonSampledEvent,
    SelfComposedEvent,
    event_from_json,
)
from fedveil.privacy.ledger import Budget, Ledger, read_entries
from fedveil.privacy.ledger_lines import Entry, Head
from fedveil.privacy.loss_distributions import PldAccountant
from fedveil.privacy.noise import DiscreteGaussian, DiscreteLaplace, NoiseLaw
from fedveil.privacy.renyi import RdpAccountant
from fedveil.privacy.sampling import Everyone, PoissonUsers, UniformClients
from fedveil.privacy.statement import AsPublished, Disclosure, Statement

__all__ = [
    "ACCOUNTANTS",
    "Accountant",
    "Adjacency",
    "AsPublished",
    "Budget",
    "Clip",
    "ComposedEvent",
    "ConcentratedEvent",
    "Disclosure",
    "DiscreteGaussian",
    "DiscreteLaplace",
    "Entry",
    "Event",
    "Everyone",
    "GaussianEvent",
    "Head",
    "LaplaceEvent",
    "Ledger",
    "MixtureOfGaussiansEvent",
    "NoGuarantee",
    "NoiseLaw",
    "PldAccountant",
    "PoissonSampledEvent",
    "PoissonUsers",
    "RdpAccountant",
    "SelfComposedEvent",
    "Statement",
    "Unbounded",
    "UniformClients",
    "calibrate_noise",
    "calibrate_rounds",
    "epsilon",
    "event_from_json",
    "gaussian_rounds",
    "make_accountant",
    "read_entries",
]
