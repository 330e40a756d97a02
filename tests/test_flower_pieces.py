"""Drop-in pieces for a Flower app: what each does to updates that a real ClientApp and FedAvg exchange."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from fedveil.errors import MessageError, ModelError, ProtocolError
from fedveil.federation.transport.flower import QUANTISED, Dequantised, Smoothed, clip, quantise, update_of
from fedveil.training.server.denoise import smooth

SECRET = bytes(range(32))


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("run_id", "task_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)


def test_a_clients_process_does_not_load_torch() -> None:
    """Flower may start a process for each message, and torch takes seconds to import."""
    program = "import sys, fedveil.federation.transport.flower; print('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown.stdout == "False\n"


def record(scale: float = 1.0) -> ArrayRecord:
    rng = np.random.default_rng(3)
    return ArrayRecord(
        {
            "weight": Array((scale * rng.normal(size=(4, 5))).astype(np.float32)),
            "bias": Array(np.zeros(5, dtype=np.float32)),
        }
    )


def question(arrays: ArrayRecord) -> Message:
    content = RecordDict({"arrays": arrays, "config": ConfigRecord({})})
    message = Message(content, dst_node_id=7, message_type="train")
    message.metadata.__dict__["_message_id"] = "question"
    return message


def answered(mods: list[Any], step: Callable[[np.ndarray], np.ndarray], arrays: ArrayRecord) -> Message:
    """What a client with these mods replies whose training maps each array by ``step``."""
    app = ClientApp(mods=mods)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        before = message.content.array_records["arrays"]
        after = ArrayRecord({name: Array(step(array.numpy())) for name, array in before.items()})
        metrics = MetricRecord({"num-examples": 3})
        return Message(RecordDict({"arrays": after, "metrics": metrics}), reply_to=message)

    context = Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})
    return app(question(arrays), context)


def change(reply: Message, arrays: ArrayRecord) -> np.ndarray:
    return update_of(arrays, reply.content.array_records["arrays"])


@pytest.mark.parametrize("scale", [1.0, 1e4, 1e-30])
@pytest.mark.parametrize("norm", [0.5, 1e-3])
def test_an_update_is_bounded_as_it_is_sent(norm: float, scale: float) -> None:
    arrays = record(scale)
    reply = answered([clip(norm)], lambda array: (array + 0.3).astype(np.float32), arrays)
    assert np.linalg.norm(change(reply, arrays)) <= norm
    if scale == 1.0:
        assert np.linalg.norm(change(reply, arrays)) > 0.99 * norm


def test_a_short_update_stays_as_it_is_and_a_broken_one_becomes_zero() -> None:
    arrays = record()
    reply = answered([clip(100.0)], lambda array: (array + 0.25).astype(np.float32), arrays)
    np.testing.assert_allclose(change(reply, arrays), 0.25, rtol=1e-6)
    reply = answered([clip(1.0)], lambda array: np.full_like(array, np.nan), arrays)
    assert (change(reply, arrays) == 0).all()
    with pytest.raises(ModelError, match="above 0"):
        clip(0.0)


def test_an_aggregate_is_smoothed_whatever_the_strategy() -> None:
    arrays = record()
    strategy = Smoothed(FedAvg(), smoothing=2.0)
    strategy._arrays = arrays
    rng = np.random.default_rng(9)
    reply = answered([], lambda array: (array + rng.normal(size=array.shape)).astype(np.float32), arrays)
    noisy = change(reply, arrays)
    after, _ = strategy.aggregate_train(1, [reply])
    assert after is not None
    smoothed = update_of(arrays, after)
    import torch

    for part in (slice(0, 20), slice(20, 25)):
        expected = smooth(torch.from_numpy(noisy[part]), 2.0).numpy()
        np.testing.assert_allclose(smoothed[part], expected, atol=1e-6)
    assert np.linalg.norm(smoothed) < np.linalg.norm(noisy)


def test_a_quantised_update_is_decoded_with_exactly_its_noise() -> None:
    arrays = ArrayRecord({"weight": Array(np.zeros(4000, dtype=np.float32))})
    reply = answered([quantise(std=0.1, secret=SECRET)], lambda array: array + np.float32(0.5), arrays)
    assert not reply.content.array_records
    assert len(reply.content.config_records[QUANTISED]["message"]) < 4000  # type: ignore[arg-type]
    reply.metadata.__dict__["_src_node_id"] = 7
    strategy = Dequantised(FedAvg(), std=0.1, secrets={7: SECRET})
    strategy._arrays = arrays
    after, _ = strategy.aggregate_train(1, [reply])
    assert after is not None
    error = update_of(arrays, after) - 0.5
    assert abs(error.mean()) < 5.2 * 0.1 / np.sqrt(4000)
    assert abs(error.std() / 0.1 - 1) < 5.2 / np.sqrt(8000)


def test_a_quantised_update_is_bound_to_its_secret() -> None:
    arrays = ArrayRecord({"weight": Array(np.zeros(50, dtype=np.float32))})
    for secrets, error in (({7: bytes(32)}, MessageError), ({8: SECRET}, ProtocolError)):
        reply = answered([quantise(std=0.1, secret=SECRET)], lambda array: array + np.float32(0.5), arrays)
        reply.metadata.__dict__["_src_node_id"] = 7
        strategy = Dequantised(FedAvg(), std=0.1, secrets=secrets)
        strategy._arrays = arrays
        with pytest.raises(error):
            strategy.aggregate_train(1, [reply])


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ({"message": b"x"}, ProtocolError),
        ({"nonce": b"x"}, ProtocolError),
        ({"nonce": "x", "message": b"x"}, ProtocolError),
        ({"nonce": b"x", "message": b"x"}, MessageError),
    ],
)
def test_a_node_that_sends_no_quantised_update_is_named(content: Any, error: type[Exception]) -> None:
    """A reply without a nonce ended the round with a KeyError, and a damaged one with an error that named nobody."""
    arrays = ArrayRecord({"weight": Array(np.zeros(50, dtype=np.float32))})
    reply = answered([quantise(std=0.1, secret=SECRET)], lambda array: array, arrays)
    reply.content[QUANTISED] = ConfigRecord(content)
    reply.metadata.__dict__["_src_node_id"] = 7
    strategy = Dequantised(FedAvg(), std=0.1, secrets={7: SECRET})
    strategy._arrays = arrays
    with pytest.raises(error, match=r"^node 7: "):
        strategy.aggregate_train(1, [reply])


def test_arrays_that_do_not_fit_are_named() -> None:
    arrays = record()
    with pytest.raises(ModelError, match="other arrays"):
        update_of(arrays, ArrayRecord({"weight": arrays["weight"]}))
    with pytest.raises(ModelError, match="'bias'"):
        update_of(arrays, ArrayRecord({"weight": arrays["weight"], "bias": Array(np.zeros(4, np.float32))}))
