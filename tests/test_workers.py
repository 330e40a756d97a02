"""Records on their way to worker processes: the same values, and no copy of them in the process that sends."""

import threading
import tracemalloc
from multiprocessing import Pipe

import numpy as np
import torch

from fedveil.run.process_group import pickle_for_workers, receive_parts, send_parts

MEGABYTES = 24


def test_records_are_sent_from_where_they_lie_and_held_once() -> None:
    features = torch.arange(MEGABYTES << 18, dtype=torch.float32).reshape(-1, 64)
    sent = {
        "features": features,
        "targets": np.arange(5),
        "empty": torch.zeros(0, 3),
        "half": torch.ones(3).half(),
    }
    mine, theirs = Pipe()
    tracemalloc.start()
    try:
        parts = pickle_for_workers(sent)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        sender = threading.Thread(target=send_parts, args=(mine, parts))
        sender.start()
        found = receive_parts(theirs)
        sender.join()
        # A message of 16 MiB may be held twice beside the records while it arrives.
        assert tracemalloc.get_traced_memory()[1] < (MEGABYTES + 40) << 20
    finally:
        tracemalloc.stop()
        mine.close()
        theirs.close()
    for name, value in sent.items():
        assert type(found[name]) is type(value)
        assert found[name].dtype == value.dtype
        np.testing.assert_array_equal(found[name], value)
    found["features"][0, 0] = 7.0  # a copy of the worker's own, which may be written
    assert features[0, 0] == 0.0
