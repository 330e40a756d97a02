"""Base classes of the parties of all protocols; each protocol adds its phases and messages."""

from __future__ import annotations

import hashlib
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar

from fedveil.crypto.key_agreement import AgreementKey, PairwiseSecret, RoundId, SignedKey
from fedveil.errors import CryptoError, ProtocolError
from fedveil.protocols.messages import SERVER, Announcement, Directory, Envelope, Inbox, Message, RoundStart
from fedveil.protocols.protocol import ClientContext, ClientProtocol, GivenIn, ResultOut

# --- pairwise keys ---


class PairwiseKeys:
    """Agreement key of one silo, and the secrets that it shares with the other silos.

    The server relays public keys and could replace them by its own keys. It cannot sign for a silo, so a silo refuses
    a replaced key (ULDP-FL, Protocol 1, requirement 11).

    Args:
        place: context of the silo in the session.
        purpose: purpose of the agreement key; part of the signed bytes.

    Raises:
        ProtocolError: the roster has another identity for this silo, or two silos have the same identity.
    """

    def __init__(self, place: ClientContext, purpose: str) -> None:
        index, identity, roster = place.number, place.identity, place.roster
        if not 0 <= index < len(roster) or roster[index] != identity.public:
            raise ProtocolError("the identity key is not the one that the roster names", silo=index)
        if len({public.raw for public in roster}) != len(roster):
            raise ProtocolError("two silos of the roster have the same identity key")
        self._index, self._identity, self._roster, self._purpose = index, identity, roster, purpose
        self._key = AgreementKey.generate()
        self._secrets: dict[int, PairwiseSecret] = {}

    @property
    def agreement_key(self) -> AgreementKey:
        """Key pair of the silo."""
        return self._key

    def sign(self, round_id: RoundId) -> SignedKey:
        """Return the silo's public agreement key, signed with its identity key."""
        return SignedKey.sign(
            self._identity, self._key.public, owner=self._index, purpose=self._purpose, round_id=round_id
        )

    def meet(self, keys: tuple[tuple[int, SignedKey], ...], round_id: RoundId) -> None:
        """Verify the keys of a directory and agree on a secret with every other silo in it.

        Raises:
            ProtocolError: a key that its owner did not sign, a key of a silo outside the roster, the same key twice,
                or a directory without this silo's key.
        """
        publics = dict(keys)
        own = publics.get(self._index)
        if own is None or own.public != self._key.public:
            raise ProtocolError("the directory does not have this silo's own key", silo=self._index)
        # Equal keys would give a third silo equal masks with both owners; with opposite signs they would cancel
        # in its vector.
        if len({key.public for key in publics.values()}) != len(publics):
            raise ProtocolError("two silos have the same public key")
        for silo, key in publics.items():
            if silo >= len(self._roster):
                raise ProtocolError("is not in the roster of this run", silo=silo)
            try:
                key.verify(self._roster[silo], owner=silo, purpose=self._purpose, round_id=round_id)
                if silo != self._index:
                    self._secrets[silo] = self._key.agree(key.public)
            except CryptoError as error:
                raise ProtocolError(f"its public key was refused: {error}", silo=silo) from error

    def key(self, peer: int, purpose: str, round_id: RoundId) -> bytes:
        """Return the 32-byte key that is shared with one peer, for one purpose and one attempt."""
        if peer not in self._secrets:
            raise ProtocolError("no key was agreed with it", silo=peer)
        return self._secrets[peer].derive(purpose, round_id)

    def mask_keys(
        self, cohort: tuple[int, ...], purpose: str, round_id: RoundId
    ) -> Iterator[tuple[bytes, bool]]:
        """Yield the key of each pairwise mask, and whether this silo adds the mask.

        Of each pair the silo with the lower number adds the mask and the other silo subtracts it, so that the masks
        cancel in the sum over the cohort.
        """
        for peer in cohort:
            if peer != self._index:
                yield self.key(peer, purpose, round_id), self._index < peer


def check_cohort(cohort: tuple[int, ...], silos: int, *, index: int | None = None) -> None:
    """Check that a sum over a cohort hides the input of each silo.

    Args:
        cohort: numbers of the silos, ascending.
        silos: number of silos in the run.
        index: number of the silo that checks; None for the server.

    Raises:
        ProtocolError: fewer than two silos, a number that no silo has, or a cohort without the silo ``index``.
    """
    if len(cohort) < 2:
        raise ProtocolError(
            f"a sum over {len(cohort)} silo would show what it sent; at least 2 must take part"
        )
    if cohort[-1] >= silos:
        raise ProtocolError(f"there are {silos} silos in this run", silo=cohort[-1])
    if index is not None and index not in cohort:
        raise ProtocolError("was asked to take part in a round that does not include it", silo=index)


# --- parties ---


class Party:
    """Base of both ends of a session: an inbox, and the current attempt (initially the setup, round 0).

    Args:
        run: 16 bytes that name the session.
        number: number of the silo, or ``SERVER``.
    """

    def __init__(self, run: bytes, number: int) -> None:
        self._number = number
        self._round_id = RoundId(run=run, round=0, attempt=0)
        self._context: bytes | None = None
        self._inbox = Inbox(number)
        self._inbox.open(self._round_id)

    def bind(self, context: bytes) -> None:
        """Bind keys and signatures to a digest of the messages that this party received.

        The first call binds the keys and signatures of the setup, each later call those of one round. If two parties
        received different messages, their signatures are refused and their masks do not cancel.

        Args:
            context: 32-byte digest; for a round, it is bound before the round begins.
        """
        # A round's context enters its RoundId in `_bound`, together with the cohort, when the round begins.
        if self._context is None:
            self._round_id = replace(self._round_id, context=context)
        self._context = context

    def _bound(self, round_id: RoundId, cohort: tuple[int, ...]) -> RoundId:
        """Return the id of a beginning attempt, bound to its cohort and to the digest of :meth:`bind`."""
        # The cohort is part of the context: parties with different cohorts derive different masks and signatures.
        content = (self._context or b"") + struct.pack(f">{len(cohort)}H", *cohort)
        return replace(round_id, context=hashlib.sha256(b"fedveil/3/cohort" + content).digest())

    @property
    def round_id(self) -> RoundId:
        """Round and attempt that are being played."""
        return self._round_id

    def _envelope(self, message: Message, recipient: int = SERVER) -> bytes:
        round_id, sender = self._round_id, self._number
        return Envelope(round_id=round_id, sender=sender, recipient=recipient, message=message).encode()

    def _to_each(self, silos: Iterable[int], message: Message) -> list[tuple[int, bytes]]:
        return [(silo, self._envelope(message, silo)) for silo in silos]


class SiloParty(Party, ClientProtocol[GivenIn, ResultOut]):
    """Base of the silo's end of a session whose rounds the server begins.

    Args:
        place: context of the silo in the session.
    """

    def __init__(self, place: ClientContext) -> None:
        super().__init__(place.run, place.number)
        self._place, self.index = place, place.number
        self._cohort: tuple[int, ...] = ()

    def check_round(self, round_id: RoundId) -> None:
        """Check that ``round_id`` is the round and attempt that the server's message has begun at this silo.

        Raises:
            ProtocolError: another round or attempt has begun, or none.
        """
        if round_id != self._round_id:
            raise ProtocolError(
                f"round {round_id.round}, attempt {round_id.attempt} has not begun", silo=self.index
            )


class KeyedSilo(SiloParty[GivenIn, ResultOut]):
    """Base of a silo's end that agrees on a key with every other silo in the setup.

    Args:
        silos: number of silos in the run.
        place: context of the silo in the session.
        purpose: purpose of the agreement key; part of the signed bytes.

    Raises:
        ProtocolError: the roster has another number of silos, or another identity for this silo.
    """

    def __init__(self, silos: int, place: ClientContext, *, purpose: str) -> None:
        if len(place.roster) != silos:
            raise ProtocolError(f"the roster names {len(place.roster)} silos, the plan {silos}")
        super().__init__(place)
        self._silos, self._peers = silos, PairwiseKeys(place, purpose)

    def announce(self) -> bytes:
        """Return the silo's first message, which carries its signed public key."""
        return self._envelope(Announcement(key=self._peers.sign(self._round_id)))

    def _agree(self, directory: Directory) -> None:
        """Agree on a key with every silo of the plan."""
        if len(directory.keys) != self._silos:
            raise ProtocolError(f"the directory names {len(directory.keys)} silos of {self._silos}")
        self._peers.meet(directory.keys, self._round_id)

    def _join(self, envelope: Envelope, start: RoundStart) -> None:
        """Begin a round whose cohort has this silo and at least the number of silos that its context demands."""
        # The cohort is checked before the inbox moves on, so that a refused cohort leaves the current attempt
        # unchanged.
        check_cohort(start.cohort, self._silos, index=self.index)
        least = self._place.least
        if len(start.cohort) < least:
            required = "all" if least == self._silos else least
            raise ProtocolError(
                f"a sum over {len(start.cohort)} of {self._silos} silos is asked for; {required} must be in"
            )
        self._inbox.open(envelope.round_id)
        self._inbox.accept(envelope, RoundStart)
        self._round_id, self._cohort = self._bound(envelope.round_id, start.cohort), start.cohort


class CohortServer(Party, ABC):
    """Base of a server's end that relays keys in the setup and waits for its whole cohort.

    Args:
        silos: number of silos in the run.
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
        """Number of silos in the sum: the whole cohort."""
        return len(self._cohort)

    def proceed(self) -> list[tuple[int, bytes]]:
        """Refuse to proceed without the missing silos: the protocol needs every silo of the cohort.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError(f"every silo of the cohort is needed; silos {list(self.missing)} are missing")

    @property
    def missing(self) -> tuple[int, ...]:
        """Silos of the cohort whose message for the current step has not arrived."""
        return tuple(silo for silo in self._cohort if silo not in self._arrived)

    def receive(self, sender: int, data: bytes) -> list[tuple[int, bytes]]:
        """Read a message of a silo; return the messages to send next, as pairs of recipient and bytes.

        Args:
            sender: number of the silo, as the transport authenticated it.
            data: the received bytes.

        Raises:
            ProtocolError: a message that must not be accepted; the error names the silo, and the sums are unchanged.
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
        # After `_take`: a refused message does not count as arrived.
        self._arrived.add(sender)
        return replies + ([] if self.missing else self._next_phase())

    @abstractmethod
    def _awaited(self, sender: int) -> type[Message] | None:
        """Return the kind of message that the server awaits from a silo; None if it awaits no message."""

    @abstractmethod
    def _take(self, sender: int, content: Message) -> list[tuple[int, bytes]]:
        """Process an awaited message; return the messages that answer its sender at once."""

    @abstractmethod
    def _next_phase(self) -> list[tuple[int, bytes]]:
        """Begin the next step once all awaited messages have arrived; return its messages."""

    def _relay(self, envelope: Envelope, data: bytes) -> list[tuple[int, bytes]]:
        """Relay a message between silos; overridden where ``_relayed_kinds`` is not empty."""
        raise NotImplementedError

    def _start(self, round_id: RoundId, cohort: tuple[int, ...]) -> None:
        """Begin a round, or another attempt at it."""
        check_cohort(cohort, self._silos)
        self._inbox.open(round_id)
        self._round_id, self._cohort, self._arrived = self._bound(round_id, cohort), cohort, set()

    def _directory(self) -> Directory:
        """Return the signed keys of all silos, ascending by silo."""
        return Directory(keys=tuple(sorted(self._keys.items())))

    def _to_cohort(self, message: Message) -> list[tuple[int, bytes]]:
        return self._to_each(self._cohort, message)
