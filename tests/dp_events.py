"""Events as those of ``dp_accounting``, whose accountants are references, and the events of runs."""

from dp_accounting import dp_event

from fedveil.privacy.events import (
    ComposedEvent,
    ConcentratedEvent,
    Event,
    GaussianEvent,
    LaplaceEvent,
    MixtureOfGaussiansEvent,
    PoissonSampledEvent,
    SampledWithoutReplacementEvent,
    SelfComposedEvent,
)


def dp_event_of(event: Event) -> dp_event.DpEvent:
    """The same event as one of ``dp_accounting``."""
    match event:
        case GaussianEvent():
            return dp_event.GaussianDpEvent(event.noise_multiplier)
        case ConcentratedEvent():
            return dp_event.ZCDpEvent(rho=1 / (2 * event.noise_multiplier**2))
        case LaplaceEvent():
            return dp_event.LaplaceDpEvent(event.noise_multiplier)
        case PoissonSampledEvent():
            return dp_event.PoissonSampledDpEvent(event.rate, dp_event_of(event.event))
        case SampledWithoutReplacementEvent():
            inner = dp_event_of(event.event)
            return dp_event.SampledWithoutReplacementDpEvent(event.population, event.sample, inner)
        case ComposedEvent(events=()):
            return dp_event.NoOpDpEvent()
        case ComposedEvent():
            return dp_event.ComposedDpEvent([dp_event_of(one) for one in event.events])
        case SelfComposedEvent():
            return dp_event.SelfComposedDpEvent(dp_event_of(event.event), event.count)
        case MixtureOfGaussiansEvent():
            shifts, probabilities = list(event.sensitivities), list(event.probabilities)
            return dp_event.MixtureOfGaussiansDpEvent(event.noise_multiplier, shifts, probabilities)
    return dp_event.NonPrivateDpEvent()


def gaussian_rounds(rounds: int, sigma: float = 5.0, rate: float = 1.0) -> Event:
    """Gaussian releases over Poisson samples: the event of a run of uldp-avg."""
    release: Event = GaussianEvent(noise_multiplier=sigma)
    if rate < 1:
        release = PoissonSampledEvent(rate=rate, event=release)
    return SelfComposedEvent(event=release, count=rounds)
