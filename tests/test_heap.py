"""Freed memory stays in the process while a model is trained, and goes back to the system after a run."""

import json
import subprocess
import sys
import threading

import pytest

from fedveil.training import heap
from fedveil.training.heap import keep_freed_memory

# In a process of its own: what lies in the heap of this one decides which arrays fit into freed memory.
MEASURE = """
import json, resource
import torch
from fedveil.privacy.bounds import Clip
from fedveil.randomness import ExperimentRandomness
from fedveil.training.heap import keep_freed_memory
from fedveil.training.loop import LoopTrainer
from fedveil.training.losses import load_loss
from fedveil.training.steps import LocalSgd
from fedveil.training.task import Task
from fedveil.training.trainer import TrainJob
from tests.training import cohort_of, everyone

NUMBERS = 24 << 20  # 96 MiB, more than glibc keeps by its own rule
PAGES = 4 * NUMBERS / resource.getpagesize()

def pages():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def taken(arrays):
    before = pages()
    for _ in range(arrays):
        torch.ones(NUMBERS)
    return (pages() - before) / PAGES

def resident():
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) / PAGES

found, started = {"plain": taken(4)}, resident()
with keep_freed_memory(release=True):
    taken(4)
    found["inside"] = taken(4)
    with keep_freed_memory():
        pass
    found["after an inner one"] = taken(4)
    found["held"] = resident() - started
found["released"] = resident() - started

layers = [torch.nn.Linear(6, 3000), torch.nn.ReLU(), torch.nn.Linear(3000, 3000), torch.nn.Linear(3000, 3)]
task = Task(model=torch.nn.Sequential(*layers), loss=load_loss("cross_entropy"))
cohort = cohort_of([2] * 4)
job = TrainJob(task.initial(), cohort, *everyone(cohort), Clip(norm=0.1), ExperimentRandomness(0), ("a",))
before = pages()
LoopTrainer(task=task, local=LocalSgd(learning_rate=0.1, epochs=2)).sums(job)
found["models taken by 8 steps"] = (pages() - before) * resource.getpagesize() / (4 * task.dimension)
print(json.dumps(found))
"""


@pytest.mark.skipif(heap._glibc() is None, reason="the rule is one of glibc")
def test_training_takes_its_memory_from_the_system_once_and_a_run_gives_it_back():
    made = subprocess.run([sys.executable, "-c", MEASURE], capture_output=True, text=True, check=True)
    found = json.loads(made.stdout)
    assert found["plain"] > 3.9
    assert found["inside"] < 0.1
    assert found["after an inner one"] < 0.1
    assert found["held"] > 0.9
    assert found["released"] < 0.1
    assert (
        found["models taken by 8 steps"] < 14
    )  # 9 or 10, by where arrays lie in the heap; 18 without the context


def test_an_error_and_a_thread_end_their_own_contexts_alone():
    inside, end = threading.Event(), threading.Event()

    def train() -> None:
        with keep_freed_memory():
            inside.set()
            end.wait()

    assert heap._depth == 0
    thread = threading.Thread(target=train)
    thread.start()
    inside.wait()
    with pytest.raises(ValueError, match="in vain"), keep_freed_memory(release=True):
        raise ValueError("in vain")
    assert heap._depth == 1
    end.set()
    thread.join()
    assert heap._depth == 0
