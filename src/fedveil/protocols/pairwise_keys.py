"""Agree on pairwise secrets between silos from signed keys, and derive mask keys from these secrets."""

from __future__ import annotations

from collections.abc import Iterator

from fedveil.crypto.errors import CryptoError
from fedveil.crypto.key_agreement import AgreementKey, PairwiseSecret, RoundId, SignedKey
from fedveil.protocols.errors import ProtocolError
from fedveil.protocols.protocol import ClientContext


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
        raise ProtocolError("was asked to take part in a round that it is not in", silo=index)
