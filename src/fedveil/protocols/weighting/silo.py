"""Silo's end of private weighting (:mod:`fedveil.protocols.weighting.plan`)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from hashlib import sha256

import numpy as np
from gmpy2 import gcd, mpz
from jaxtyping import Float64, Int64

from fedveil.crypto.key_agreement import RoundId, derive, seal, unseal
from fedveil.crypto.masks import UniformIntegers
from fedveil.crypto.oblivious_transfer import TransferReceiver, check_point
from fedveil.errors import CryptoError, OwnRecordsError, ProtocolError
from fedveil.protocols.messages import SERVER, Directory, Envelope, Message, OwnMask, RevealRequest
from fedveil.protocols.parties import KeyedSilo
from fedveil.protocols.protocol import ClientContext
from fedveil.protocols.weighting.plan import (
    SEED_BYTES,
    BlindedHistogram,
    Contributions,
    EncryptedSum,
    EncryptedWeights,
    Evaluator,
    Participants,
    Phase,
    SealedSeed,
    TransferAnswers,
    TransferOffer,
    TransferRequests,
    WeightedInputs,
    WeightingKey,
    WeightingPlan,
    transfer_context,
)

KEY_PURPOSE = "private weighting"
_SEED, _HISTOGRAM = "private weighting: blinding seed", "private weighting: histogram mask"
_BLIND, _PLACE = "private weighting: blinds", "private weighting: sampled places"
_SUM = "private weighting: sum mask"


class WeightingSilo(KeyedSilo[WeightedInputs, Float64[np.ndarray, " d"]]):
    """Silo's end of a session under private weighting.

    Args:
        plan: public numbers of the run.
        place: context of the silo in the session.
        counts: (|U|,) int64, n_{s,u}, number of this silo's records per user.
        evaluator: creates the cipher's evaluator from the plan and the server's public key.

    Raises:
        ProtocolError: a count above N_max / |S| or below zero, or another number of users or silos.
    """

    def __init__(
        self,
        plan: WeightingPlan,
        place: ClientContext,
        *,
        counts: Int64[np.ndarray, " users"],
        evaluator: Callable[[WeightingPlan, bytes], Evaluator],
    ) -> None:
        super().__init__(plan.silos, place, purpose=KEY_PURPOSE)
        plan.check_counts(counts, place.number)
        self._plan, self._counts, self._make = plan, counts.astype(np.int64), evaluator
        self._phase = Phase.SETUP
        self._directory_known = False
        self._evaluator: Evaluator | None = None
        self._root = b""
        self._blinds: list[mpz] = []
        self._present: tuple[int, ...] = ()
        self._loaded = b""
        self._offer: TransferOffer | None = None
        self._receivers: list[TransferReceiver] = []
        self._own_mask = b""

    @property
    def members(self) -> Int64[np.ndarray, " m"]:
        """Users with records at this silo, ascending; they are the rows of the silo's contributions."""
        return np.flatnonzero(self._counts)

    @property
    def awaits_input(self) -> bool:
        """Return whether a round has begun that awaits :meth:`contribute`."""
        return self._phase is Phase.INPUTS

    @property
    def binding(self) -> bytes:
        """SHA-256 of the public plan and of the silo's counts, which weight its contributions."""
        return sha256(repr(self._plan).encode() + self._counts.astype("<i8").tobytes()).digest()

    def receive(self, data: bytes) -> list[bytes]:
        """Read a message; return the answers to it.

        Raises:
            ProtocolError: a message that must not be accepted.
        """
        envelope = Envelope.decode(data)
        content = envelope.message
        if isinstance(content, EncryptedWeights | TransferOffer):
            return self._begin(envelope)
        awaited: dict[Phase, tuple[type[Message], ...]] = {
            Phase.SETUP: (WeightingKey, Directory, SealedSeed),
            Phase.HISTOGRAM: (Participants,),
            Phase.TRANSFER: (TransferAnswers,),
            Phase.REVEAL: (RevealRequest,),
        }
        expected_sender = 0 if isinstance(content, SealedSeed) else SERVER
        if envelope.sender != expected_sender:
            raise ProtocolError("a message comes from a party that does not send this kind")
        self._inbox.accept(envelope, *awaited.get(self._phase, ()))
        if isinstance(content, WeightingKey):
            self._evaluator = self._make(self._plan, content.key)
            return self._histogram()
        if isinstance(content, Directory):
            return self._meet(content)
        if isinstance(content, SealedSeed):
            return self._unseal(content)
        if isinstance(content, Participants):
            return self._take_part(content)
        if isinstance(content, TransferAnswers):
            return self._open(content)
        self._phase = Phase.DONE
        return [self._envelope(OwnMask(seed=self._own_mask))]

    def _send(self, client_input: WeightedInputs, round_id: RoundId) -> list[bytes]:
        return [self.encrypt_sum(client_input.contributions, client_input.noise, client_input.dither)]

    def encrypt_sum(
        self, contributions: Contributions, noise: Int64[np.ndarray, " d"], dither: bytes | None = None
    ) -> bytes:
        """Return the message with the encrypted weighted sum for the round that has begun.

        Args:
            contributions: (m, d) clipped contributions of :attr:`members` with weight 1, in grid units.
            noise: (d,) int64, the silo's exact noise share, in grid units.
            dither: 32-byte key of the silo's share v of the remainder modulo C; None draws a fresh key. A silo that
                sends the same contributions and noise again must use the same key again. From two remainders of one
                sum the server would learn more about it than the noise covers.

        Raises:
            ProtocolError: no round awaits input, or contributions or noise have another shape.
            OwnRecordsError: a contribution or the noise share exceeds the limit of the plan.
        """
        if self._phase is not Phase.INPUTS or self._evaluator is None:
            raise ProtocolError("no round awaits this silo's contributions", silo=self.index)
        plan, members = self._plan, self.members
        if contributions.shape != (len(members), plan.length) or noise.shape != (plan.length,):
            raise ProtocolError(
                f"contributions of {len(members)} users and noise of {plan.length} coordinates are expected",
                silo=self.index,
            )
        # The factor 1 + 2^-40 allows for the rounding of float64 in the sum of squares.
        limit = float(plan.norm_limit) ** 2 * (1.0 + 2.0**-40)
        if any(float(np.square(row, dtype=np.float64).sum()) > limit for row in contributions):
            raise OwnRecordsError(
                f"a contribution is longer than {plan.norm_limit} grid units", silo=self.index
            )
        if max(noise.max(), -noise.min()) > plan.noise_limit:
            raise OwnRecordsError(f"the noise share exceeds {plan.noise_limit} grid units", silo=self.index)
        # Silo 0 alone blinds the check, by a multiple of C; without oblivious transfer check_blind is 0.
        blind = secrets.randbelow(plan.check_blind + 1) if self.index == 0 else 0
        # Fresh for every attempt: until the silo reveals this seed, its sum stays masked even after decryption.
        self._own_mask = os.urandom(SEED_BYTES)
        keys = list(self._peers.mask_keys(tuple(range(plan.silos)), _SUM, self._round_id))
        blocks = self._evaluator.encrypt_sum(
            contributions,
            self._counts[members],
            np.append(noise, blind),
            keys,
            self._own_mask,
            os.urandom(SEED_BYTES) if dither is None else dither,
        )
        self._phase = Phase.REVEAL
        return self._envelope(EncryptedSum(blocks=tuple(blocks)))

    def _meet(self, directory: Directory) -> list[bytes]:
        self._agree(directory)
        self._directory_known = True
        if self.index:
            return self._histogram()
        self._root = os.urandom(SEED_BYTES)
        sealed = []
        for silo in range(1, self._plan.silos):
            key = self._peers.key(silo, _SEED, self._round_id)
            content = SealedSeed(sealed=seal(key, self._root, self._associated(silo)))
            sealed.append(self._envelope(content, silo))
        return sealed + self._histogram()

    def _unseal(self, content: SealedSeed) -> list[bytes]:
        if not self._directory_known:
            raise ProtocolError("the blinding seed came before the silos' keys", silo=0)
        key = self._peers.key(0, _SEED, self._round_id)
        try:
            self._root = unseal(key, content.sealed, self._associated(self.index))
        except CryptoError as error:
            raise ProtocolError(f"its blinding seed was refused: {error}", silo=0) from error
        return self._histogram()

    def _associated(self, recipient: int) -> bytes:
        return self._round_id.encode() + recipient.to_bytes(2, "big")

    def _histogram(self) -> list[bytes]:
        """Return the doubly blinded counts r_u n_{s,u} + masks, once key, directory and seed have arrived."""
        if self._evaluator is None or not self._root:
            return []
        modulus = self._evaluator.modulus
        stream = UniformIntegers(derive(self._root, _BLIND, self._round_id), modulus)
        # Units: the server inverts r_u N_u, and the silo multiplies B_u = (r_u N_u)^-1 by r_u C.
        self._blinds = [_unit(stream, modulus) for _ in range(self._plan.users)]
        totals = [blind * int(n) % modulus for blind, n in zip(self._blinds, self._counts, strict=True)]
        for key, adds in self._peers.mask_keys(tuple(range(self._plan.silos)), _HISTOGRAM, self._round_id):
            masks = UniformIntegers(key, modulus).take(self._plan.users)
            totals = [
                (total + mask if adds else total - mask) % modulus
                for total, mask in zip(totals, masks, strict=True)
            ]
        self._phase = Phase.HISTOGRAM
        size = (modulus.bit_length() + 7) // 8
        return [self._envelope(BlindedHistogram(blocks=tuple(int(t).to_bytes(size, "big") for t in totals)))]

    def _take_part(self, participants: Participants) -> list[bytes]:
        # The server could drop a user from the list; the user's contributions would be missing from the sum.
        present = np.array(participants.present, dtype=np.bool_)
        if present.shape != (self._plan.users,):
            raise ProtocolError(f"the server names participants of {present.size} users", silo=self.index)
        if not present[self.members].all():
            raise OwnRecordsError(
                "the server's list of participants lacks a user of this silo", silo=self.index
            )
        self._present = tuple(np.flatnonzero(present).tolist())
        self._phase = Phase.IDLE
        return []

    def _begin(self, envelope: Envelope) -> list[bytes]:
        content = envelope.message
        if self._phase in (Phase.SETUP, Phase.HISTOGRAM):
            raise ProtocolError("a round begins before the setup is complete")
        if envelope.sender != SERVER or isinstance(content, TransferOffer) != (self._plan.places > 0):
            raise ProtocolError("a round begins with a message that the plan does not allow")
        self._inbox.open(envelope.round_id)
        self._inbox.accept(envelope, type(content))
        self._round_id = self._bound(envelope.round_id, tuple(range(self._plan.silos)))
        if isinstance(content, TransferOffer):
            return self._choose(content)
        assert isinstance(content, EncryptedWeights)
        if content.blocks or not self._present:
            self._load(content.blocks)
        elif not self._loaded:
            raise ProtocolError("a round begins without encrypted weights")
        self._phase = Phase.INPUTS
        return []

    def _load(self, blocks: Sequence[bytes]) -> None:
        if len(blocks) != len(self._present):
            raise ProtocolError(f"{len(blocks)} encrypted weights for {len(self._present)} participants")
        assert self._evaluator is not None
        digest = sha256(b"".join(blocks)).digest()
        if digest == self._loaded:  # sent again because the last attempt was not completed
            return
        by_user = dict(zip(self._present, blocks, strict=True))
        members = self.members.tolist()
        modulus, common = self._evaluator.modulus, self._plan.common
        multipliers = [int(self._blinds[user] * common % modulus) for user in members]
        self._evaluator.load([by_user[user] for user in members], multipliers)
        self._loaded = digest

    def _choose(self, offer: TransferOffer) -> list[bytes]:
        if len(offer.constants) != self._plan.places - 1:
            raise ProtocolError(
                f"{len(offer.constants) + 1} places are offered instead of {self._plan.places}"
            )
        # Attack: with a constant C_i that is no square, the request C_i / g^k would show the server the index i.
        try:
            for point in (offer.public, *offer.constants):
                check_point(point)
        except CryptoError as error:
            raise ProtocolError(f"the server's offer was refused: {error}") from error
        # All silos derive the same places from the common seed, so that a user is sampled in all silos or in none.
        places = UniformIntegers(derive(self._root, _PLACE, self._round_id), self._plan.places)
        self._receivers = [
            TransferReceiver.choose(int(index), offer.constants) for index in places.take(len(self._present))
        ]
        self._offer = offer
        self._phase = Phase.TRANSFER
        return [self._envelope(TransferRequests(points=tuple(r.request for r in self._receivers)))]

    def _open(self, answers: TransferAnswers) -> list[bytes]:
        offer, places = self._offer, self._plan.places
        assert offer is not None
        if len(answers.blocks) != places * len(self._receivers):
            raise ProtocolError("the server's answers do not match the transfers asked for")
        try:
            weights = [
                receiver.open(
                    offer.public,
                    list(answers.blocks[k * places : (k + 1) * places]),
                    transfer_context(self._round_id, self.index, user),
                )
                for k, (user, receiver) in enumerate(zip(self._present, self._receivers, strict=True))
            ]
        except CryptoError as error:
            raise ProtocolError(f"the server's answer was refused: {error}") from error
        self._load(weights)
        self._phase = Phase.INPUTS
        return []


def _unit(stream: UniformIntegers, modulus: int) -> mpz:
    """Return the stream's next integer that is invertible modulo the plaintext modulus."""
    while True:
        value = stream.draw()
        if gcd(value, modulus) == 1:
            return value
