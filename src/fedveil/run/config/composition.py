"""Compose a method from an experiment and a population's public numbers, and find its noise.

    [method] ─► builder ─► [sampler] ─► [channel] ─► [server] ─► [protection] ─► Method ─► guarantee ─► noise, if a word

The composition reads |S| and |U| from the population. If the experiment says so by name, it also reads record
counts, which the statement then names as not covered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedveil.data.records import Population, Records
from fedveil.errors import CompositionError, ConfigError
from fedveil.methods.capabilities import GridShares, VoteNoise
from fedveil.methods.channels import check_pooled
from fedveil.methods.derive import derive
from fedveil.methods.guarantee import Guarantee, PublicFacts
from fedveil.methods.method import Method
from fedveil.methods.noise_ratio import noise_to_displacement, rate_by_rule
from fedveil.privacy.accountant import Accountant, cached_epsilon
from fedveil.privacy.accounting import make_accountant
from fedveil.privacy.calibration import epsilon_of, least_noise
from fedveil.privacy.claims import Role
from fedveil.privacy.events import ComposedEvent
from fedveil.privacy.ledger import Budget
from fedveil.privacy.sampling import Everyone
from fedveil.run.config.choice import Choice
from fedveil.run.config.experiment import Experiment
from fedveil.run.releases.release import Release
from fedveil.run.releases.side_releases import (
    check_composable,
    compose_with_rounds,
    document_multiplier,
    other_documents,
    refuse_shared,
    shared_multiplier,
)
from fedveil.stage import answers
from fedveil.training.server.denoise import NO_DENOISER


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The composition of an experiment's method at the requested noise.

    Attributes:
        experiment: the experiment.
        population: the population of the run.
        side_releases: side releases of the run, which are paid from the same epsilon.
        clip: the bound of an update that a release found; None: as declared.
    """

    experiment: Experiment
    population: Population
    side_releases: tuple[Release, ...] = ()
    clip: float | None = None

    def method(self, noise_multiplier: float | None = None) -> Method:
        """Compose the method.

        Args:
            noise_multiplier: the noise if ``method.noise_multiplier`` is a word; None: 1, while it is not yet
                known.

        Raises:
            CompositionError: stages that do not fit together.
        """
        experiment, population = self.experiment, self.population
        facts = self._facts()
        if population.target_names and experiment.method.needs("target_range"):
            raise CompositionError(
                f"method '{experiment.method.name}' predicts one class or one number of a record, not "
                f"{len(population.target_names)} targets; take uldp-avg-w"
            )
        method: Method = experiment.method.build(facts, **self._found(noise_multiplier))
        if not isinstance(method, Method):
            raise CompositionError(
                f"method '{experiment.method.name}' builds no method: {type(method).__name__}"
            )
        if experiment.sampler is not None:
            method = _with_sampler(method, experiment.sampler, facts)
        around = {"method": method, "shares": method.channel, **facts}
        # The order matters: a protection is applied to the whole method, with its final channel and server stages.
        method = replace(method, channel=experiment.channel.build(around))
        if isinstance(method.channel, GridShares):
            method = replace(method, channel=method.channel.sized_for_users(population.n_users))
        method = _with_server(method, experiment, around)
        protection = experiment.protection.build(around)
        if not answers(protection, "apply_to"):
            raise CompositionError(
                f"protection '{experiment.protection.name}' makes no protection: {type(protection).__name__}"
            )
        if share := experiment.shares.votes:
            if not (isinstance(protection, VoteNoise) and protection.noisy_votes):
                raise CompositionError(
                    f"budget.votes: under {type(protection).__name__} there are no votes; partial encryption counts "
                    "votes with noise by partition = 'noisy-votes'"
                )
            ballots = method.contribution.ballots(population.n_silos)
            # Every round's vote has an equal part of the share of mu^2: share / T.
            each = shared_multiplier(
                share / experiment.rounds, document_multiplier(experiment.privacy, method.sampler.adjacency)
            )
            protection = protection.with_vote_noise(each, ballots)
        protected: Method = protection.apply_to(method, population.n_users)
        if isinstance(protected.channel, GridShares):
            # Last, because the grid follows from the final size of the shares and from whether sums are masked.
            sized = protected.channel.sized_for_words(
                population.n_silos, protected.bound, masked=protected.protection.masks
            )
            protected = replace(protected, channel=sized)
        check_pooled(protected, experiment.privacy.colluding_silos, population.n_silos)
        return protected

    def uncovered_choices(self, method: Method) -> tuple[str, ...]:
        """Return sentences on parameters that were chosen from private counts."""
        rule = self.experiment.method.get("group_size")
        looked = f"the group size is the {rule} of the users' record counts, which are private data"
        return (*((looked,) if isinstance(rule, str) else ()), *method.public_counts)

    def resolve_calibrated(self, method: Method, public: PublicFacts) -> Method:
        """Return the method with numbers for all words: first its noise, then the values that depend on it.

        The learning rate and the denoiser "by rule" depend on the ratio of noise to model displacement.
        """
        noisy, rounds = self._at_noise(method, public), self.experiment.rounds
        if isinstance(noisy.channel, GridShares):
            noisy.channel.check_steps(public.n_silos)
        if isinstance(self.experiment.server.learning_rate, str):
            noisy = replace(noisy, server=noisy.server.at_rate(rate_by_rule(noisy, public, rounds)))
        if noisy.noise_decay != 1:
            last: Any = noisy.at_round(
                rounds
            ).channel  # it supports noise decay, or the composition was refused
            last.check_fine(public.n_silos, noisy.bound.grid)
        shape = tuple(self.population.feature_shape)
        denoiser = noisy.denoiser.resolve(lambda: noise_to_displacement(noisy, public, rounds), shape)
        return replace(noisy, denoiser=denoiser)

    def _at_noise(self, method: Method, public: PublicFacts) -> Method:
        """Return the method with the noise that a word requests; unchanged if the noise is a number.

        Raises:
            ConfigError: no accountant can find the noise, or the method has no closed form.
        """
        experiment = self.experiment
        word, epsilon = experiment.method.get("noise_multiplier"), experiment.privacy.epsilon
        if not isinstance(word, str):
            return method
        assert epsilon is not None, "Experiment asks for it"
        if word == "calibrated":
            if method.calibrated_to == "nobody":
                raise ConfigError(
                    "method.calibration: as published the noise bounds no client, so no accountant can calibrate it; "
                    "give noise_multiplier = 'closed-form' or a number"
                )
            return self._calibrated(public, epsilon)
        if method.closed_form is None:
            raise ConfigError(
                "method.noise_multiplier: the closed forms are those of dp-fed and dp-fed-ls, and, with "
                f"method.calibration = 'as-published', Remark 1 of ParaAegis, for their own sampling; {method.name} "
                "has none"
            )
        rounds, delta = experiment.rounds, experiment.privacy.delta
        composed = self.method(method.closed_form.noise_multiplier(rounds, epsilon, delta))
        if composed.noise_decay == 1:
            return composed
        return self._calibrated(public, self._steady_epsilon(composed, public))

    def public_facts(self, method: Method, records: Records, dimension: int) -> PublicFacts:
        """Return the public facts on which the guarantee rests.

        They include records per silo only if the statement names these counts as public. A silo without records
        counts as a silo with one, as DP-SGD does.
        """
        n_silos, counts = self.population.n_silos, None
        if method.public_counts or method.contribution.per == "record":
            counts = tuple(max(1, int(n)) for n in records.by_silo(n_silos).size)
        return PublicFacts(
            n_silos=n_silos, n_users=self.population.n_users, silo_records=counts, dimension=dimension
        )

    def accountant(self, guarantee: Guarantee) -> Accountant:
        """Return the requested accountant.

        Raises:
            ConfigError: it has no bound for an event of the method; the message names the accountants that have
                one.
        """
        name = self.experiment.privacy.accountant
        events = ComposedEvent(events=(guarantee.event, *(view.event for view in guarantee.views)))
        fitting = [
            name for name in ("pld", "rdp") if make_accountant(name, guarantee.adjacency).supports(events)
        ]
        if name not in fitting:
            raise ConfigError(
                f"privacy.accountant: '{name}' has no bound for what {self.experiment.method.name} releases here; "
                f"{' or '.join(fitting) or 'no accountant'} has"
            )
        return make_accountant(name, guarantee.adjacency)

    def _facts(self) -> dict[str, Any]:
        """Return the values that composition can fill in, by name."""
        experiment, population = self.experiment, self.population
        return {
            "local": experiment.local,
            "n_silos": population.n_silos,
            "n_users": population.n_users,
            "largest_silo": max(1, int(population.records_per_silo().max())),
            "colluding_silos": experiment.privacy.colluding_silos,
            "rounds": experiment.rounds,
            "inputs": math.prod(population.feature_shape),
            "classes": population.n_classes,
            "task": population.task,
            "schema": population.schema,
            "target_range": population.target_range,
        }

    def _found(self, noise_multiplier: float | None) -> dict[str, Any]:
        """Return the numbers that replace words of the table ``[method]``, and the clip that a release found."""
        choice, numbers = self.experiment.method, dict[str, Any]()
        if self.clip is not None:
            numbers["clip"] = self.clip
        if isinstance(choice.get("noise_multiplier"), str):
            numbers["noise_multiplier"] = noise_multiplier or 1.0
        rule = choice.get("group_size")
        if isinstance(rule, str):
            per_user = self.population.records_per_user()
            present = per_user[per_user > 0]
            numbers["group_size"] = 1
            if len(present):
                most = present.max() if rule == "max" else sorted(present)[len(present) // 2]
                numbers["group_size"] = int(most)
        return numbers

    def _calibrated(self, public: PublicFacts, epsilon: float) -> Method:
        """Return the method with the least noise whose whole run spends at most ``epsilon``, as stated.

        The run includes its side releases and the reserve of other documents. If noise decays from round to round,
        the noise of the first round is found.
        """
        experiment, method = self.experiment, self.method()
        guarantee = derive(method, public)
        check_composable(self.side_releases, guarantee)
        refuse_shared(experiment.privacy, guarantee.event_for(_counted(method)))
        reserved = other_documents(experiment.privacy, guarantee.adjacency)
        budget = Budget(
            epsilon=epsilon, delta=experiment.privacy.delta, accountant=self.accountant(guarantee)
        )

        def spent(noise_multiplier: float) -> float:
            # Event and role are those of the statement, so that the stated epsilon meets the target.
            method = self.method(noise_multiplier)
            guarantee, role = derive(method, public), _counted(method)
            rounds = guarantee.after_rounds(guarantee.event_for(role), experiment.rounds)
            event = compose_with_rounds(rounds, self.side_releases, role)
            return epsilon_of(ComposedEvent(events=(event, *reserved)), budget)

        return self.method(least_noise(spent, budget))

    def _steady_epsilon(self, method: Method, public: PublicFacts) -> float:
        """Return the epsilon of the whole run if its noise stayed that of round 1.

        A published formula gives equal noise for every round. Decaying noise starts higher, so that the run spends
        the same epsilon: methods are compared at one budget. The epsilon is against the role for which the method
        is calibrated.
        """
        experiment, steady = self.experiment, derive(replace(method, noise_decay=1.0), public)
        return cached_epsilon(
            make_accountant(experiment.privacy.accountant, steady.adjacency),
            steady.after_rounds(steady.event_for(_counted(method)), experiment.rounds),
            experiment.privacy.delta,
        )


def _with_sampler(method: Method, choice: Choice, filled: Mapping[str, Any]) -> Method:
    """Return the method with the requested sampler.

    Raises:
        CompositionError: the method samples by itself; the choice is no sampler.
    """
    if method.sampler != Everyone():
        raise CompositionError(
            f"sampler: {method.name} samples by itself ({type(method.sampler).__name__}); leave its sampling rate at "
            "1 and correlated noise out, or remove [sampler]"
        )
    sampler = choice.build(filled)
    if not answers(sampler, "draw"):
        raise CompositionError(f"sampler '{choice.name}' makes no sampler: {type(sampler).__name__}")
    # A published theorem counts the sampling that its method has, which is everyone's participation here.
    return replace(method, sampler=sampler, closed_form=None)


def _with_server(method: Method, experiment: Experiment, around: Mapping[str, Any]) -> Method:
    """Return the method with the requested denoiser, server step and average.

    Raises:
        CompositionError: a denoiser is requested and the method has its own.
    """
    server = experiment.server
    if server.denoiser is not None:
        if method.denoiser != NO_DENOISER:
            raise CompositionError(
                f"server.denoiser: {method.name} brings its own ({method.denoiser.description}); take the method that "
                "it is a variant of with another one, dp-fed for dp-fed-ls"
            )
        method = replace(method, denoiser=server.denoiser.build(around))
    rate = server.learning_rate
    if server.optimizer is not None:
        inputs = around if rate is None else {**around, "learning_rate": rate}
        method = replace(method, server=server.optimizer.build(inputs))
    elif isinstance(rate, float | int):  # the rate of a word is found in `resolve_calibrated`
        method = replace(method, server=method.server.at_rate(rate))
    if server.average is not None:
        method = replace(method, average=server.average.build(around))
    return method


def _counted(method: Method) -> Role:
    """Return the role against which a target epsilon counts."""
    return Role.READER if method.calibrated_to == "readers" else Role.SERVER
