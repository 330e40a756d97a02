"""Server's end of partial encryption (ParaAegis), which holds no key.

A silo's update has two parts: some coordinates encrypted under CKKS, the others in the clear. The silos vote for the
coordinates to encrypt, in an order that is secret from the server.

    SETUP    silos announce signed keys; the server relays them, and then silo 0's sealed common keys
    VOTES    the server counts the silos' ballots, and sends the positions with most votes: the partition
    INPUTS   the server adds the ciphertexts, and the numbers in the clear
    DONE     the silos get both sums, and decrypt the encrypted one

:mod:`~fedveil.protocols.partial_encryption.silo` has the whole protocol.
"""

from __future__ import annotations

from typing import NoReturn

import numpy as np

from fedveil.crypto.ckks import CkksSum
from fedveil.crypto.key_agreement import RoundId
from fedveil.errors import CryptoError, ProtocolError
from fedveil.protocols.messages import Announcement, Envelope, MaskedVector, Message, RoundStart
from fedveil.protocols.partial_encryption.plan import (
    Ballot,
    PartialPlan,
    PartialSum,
    PartialUpdate,
    Partition,
    SealedKeys,
    decode_bitmap,
    encode_bitmap,
    largest,
)
from fedveil.protocols.partial_encryption.silo import Phase
from fedveil.protocols.parties import CohortServer
from fedveil.protocols.protocol import Drawn, Outgoing


class PartialServer(CohortServer):
    """Server's end of a session: it relays sealed keys, counts votes, and adds both parts of the updates.

    Args:
        plan: public plan of the protocol.
        run: 16 bytes that name the session.
    """

    may_have_released = True  # one part of every update is sent in the clear
    _relayed_kinds = (SealedKeys,)

    def __init__(self, plan: PartialPlan, run: bytes) -> None:
        super().__init__(plan.silos, run)
        self._plan = plan
        self._phase = Phase.SETUP
        self._relayed: set[int] = set()
        self._counts = np.zeros(0, dtype=np.int64)
        self._words = np.zeros(0, dtype="<u4")  # masked votes, packed into words
        self._clear = np.zeros(0, dtype=np.int64)
        self._encrypted = CkksSum(plan.ckks, 0)
        self._key_tag = (0, b"")  # last sender, and the tag of its CKKS key; empty before the first update

    @property
    def ready(self) -> bool:
        """Return whether every silo has the common keys, so that a round can begin."""
        return self._phase is not Phase.SETUP

    def begin(
        self, round_id: RoundId, cohort: tuple[int, ...], sampled_users: Drawn | None = None
    ) -> Outgoing:
        """Begin a round, or another attempt at it; return the messages to the cohort.

        Args:
            round_id: a later round or attempt than any before.
            cohort: numbers of the silos that begin the attempt, ascending.
            sampled_users: ignored: the silos compute their updates over the sampled users only.

        Raises:
            ProtocolError: the common keys are not relayed yet, the attempt was begun before, or the cohort has fewer
                than two silos.
        """
        if self._phase is Phase.SETUP:
            raise ProtocolError("a round cannot begin before every silo has the common keys")
        self._start(round_id, cohort)
        self._key_tag = (0, b"")
        plan, count = self._plan, self._plan.n_encrypted(round_id.round)
        self._counts = np.zeros(plan.length, dtype=np.int64)
        self._words = np.zeros(plan.count_words, dtype="<u4")
        self._clear = np.zeros(plan.length - count, dtype=np.int64)
        self._encrypted = CkksSum(plan.ckks, count)
        self._phase = Phase.VOTES if plan.votes(round_id.round) else Phase.INPUTS
        return self._to_cohort(RoundStart(cohort=cohort))

    def _awaited(self, sender: int) -> type[Message] | None:
        if self._phase is Phase.SETUP:
            return None if sender in self._keys else Announcement
        ballot = Ballot if self._plan.ballots == "plain" else MaskedVector
        return {Phase.VOTES: ballot, Phase.INPUTS: PartialUpdate}.get(self._phase)

    def _take(self, sender: int, content: Message) -> list[tuple[int, bytes]]:
        plan = self._plan
        if isinstance(content, Announcement):
            self._keys[sender] = content.key
        elif isinstance(content, Ballot):
            self._counts += decode_bitmap(content.bitmap, plan.length, plan.n_encrypted(self._round_id.round))
        elif isinstance(content, MaskedVector):
            if content.word_bytes != 4 or content.words.shape != self._words.shape:
                raise ProtocolError(f"votes under masks are {plan.count_words} words of 4 bytes")
            self._words += content.words
        elif isinstance(content, PartialUpdate):
            self._add(sender, content)
        return []

    def result(self) -> NoReturn:
        """Refuse: only the silos learn the sum."""
        raise ProtocolError("under partial encryption the server learns no sum")

    def _add(self, sender: int, update: PartialUpdate) -> None:
        plan = self._plan
        if update.fingerprint != plan.ckks.fingerprint:
            raise ProtocolError("encrypts under other parameters than were agreed")
        # A sum of ciphertexts under different keys decrypts to noise. Unequal key tags reveal this before the sum, and
        # show which silos differ.
        other, tag = self._key_tag
        if tag and update.tag != tag:
            raise ProtocolError(f"holds another key than silo {other}: one of them did not get silo 0's")
        if update.size != plan.clear_bytes or update.clear.shape != self._clear.shape:
            raise ProtocolError(
                f"sent {len(update.clear)} numbers of {update.size} bytes in clear instead of {len(self._clear)} of "
                f"{plan.clear_bytes}"
            )
        if len(update.clear) and max(int(update.clear.max()), -int(update.clear.min())) > plan.clear_limit:
            raise ProtocolError(f"sent a number in clear above the limit of {plan.clear_limit} grid units")
        # Add the ciphertexts first: if they are refused, the sum in the clear must stay unchanged.
        try:
            self._encrypted.add(update.hidden)
        except CryptoError as error:
            raise ProtocolError(f"its ciphertexts were refused: {error}") from error
        self._clear += update.clear
        self._key_tag = (sender, update.tag)

    def _relay(self, envelope: Envelope, data: bytes) -> list[tuple[int, bytes]]:
        # Relayed messages do not pass through the inbox, so their session, round, sender and replay are checked here.
        recipient = envelope.recipient
        if (
            self._phase is not Phase.SETUP
            or envelope.sender != 0
            or envelope.round_id != self._round_id
            or not 0 < recipient < self._plan.silos
            or len(self._keys) < self._plan.silos
            or recipient in self._relayed
        ):
            raise ProtocolError("sent common keys that are not for relaying now")
        self._relayed.add(recipient)
        if len(self._relayed) == self._plan.silos - 1:
            self._phase = Phase.IDLE
        return [(recipient, data)]

    def _next_phase(self) -> list[tuple[int, bytes]]:
        if self._phase is Phase.SETUP:
            self._arrived = set()
            return self._to_cohort(self._directory())
        if self._phase is Phase.VOTES:
            self._arrived, self._phase = set(), Phase.INPUTS
            # `largest` needs no key to break ties at random: positions are in a secret random order of the coordinates,
            # so the first of several equal counts belongs to a random coordinate.
            masked = self._plan.ballots == "secagg"
            counts = self._plan.unpack_counts(self._words) if masked else self._counts
            chosen = largest(counts, self._plan.n_encrypted(self._round_id.round))
            return self._to_cohort(Partition(bitmap=encode_bitmap(chosen)))
        self._phase = Phase.DONE
        sums = PartialSum(
            tag=self._key_tag[1],
            fingerprint=self._plan.ckks.fingerprint,
            size=self._plan.sum_bytes,
            clear=self._clear,
            hidden=self._encrypted.encode(),
        )
        return self._to_cohort(sums)
