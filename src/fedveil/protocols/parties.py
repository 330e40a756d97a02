"""What the parties of all protocols have in common; each protocol adds its phases and reads its own messages."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from fedveil.crypto.key_agreement import RoundId, SignedKey
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.messages import SERVER, Announcement, Directory, Envelope, Inbox, Message, RoundStart
from fedveil.protocols.pairwise_keys import PairwiseKeys, check_cohort
from fedveil.protocols.protocol import ClientContext, ClientProtocol, GivenIn, ResultOut


class Party:
    """A party with its inbox, at the attempt that is being played: in the beginning, the setup.

    Args:
        run: 16 bytes that name the session.
        number: a silo's number, or SERVER.
    """

    def __init__(self, run: bytes, number: int) -> None:
        self._number = number
        self._round_id = RoundId(run=run, round=0, attempt=0)
        self._context: bytes | None = None
        self._inbox = Inbox(number)
        self._inbox.open(self._round_id)

    def bind(self, context: bytes) -> None:
        """Bind keys and signatures to what this party was told: first those of the setup, then those of every round.

        Where parties were told different things, signatures are refused and masks do not cancel.

        Args:
            context: 32 bytes; of a round, before it begins.
        """
        if self._context is None:
            self._round_id = replace(self._round_id, context=context)
        self._context = context

    def _bound(self, round_id: RoundId, cohort: tuple[int, ...]) -> RoundId:
        """Return a round or attempt that begins with a cohort, bound to it and to what this party was told."""
        told = (self._context or b"") + struct.pack(f">{len(cohort)}H", *cohort)
        return replace(round_id, context=hashlib.sha256(b"fedveil/3/cohort" + told).digest())

    @property
    def round_id(self) -> RoundId:
        """The round and attempt being played."""
        return self._round_id

    def _envelope(self, message: Message, recipient: int = SERVER) -> bytes:
        round_id, sender = self._round_id, self._number
        return Envelope(round_id=round_id, sender=sender, recipient=recipient, message=message).encode()

    def _to_each(self, silos: Iterable[int], message: Message) -> list[tuple[int, bytes]]:
        return [(silo, self._envelope(message, silo)) for silo in silos]


class SiloParty(Party, ClientProtocol[GivenIn, ResultOut]):
    """A silo that takes part in rounds which the server begins; it is its own end of the session.

    Args:
        place: the silo's in the session.
    """

    def __init__(self, place: ClientContext) -> None:
        super().__init__(place.run, place.number)
        self._place, self.index = place, place.number
        self._cohort: tuple[int, ...] = ()

    def check_round(self, round_id: RoundId) -> None:
        """Return if this is the round and attempt that the server's message has begun here.

        Raises:
            ProtocolError: it is another one.
        """
        if round_id != self._round_id:
            raise ProtocolError(
                f"round {round_id.round}, attempt {round_id.attempt} has not begun", silo=self.index
            )


class KeyedSilo(SiloParty[GivenIn, ResultOut]):
    """A silo that agrees on a key with every other one in the setup.

    Args:
        silos: how many there are.
        place: the silo's in the session.
        purpose: what the agreement key is for.

    Raises:
        ProtocolError: a roster of another number of silos, or with another identity for this one.
    """

    def __init__(self, silos: int, place: ClientContext, *, purpose: str) -> None:
        if len(place.roster) != silos:
            raise ProtocolError(f"the roster names {len(place.roster)} silos, the plan {silos}")
        super().__init__(place)
        self._silos, self._peers = silos, PairwiseKeys(place, purpose)

    def announce(self) -> bytes:
        """Return the silo's first message: its signed public key."""
        return self._envelope(Announcement(key=self._peers.sign(self._round_id)))

    def _agree(self, directory: Directory) -> None:
        """Agree with every silo of the plan."""
        if len(directory.keys) != self._silos:
            raise ProtocolError(f"the directory names {len(directory.keys)} silos of {self._silos}")
        self._peers.meet(directory.keys, self._round_id)

    def _join(self, envelope: Envelope, start: RoundStart) -> None:
        """Go on to a round of which this silo is asked to be, with as many silos as its place demands."""
        check_cohort(start.cohort, self._silos, index=self.index)
        least = self._place.least
        if len(start.cohort) < least:
            must = "all" if least == self._silos else least
            raise ProtocolError(
                f"a sum over {len(start.cohort)} of {self._silos} silos is asked for; {must} must be in"
            )
        self._inbox.open(envelope.round_id)
        self._inbox.accept(envelope, RoundStart)
        self._round_id, self._cohort = self._bound(envelope.round_id, start.cohort), start.cohort


class CohortServer(Party, ABC):
    """A server that relays the silos' keys in the setup, and in every step of a round waits for its whole cohort.

    Args:
        silos: how many there are.
        run: 16 bytes that name the session.
    """

    has_quorum: ClassVar[bool] = False
    _relayed_kinds: ClassVar[tuple[type[Message], ...]] = ()

    def __init__(self, silos: int, run: bytes) -> None:
        super().__init__(run, SERVER)
        self._silos, self._cohort = silos, tuple(range(silos))
        self._keys: dict[int, SignedKey] = {}
        self._arrived: set[int] = set()

    @property
    def n_summed(self) -> int:
        """How many silos' contributions the sum is over: the whole cohort's."""
        return len(self._cohort)

    def proceed(self) -> list[tuple[int, bytes]]:
        """Refuse: every message of the cohort is awaited.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError(f"every silo of the cohort is needed; silos {list(self.missing)} are missing")

    @property
    def missing(self) -> tuple[int, ...]:
        """Silos of the cohort whose message for the present step has not arrived."""
        return tuple(silo for silo in self._cohort if silo not in self._arrived)

    def receive(self, sender: int, data: bytes) -> list[tuple[int, bytes]]:
        """Read a message of a silo; return the messages that follow, as pairs of recipient and bytes.

        Args:
            sender: the silo at the other end of the channel, as the transport knows it.
            data: what it sent.

        Raises:
            ProtocolError: a message that must not be accepted, naming the silo; the sums are as before.
        """
        envelope = Envelope.from_silo(data, sender, self._cohort)
        try:
            if isinstance(envelope.message, self._relayed_kinds):
                return self._relay(envelope, data)
            awaited = self._awaited(sender)
            if awaited is None:
                raise ProtocolError("sent a message when none was awaited")
            self._inbox.accept(envelope, awaited)
            replies = self._take(sender, envelope.message)
        except ProtocolError as error:
            raise ProtocolError(error.reason, silo=sender) from error
        self._arrived.add(sender)
        return replies + ([] if self.missing else self._next_phase())

    @abstractmethod
    def _awaited(self, sender: int) -> type[Message] | None:
        """Return the kind of message that is awaited of a silo; None: none."""

    @abstractmethod
    def _take(self, sender: int, content: Message) -> list[tuple[int, bytes]]:
        """Take what an awaited message says; return what its sender is answered at once."""

    @abstractmethod
    def _next_phase(self) -> list[tuple[int, bytes]]:
        """Go on, as all awaited messages are in; return the messages of the next step."""

    def _relay(self, envelope: Envelope, data: bytes) -> list[tuple[int, bytes]]:
        """Hand on what a silo has sealed for another one; a protocol without such messages has none to hand on."""
        raise NotImplementedError

    def _start(self, round_id: RoundId, cohort: tuple[int, ...]) -> None:
        """Go on to a round or another attempt of it."""
        check_cohort(cohort, self._silos)
        self._inbox.open(round_id)
        self._round_id, self._cohort, self._arrived = self._bound(round_id, cohort), cohort, set()

    def _directory(self) -> Directory:
        """Return all silos' keys."""
        return Directory(keys=tuple(sorted(self._keys.items())))

    def _to_cohort(self, message: Message) -> list[tuple[int, bytes]]:
        return self._to_each(self._cohort, message)
