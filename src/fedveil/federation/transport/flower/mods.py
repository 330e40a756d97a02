"""Mods for a ClientApp, which bound or quantise its update, and the update in its reply.

app = ClientApp(mods=[clip(1.0)])
app = ClientApp(mods=[quantise(std=0.1, secret=secret), clip(1.0)])

The first mod is the outermost: it sees the reply that those after it have made, so that what is quantised is bounded.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MessageType
from jaxtyping import Float64

from fedveil.errors import ModelError
from fedveil.quantization.codec import gaussian_channel
from fedveil.quantization.streams import KeyedStreams, update_key

# --- the update in a reply ---


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
    moved, at = {}, 0
    for name, array in before.items():
        old = array.numpy()
        part = update[at : at + old.size].reshape(old.shape)
        moved[name] = Array((old.astype(np.float64) + part).astype(old.dtype))
        at += old.size
    return ArrayRecord(moved)


def replace_arrays(message: Message, arrays: ArrayRecord) -> None:
    """Put arrays in the place of a message's one array record."""
    (name,) = message.content.array_records
    message.content.array_records[name] = arrays


QUANTISED: Final = "fedveil.update"
"""The config record of a quantised update: "nonce" and "message"."""

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

    What the server decodes (:class:`~.strategies.Dequantised`) is update + N(0, std^2 I), exactly; the
    reply's arrays are emptied. The server holds the secret and so learns more than the noisy update: it is trusted
    (docs/theory/lrsuq.md).

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


def nonce_key(secret: bytes, nonce: bytes) -> bytes:
    """Return the key of one update; a nonce is drawn for each, so no key is used twice."""
    return update_key(secret, run=nonce.hex(), client=0, round_number=0)
