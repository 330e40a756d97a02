"""What a silo shares with each other silo: pairwise secrets from signed keys, and masks derived from them."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.key_agreement import AgreementKey, PairwiseSecret, RoundId, SignedKey
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.protocol import ClientContext


class PairwiseKeys:
    """A silo's agreement key and the secrets it shares with the others.

    The server relays public keys and could put its own in place; it cannot sign them (Protocol 1, requirement 11).

    Args:
        place: the silo's in the session.
        purpose: what the agreement key is for; part of what is signed.

    Raises:
        ProtocolError: the identity is not the one the roster has for this silo.
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
        """The silo's own key pair."""
        return self._key

    def sign(self, round_id: RoundId) -> SignedKey:
        """Return the silo's public key for everybody, signed."""
        return SignedKey.sign(
            self._identity, self._key.public, owner=self._index, purpose=self._purpose, round_id=round_id
        )

    def meet(self, keys: tuple[tuple[int, SignedKey], ...], round_id: RoundId) -> None:
        """Agree with the owner of every key but the silo's own.

        Raises:
            ProtocolError: a key that its owner did not sign, of a stranger, twice the same, or not this silo's own.
        """
        publics = dict(keys)
        own = publics.get(self._index)
        if own is None or own.public != self._key.public:
            raise ProtocolError("the directory does not have this silo's own key", silo=self._index)
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
        """Return the 32-byte key shared with one peer for one purpose at one attempt."""
        if peer not in self._secrets:
            raise ProtocolError("no key was agreed with it", silo=peer)
        return self._secrets[peer].derive(purpose, round_id)

    def mask_keys(
        self, cohort: tuple[int, ...], purpose: str, round_id: RoundId
    ) -> Iterator[tuple[bytes, bool]]:
        """Yield key and sign of each pairwise mask: of a pair the lower number adds, the higher subtracts."""
        for peer in cohort:
            if peer != self._index:
                yield self.key(peer, purpose, round_id), self._index < peer


def check_cohort(cohort: tuple[int, ...], silos: int, *, index: int | None = None) -> None:
    """Return if a sum over these silos hides each of them.

    Raises:
        ProtocolError: fewer than two silos, a number that no silo has, or without the asking silo itself.
    """
    if len(cohort) < 2:
        raise ProtocolError(
            f"a sum over {len(cohort)} silo would show what it sent; at least 2 must take part"
        )
    if cohort[-1] >= silos:
        raise ProtocolError(f"there are {silos} silos in this run", silo=cohort[-1])
    if index is not None and index not in cohort:
        raise ProtocolError("was asked to take part in a round that it is not in", silo=index)
