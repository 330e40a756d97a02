"""The parties of a protocol as tests that look inside them need them: the driver's own state machines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor
from types import SimpleNamespace
from typing import Any

import numpy as np

from fedveil.protocols.driver import LocalDriver, Transcript
from fedveil.protocols.partial_encryption.plan import PartialInputs, PartialPlan, PartialResult
from fedveil.protocols.partial_encryption.protocol_spec import PartialEncryptionSpec
from fedveil.protocols.protocol import ClientContext, ProtocolSpec
from fedveil.protocols.weighting.plan import CipherSizes, WeightedInputs, WeightingPlan
from fedveil.protocols.weighting.protocol_spec import PrivateWeightingSpec
from fedveil.randomness import PrivacyRandomness
from fedveil.run.setup import Prepared
from fedveil.run.simulation import SimulatedParties


class Inside:
    """A driver whose ends can be reached: ``server`` and ``silos`` are the state machines under them."""

    def __init__(self, agreement: ProtocolSpec[Any, Any], plan: Any) -> None:
        self.transcript = Transcript()
        self.driver = LocalDriver(agreement, self.transcript)
        self.server: Any = self.driver._server
        self.silos: list[Any] = list(self.driver._clients)
        self.plan, self.run = plan, self.driver._run

    def deliver(self, messages: list[tuple[int, bytes]]) -> None:
        """Deliver messages of the server, and whatever follows from them."""
        for to, data in messages:
            self.driver._carry(0xFFFF, to, data)


def parties_of(
    prepared: Prepared, privacy: PrivacyRandomness, transcript: Transcript | None = None
) -> SimulatedParties:
    """Return the parties of a run, in this process."""
    driver: LocalDriver[Any, Any] = LocalDriver(prepared.protocol_spec, transcript, privacy=privacy)
    return SimulatedParties(driver=driver, initial=prepared.task.initial())


class WeightingParties(Inside):
    """The parties of a run under private weighting."""

    def __init__(
        self, plan: WeightingPlan, counts: np.ndarray, *, holder: Any, evaluator: Callable[..., Any]
    ) -> None:
        size = CipherSizes(key=1, number=1, weight=1, ciphertext=1, ciphertexts=1)
        cipher = SimpleNamespace(holder=lambda _: holder, evaluator=evaluator, sizes=lambda _: size)
        super().__init__(PrivateWeightingSpec(plan=plan, counts=counts, cipher=cipher), plan)

    def aggregate(
        self,
        round_number: int,
        inputs: Iterable[tuple[np.ndarray, np.ndarray]],
        *,
        drawn: np.ndarray | None = None,
        attempt: int = 0,
        dither: Callable[[int], bytes | None] = lambda silo: None,
    ) -> np.ndarray:
        """Return the weighted sum of a round, in grid units."""
        left = iter(inputs)

        def give(silo: int) -> WeightedInputs:
            contributions, noise = next(left)
            return WeightedInputs(contributions=contributions, noise=noise, dither=dither(silo))

        everybody = tuple(range(self.plan.silos))
        return self.driver.play((round_number, attempt), everybody, drawn, give)[0]


class PartialParties(Inside):
    """The parties of a run under partial encryption."""

    def __init__(self, plan: PartialPlan, encrypting: Executor | None = None) -> None:
        class Divided(PartialEncryptionSpec):
            """Divides a message as the round of a test says."""

            workers = encrypting

            def divide(
                _, message: Any, partition: np.ndarray, round_number: int, place: ClientContext
            ) -> Any:
                return self._split(place.number, partition)

        super().__init__(Divided(plan=plan), plan)

    def aggregate(
        self,
        round_number: int,
        values: Mapping[int, np.ndarray],
        split: Callable[[int, np.ndarray], tuple[np.ndarray, np.ndarray]],
        *,
        vote_noise: Callable[[int], np.ndarray] | None = None,
        attempt: int = 0,
    ) -> PartialResult:
        """Return what the silos have after a round, in grid units."""

        self._split = split

        def give(silo: int) -> PartialInputs:
            return PartialInputs(
                values=values[silo],
                message=values[silo],
                votes=None if vote_noise is None else vote_noise(silo),
            )

        cohort = tuple(sorted(values))
        return self.driver.play((round_number, attempt), cohort, None, give)[0]
