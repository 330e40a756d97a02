"""Wrappers for the Strategy of an app you have: smooth its aggregate, or decode what ``mods.quantise`` sent.

strategy = Smoothed(FedAvg(), smoothing=1.0)
strategy = Dequantised(Smoothed(FedAvg()), std=0.1, secrets={node: secret, ...})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedveil.errors import MessageError, ProtocolError
from fedveil.federation.transport.flower.mods import QUANTISED, moved_by, nonce_key, update_of
from fedveil.quantization.codec import gaussian_channel
from fedveil.quantization.streams import KeyedStreams
from fedveil.training.server.denoise import Laplacian


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
        super().__init__(inner)
        self._denoiser = Laplacian(smoothing=smoothing)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Return the inner strategy's aggregate, its change smoothed tensor by tensor."""
        arrays, metrics = super().aggregate_train(server_round, replies)
        if arrays is None:
            return None, metrics
        change = torch.from_numpy(update_of(self._arrays, arrays))
        shapes = tuple(tuple(array.shape) for array in self._arrays.values())
        estimate = self._denoiser.estimate(change, 0.0, shapes)
        return moved_by(self._arrays, estimate.numpy()), metrics


class Dequantised(_Wrapper):
    """Decodes the updates that :func:`~.mods.quantise` sent, before any strategy aggregates them.

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
