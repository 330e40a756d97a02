"""Messages of a channel of bytes on their way from a silo to the coordinator: sealed for the two, key and all.

A receiver decodes a message with its key, and whoever has the key learns more of a sum than its decoded value
(docs/theory/lrsuq.md). So every message has a key of its own from the silo's randomness, and travels with it under
authenticated encryption: silo and coordinator agree on a secret in every session, by X25519 keys in signed letters. The
carrier sees ciphertexts, also where its TLS ends before the coordinator. What the silo keeps of a round is message and
key, so a round that is asked for again is the same bytes under another seal, in a session as good as in the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float64

from fedveil.crypto.aead import seal, unseal
from fedveil.crypto.agreement import AgreementKey, PairwiseSecret, RoundId
from fedveil.crypto.errors import CryptoError
from fedveil.methods.client_messages import ClientMessages
from fedveil.methods.layered_shares import LayeredShares
from fedveil.methods.method import Method
from fedveil.methods.sending import Coded
from fedveil.protection.errors import ProtocolError
from fedveil.protection.parts import Agreement, Part, Sealed, Vector, only
from fedveil.quantization.errors import ChannelError

_PURPOSE = "federation: a channel's message"
_KEY_BYTES = 32


def to_bytes(coded: Coded) -> bytes:
    """Return key and message as one byte string: what is kept, and what is sealed."""
    return coded.key + coded.message


class CodedPost:
    """One party's end of the sealed post of a session: a new agreement key, and the secrets shared with others.

    Args:
        run: 16 bytes that name the session.
    """

    def __init__(self, run: bytes) -> None:
        self._run = run
        self._own = AgreementKey.generate()
        self._shared: dict[int, PairwiseSecret] = {}

    @property
    def offer(self) -> Agreement:
        """What the other end needs to know."""
        return Agreement(public=self._own.public)

    def meet(self, silo: int, offer: Agreement) -> None:
        """Agree with the other end on a secret for what ``silo`` sends.

        Raises:
            ProtocolError: no usable key.
        """
        try:
            self._shared[silo] = self._own.agree(offer.public)
        except CryptoError as error:
            raise ProtocolError(str(error), silo=silo) from error

    def seal(self, silo: int, round_number: int, content: bytes) -> Sealed:
        """Return what ``silo`` sends in a round, for the other end alone."""
        key, round_id = self._key(silo, round_number)
        return Sealed(sealed=seal(key, content, _associated(round_id, silo)))

    def open(self, silo: int, round_number: int, part: Sealed) -> Coded:
        """Return the message and key that a silo sent.

        Raises:
            ProtocolError: sealed by somebody else, in another session, for another round, or altered.
        """
        key, round_id = self._key(silo, round_number)
        try:
            content = unseal(key, part.sealed, _associated(round_id, silo))
        except CryptoError as error:
            raise ProtocolError(f"its message was refused: {error}", silo=silo) from error
        if len(content) < _KEY_BYTES:
            raise ProtocolError("its message lacks a key", silo=silo)
        return Coded(key=content[:_KEY_BYTES], message=content[_KEY_BYTES:])

    def _key(self, silo: int, round_number: int) -> tuple[bytes, RoundId]:
        round_id = RoundId(run=self._run, round=round_number, attempt=0)
        return self._shared[silo].derive(_PURPOSE, round_id), round_id


def _associated(round_id: RoundId, silo: int) -> bytes:
    return round_id.encode() + silo.to_bytes(2, "big")


def open_sums(
    answers: Mapping[int, Sequence[Part]],
    *,
    method: Method,
    post: CodedPost | None,
    round_number: int,
    length: int,
) -> list[Float64[np.ndarray, " d"]]:
    """Return what every silo sent in the open or sealed, decoded, in the order of the silos.

    Args:
        answers: per silo the parts of its letter.
        method: the composition.
        post: of the session, where messages are bytes.
        round_number: the round.
        length: d.

    Raises:
        ProtocolError: names the silo whose message is none, or not finite.
    """
    vectors = []
    for silo, parts in answers.items():
        if post is None:
            vector = only(parts, Vector, silo).values
        else:
            coded = post.open(silo, round_number, only(parts, Sealed, silo))
            vector = _decode(method, coded, silo, len(answers), length)
        if len(vector) != length or not np.isfinite(vector).all():
            raise ProtocolError(f"did not send {length} finite numbers", silo=silo)
        vectors.append(vector)
    return vectors


def _decode(method: Method, coded: Coded, silo: int, n_silos: int, length: int) -> Float64[np.ndarray, " d"]:
    channel = method.channel
    try:
        if isinstance(channel, LayeredShares):
            return channel.receive(coded, n_silos=n_silos, length=length)
        assert isinstance(channel, ClientMessages)
        return channel.receive(coded, length=length)
    except ChannelError as error:
        raise ProtocolError(f"its message was refused: {error}", silo=silo) from error
