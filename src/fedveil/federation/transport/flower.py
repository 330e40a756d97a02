"""Parts for Flower apps of your own: mods for the ClientApp, wrappers for the ServerApp's Strategy; needs flwr.

app = ClientApp(mods=[clip(1.0)])                    bounds the update in each reply
strategy = Smoothed(FedAvg(), smoothing=1.0)         smooths what the strategy aggregates

app = ClientApp(mods=[quantise(std=0.1, secret=secret), clip(1.0)])                 quantises it, too
strategy = Dequantised(Smoothed(FedAvg()), std=0.1, secrets={node: secret, ...})    decodes what was quantised

The first mod is the outermost: it sees the reply that those after it have made, so that what is quantised is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy
from jaxtyping import Float64

from fedveil.errors import MessageError, ModelError, ProtocolError
from fedveil.quantization.codec import gaussian_channel
from fedveil.quantization.streams import KeyedStreams, update_key

# --- the update in a reply ---

QUANTISED: Final = "fedveil.update"
"""The config record of a quantised update: "nonce" and "message"."""


def arrays_of(message: Message) -> ArrayRecord:
    """Return the one array record of a message.

    Raises:
        ModelError: none or several.
    """
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise ModelError(f"a message has {len(records)} array records; exactly 1 is needed")
    return records[0]


def update_of(before: ArrayRecord, after: ArrayRecord) -> Float64[np.ndarray, " d"]:
    """Return after - before as one (d,) vector, arrays in the order of ``before``.

    Raises:
        ModelError: other names or shapes than before, or arrays that are no floating-point numbers.
    """
    if list(before) != list(after):
        raise ModelError("a reply has other arrays than the message before it")
    parts = []
    for name in before:
        old, new = before[name].numpy(), after[name].numpy()
        if old.shape != new.shape or not np.issubdtype(old.dtype, np.floating):
            raise ModelError(f"array '{name}': floating-point numbers of the shape {old.shape} are needed")
        parts.append((new.astype(np.float64) - old.astype(np.float64)).reshape(-1))
    return np.concatenate(parts)


def moved_by(before: ArrayRecord, update: Float64[np.ndarray, " d"]) -> ArrayRecord:
    """Return before + update, in the types and shapes of ``before``."""
    moved, offset = {}, 0
    for name, array in before.items():
        old = array.numpy()
        part = update[offset : offset + old.size].reshape(old.shape)
        moved[name] = Array((old.astype(np.float64) + part).astype(old.dtype))
        offset += old.size
    return ArrayRecord(moved)


def replace_arrays(message: Message, arrays: ArrayRecord) -> None:
    """Put arrays in the place of a message's one array record."""
    (name,) = message.content.array_records
    message.content.array_records[name] = arrays


def nonce_key(secret: bytes, nonce: bytes) -> bytes:
    """Return the key of one update; a nonce is drawn for each, so no key is used twice."""
    return update_key(secret, run=nonce.hex(), client=0, round_number=0)


# --- mods of a ClientApp ---

Call = Callable[[Message, Context], Message]
Mod = Callable[[Message, Context, Call], Message]


def clip(norm: float) -> Mod:
    """Return a mod that bounds each update: after - before is scaled to an l2 norm of at most ``norm``.

    For apps whose client is one user. The bound holds for the arrays as they are sent, rounded to their own type; an
    update that is not finite becomes zero.

    Args:
        norm: C, in the unit of the parameters.

    Raises:
        ModelError: a norm that is not above 0.
    """
    if not (norm > 0 and np.isfinite(norm)):
        raise ModelError(f"clip({norm}): a finite norm above 0 is needed")

    def bounded(message: Message, context: Context, call_next: Call) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type != MessageType.TRAIN or reply.has_error():
            return reply
        before = arrays_of(message)
        update = update_of(before, arrays_of(reply))
        update = update if np.isfinite(update).all() else np.zeros_like(update)
        length = float(np.linalg.norm(update))
        factor = min(1.0, norm / length) if length else 1.0
        sent = moved_by(before, update * factor)
        for bits in range(24, 0, -1):  # rounding to the arrays' type may have made it longer
            if np.linalg.norm(update_of(before, sent)) <= norm:
                break
            sent = moved_by(before, update * (factor * (1 - 2.0**-bits)))
        else:
            sent = before  # the arrays' type cannot express so short an update
        replace_arrays(reply, sent)
        return reply

    return bounded


def quantise(*, std: float, secret: bytes) -> Mod:
    """Return a mod that sends each update as a short message whose compression error is Gaussian noise (LRSUQ).

    What the server decodes (:class:`Dequantised`) is update + N(0, std^2 I), exactly; the reply's arrays are emptied.
    The server holds the secret and so learns more than the noisy update: it is trusted (docs/theory/lrsuq.md).

    Args:
        std: standard deviation of the noise, in the unit of the parameters.
        secret: at least 16 bytes that this client and the server share.
    """
    codec = gaussian_channel(std)

    def sent(message: Message, context: Context, call_next: Call) -> Message:
        reply = call_next(message, context)
        if message.metadata.message_type != MessageType.TRAIN or reply.has_error():
            return reply
        update = update_of(arrays_of(message), arrays_of(reply))
        nonce = os.urandom(16)
        encoded = codec.encode(update, KeyedStreams(nonce_key(secret, nonce)))
        for name in list(reply.content.array_records):
            del reply.content[name]
        reply.content[QUANTISED] = ConfigRecord({"nonce": nonce, "message": encoded})
        return reply

    return sent


# --- wrappers of a ServerApp's Strategy ---


class _Wrapper(Strategy):
    """A strategy that leaves everything to another one, and remembers the arrays of the round.

    Args:
        inner: any strategy.
    """

    def __init__(self, inner: Strategy) -> None:
        self._inner = inner
        self._arrays = ArrayRecord()

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages."""
        self._arrays = arrays.copy()
        return self._inner.configure_train(server_round, arrays, config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the inner strategy's aggregate."""
        return self._inner.aggregate_train(server_round, replies)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the inner strategy's messages."""
        return self._inner.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Return the inner strategy's metrics."""
        return self._inner.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        """Log the inner strategy's summary."""
        self._inner.summary()


class Smoothed(_Wrapper):
    """Smooths what any strategy aggregates: the change of the model is replaced by its Laplacian smoothing.

    Post-processing: it costs no privacy, and removes noise that the aggregate carries (docs/theory/
    laplacian-smoothing.md).

    Args:
        inner: any strategy.
        smoothing: sigma of the smoothing; 0 changes nothing.
    """

    def __init__(self, inner: Strategy, *, smoothing: float = 1.0) -> None:
        # With torch, seconds to import; a client, of which Flower may start a process for each message, needs neither.
        from fedveil.training.server.denoise import Laplacian

        super().__init__(inner)
        self._denoiser = Laplacian(smoothing=smoothing)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the inner strategy's aggregate, its change smoothed tensor by tensor."""
        import torch  # late, as in __init__

        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            return None, metrics
        change = torch.from_numpy(update_of(self._arrays, arrays))
        shapes = tuple(tuple(array.shape) for array in self._arrays.values())
        estimate = self._denoiser.estimate(change, 0.0, shapes)
        return moved_by(self._arrays, estimate.numpy()), metrics


class Dequantised(_Wrapper):
    """Decodes the updates that :func:`quantise` sent, before any strategy aggregates them.

    Args:
        inner: any strategy.
        std: standard deviation of the noise that the clients' quantisers make.
        secrets: by node, the bytes that it shares with the server.
        arrays: name of the array record that the inner strategy reads.
    """

    def __init__(
        self, inner: Strategy, *, std: float, secrets: Mapping[int, bytes], arrays: str = "arrays"
    ) -> None:
        super().__init__(inner)
        self._codec, self._secrets, self._name = gaussian_channel(std), secrets, arrays

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the inner strategy's aggregate of the decoded replies.

        Raises:
            ProtocolError: a reply without a quantised update, or of a node without a secret.
            MessageError: a damaged message; names the node.
        """
        decoded = list(replies)
        for reply in decoded:
            if not reply.has_error():
                self._decode(reply)
        return super().aggregate_train(server_round, decoded)

    def _decode(self, reply: Message) -> None:
        node = reply.metadata.src_node_id
        record = reply.content.config_records.get(QUANTISED, ConfigRecord())
        if node not in self._secrets:
            raise ProtocolError(f"node {node}: no secret that its update was made under")
        nonce, message = record.get("nonce"), record.get("message")
        if not (isinstance(nonce, bytes) and isinstance(message, bytes)):
            raise ProtocolError(f"node {node}: no quantised update, which is a nonce and a message of bytes")
        length = sum(array.numpy().size for array in self._arrays.values())
        streams = KeyedStreams(nonce_key(self._secrets[node], nonce))
        try:
            update = self._codec.decode(message, streams, length=length)
        except MessageError as error:
            raise MessageError(f"node {node}: {error}") from None
        del reply.content[QUANTISED]
        reply.content[self._name] = moved_by(self._arrays, update)
