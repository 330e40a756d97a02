"""Server's end of private weighting (:mod:`fedveil.protocols.weighting.plan`)."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Final

import numpy as np
from gmpy2 import invert, mpz
from jaxtyping import Bool, Float64

from fedveil.crypto.key_agreement import RoundId
from fedveil.crypto.oblivious_transfer import TransferSender
from fedveil.errors import CryptoError, ProtocolError
from fedveil.protocols.messages import Announcement, Envelope, Message, OwnMask, RevealRequest
from fedveil.protocols.parties import CohortServer
from fedveil.protocols.protocol import Drawn, Outgoing
from fedveil.protocols.weighting.plan import (
    BlindedHistogram,
    EncryptedSum,
    EncryptedWeights,
    KeyHolder,
    Participants,
    Phase,
    SealedSeed,
    TransferAnswers,
    TransferOffer,
    TransferRequests,
    WeightingKey,
    WeightingPlan,
    transfer_context,
)

_AWAITED: Final[Mapping[Phase, type[Message]]] = {
    Phase.SETUP: Announcement,
    Phase.HISTOGRAM: BlindedHistogram,
    Phase.TRANSFER: TransferRequests,
    Phase.INPUTS: EncryptedSum,
    Phase.REVEAL: OwnMask,
}


class WeightingServer(CohortServer):
    """Server's end of a session under private weighting.

    Args:
        plan: public numbers of the run.
        run: 16 bytes that name the session.
        holder: key holder of the cipher.
    """

    _relayed_kinds = (SealedSeed,)

    def __init__(self, plan: WeightingPlan, run: bytes, holder: KeyHolder) -> None:
        super().__init__(plan.silos, run)
        self._plan, self._holder = plan, holder
        self._phase = Phase.SETUP
        self._relayed: set[int] = set()
        self._totals = [mpz(0)] * plan.users
        self._inverses: dict[int, int] = {}
        self._drawn = 0
        self._weights: tuple[bytes, ...] = ()
        self._sender: TransferSender | None = None
        self._places: list[list[bytes]] = []
        self._own_masks: list[bytes] = []

    @property
    def ready(self) -> bool:
        """Return whether the setup is complete, so that a round can begin."""
        return self._phase not in (Phase.SETUP, Phase.HISTOGRAM)

    @property
    def may_have_released(self) -> bool:
        """Return whether own masks of this attempt were requested; from then on its privacy event is charged."""
        return self._phase in (Phase.REVEAL, Phase.DONE)

    @property
    def participants(self) -> tuple[int, ...]:
        """Users with a record in any silo; empty until the setup is complete."""
        return tuple(self._inverses)

    def begin(
        self, round_id: RoundId, cohort: tuple[int, ...], sampled_users: Drawn | None = None
    ) -> Outgoing:
        """Begin a round, or another attempt at it; return the messages to the silos.

        Args:
            round_id: a later round or attempt than any before.
            cohort: numbers of all silos; the weights depend on the records of every silo.
            sampled_users: (|U|,) bool, the sampled users, required if the plan renews weights without oblivious
                transfer; ignored otherwise.

        Raises:
            ProtocolError: the setup is not complete, a silo is left out, the attempt was played before, or ``drawn``
                is missing where the plan requires it.
        """
        if self._phase in (Phase.SETUP, Phase.HISTOGRAM):
            raise ProtocolError("a round cannot begin before the setup is complete")
        if cohort != self._cohort:
            raise ProtocolError("private weighting is over all silos")
        if not self._plan.renewed or self._plan.places:
            sampled_users = None
        elif sampled_users is None or sampled_users.shape != (self._plan.users,):
            raise ProtocolError(
                f"in a plan with renewed weights the server draws from {self._plan.users} users"
            )
        self._inbox.open(round_id)
        # After a complete round every silo has the round's weights, so that an empty list stands for them.
        is_known = self._phase is Phase.DONE
        self._round_id = self._bound(round_id, self._cohort)
        self._arrived, self._own_masks = set(), []
        self._holder.begin()
        if self._plan.places:
            return self._offer()
        self._phase = Phase.INPUTS
        if self._plan.renewed or not self._weights:
            taking_part = {u for u in self._inverses if sampled_users is None or sampled_users[u]}
            self._drawn = len(taking_part)
            weights = [inverse if user in taking_part else 0 for user, inverse in self._inverses.items()]
            self._weights = tuple(self._holder.encrypt(weights))
            is_known = False
        return self._to_cohort(EncryptedWeights(blocks=() if is_known else self._weights))

    def result(self) -> Float64[np.ndarray, " d"]:
        """Return the weighted noisy sum of all silos in grid units.

        Raises:
            ProtocolError: the attempt is not complete, a value is out of range, or the weights of a user who took
                part do not sum to 1.
        """
        if self._phase is not Phase.DONE:
            raise ProtocolError(f"the sum is not complete; silos {list(self.missing)} are missing")
        values, check = self._holder.open(self._own_masks)
        # Check coordinate: sum_u sum_s n_{s,u} C / N_u = C * (sampled users), plus C * (silo 0's blind) under
        # oblivious transfer, where the server must not learn the number of sampled users.
        users, remainder = divmod(check, self._plan.common)
        if self._plan.places:
            right = 0 <= users <= len(self._inverses) + self._plan.check_blind
        else:
            right = users == self._drawn
        if remainder or not right:
            raise ProtocolError(
                "the check coordinate is wrong: the weights of the users do not sum to 1 each, so a user has "
                f"more than N_max = {self._plan.largest_count} records or a silo changed its counts"
            )
        return values

    def _awaited(self, sender: int) -> type[Message] | None:
        return _AWAITED.get(self._phase)

    def _take(self, sender: int, content: Message) -> list[tuple[int, bytes]]:
        if isinstance(content, Announcement):
            self._keys[sender] = content.key
        elif isinstance(content, BlindedHistogram):
            self._add_histogram(content)
        elif isinstance(content, TransferRequests):
            return self._answer(sender, content)
        elif isinstance(content, EncryptedSum):
            self._holder.add(content.blocks)
        elif isinstance(content, OwnMask):
            self._own_masks.append(content.seed)
        return []

    def _relay(self, envelope: Envelope, data: bytes) -> list[tuple[int, bytes]]:
        # Relayed messages bypass the inbox: run, round, sender, recipient and replay are checked here.
        recipient = envelope.recipient
        if (
            self._phase is not Phase.HISTOGRAM
            or envelope.round_id != self._round_id
            or envelope.sender != 0
            or not 0 < recipient < self._plan.silos
        ):
            raise ProtocolError("sent a blinding seed that is not for relaying now")
        if recipient in self._relayed:
            raise ProtocolError("sent a blinding seed twice (a replay)")
        self._relayed.add(recipient)
        return [(recipient, data)]

    def _add_histogram(self, content: BlindedHistogram) -> None:
        modulus = self._holder.modulus
        size = (modulus.bit_length() + 7) // 8
        if len(content.blocks) != self._plan.users or any(len(block) != size for block in content.blocks):
            raise ProtocolError(f"did not send {self._plan.users} blinded counts of {size} bytes")
        values = [mpz.from_bytes(block, "big") for block in content.blocks]
        if any(value >= modulus for value in values):
            raise ProtocolError("sent a blinded count outside the field")
        self._totals = [(a + b) % modulus for a, b in zip(self._totals, values, strict=True)]

    def _next_phase(self) -> list[tuple[int, bytes]]:
        if self._phase is Phase.REVEAL:
            self._phase = Phase.DONE
            return []
        self._arrived = set()
        if self._phase is Phase.SETUP:
            self._phase = Phase.HISTOGRAM
            return self._to_cohort(WeightingKey(key=self._holder.public)) + self._to_cohort(self._directory())
        if self._phase is Phase.HISTOGRAM:
            self._phase = Phase.IDLE
            modulus = self._holder.modulus
            # r_u is a unit, so r_u N_u = 0 modulo the modulus exactly for users without records.
            self._inverses = {
                user: inverse_weight(total, modulus) for user, total in enumerate(self._totals) if total
            }
            return self._to_cohort(Participants(present=tuple(bool(total) for total in self._totals)))
        if self._phase is Phase.TRANSFER:
            self._phase = Phase.INPUTS
            return []
        self._phase = Phase.REVEAL
        return self._to_cohort(RevealRequest())

    def _offer(self) -> list[tuple[int, bytes]]:
        self._phase = Phase.TRANSFER
        self._sender = TransferSender(self._plan.places)
        self._places = []
        for inverse in self._inverses.values():
            # `chosen` of P places hold Enc(B_u), the others Enc(0): the server does not learn the silos' place.
            drawn = drawn_places(self._plan.places, self._plan.chosen)
            self._places.append(
                self._holder.encrypt([inverse if is_chosen else 0 for is_chosen in drawn.tolist()])
            )
        return self._to_cohort(TransferOffer(public=self._sender.public, constants=self._sender.constants))

    def _answer(self, sender: int, requests: TransferRequests) -> list[tuple[int, bytes]]:
        assert self._sender is not None
        if len(requests.points) != len(self._inverses):
            raise ProtocolError(
                f"asked for {len(requests.points)} transfers instead of {len(self._inverses)}"
            )
        blocks: list[bytes] = []
        try:
            for user, point, places in zip(self._inverses, requests.points, self._places, strict=True):
                blocks += self._sender.answer(point, places, transfer_context(self._round_id, sender, user))
        except CryptoError as error:
            raise ProtocolError(f"its request was refused: {error}") from error
        return self._to_each([sender], TransferAnswers(blocks=tuple(blocks)))


def inverse_weight(total: mpz, modulus: int) -> int:
    """Return B_u = (r_u N_u)^-1 modulo the plaintext modulus.

    Raises:
        ProtocolError: no inverse exists; with honest silos this has negligible probability.
    """
    try:
        return int(invert(total, modulus))
    except ZeroDivisionError as error:
        raise ProtocolError("a blinded total has no inverse; the setup must be repeated") from error


def drawn_places(places: int, chosen: int) -> Bool[np.ndarray, " places"]:
    """Sample the places of a transfer that hold the weight: a uniform subset of size ``chosen``."""
    order = list(range(places))
    secrets.SystemRandom().shuffle(order)
    drawn = np.zeros(places, dtype=np.bool_)
    drawn[order[:chosen]] = True
    return drawn
