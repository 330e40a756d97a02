"""The privacy filter for NVFlare jobs: what leaves a site, what it costs, and what never leaves."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("nvflare")

from nvflare.apis.dxo import DXO, DataKind, MetaKey, from_shareable
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply

from fedveil.federation.transport.nvflare import ReceivedModelFilter, SiloPrivacyFilter
from fedveil.federation.transport.silo_account import LEDGER, STATEMENT
from fedveil.privacy.accountant import gaussian_epsilon
from fedveil.privacy.ledger import read_entries
from tests.bridges import wait_for

DELTA = 1e-5
NUMBERS = 4000


def model(numbers: int = NUMBERS) -> dict[str, Any]:
    rng = np.random.default_rng(3)
    return {
        "weight": rng.normal(size=(4, numbers // 4)).astype(np.float32),
        "batches": np.array(7, dtype=np.int64),
        "bias": torch.zeros(5, dtype=torch.float64),
    }


def trained(array: Any, step: float, kind: str) -> Any:
    """Return a result's array after training moved every number by ``step``; a number of batches by 1."""
    base = array if kind == DataKind.WEIGHTS else array * 0
    if isinstance(array, torch.Tensor):
        return base + step
    with np.errstate(over="ignore"):
        return base + np.asarray(step if array.dtype.kind == "f" else 1).astype(array.dtype)


class Site:
    """A site whose jobs have the filter.

    Args:
        folder: of the ledgers of all sites.
        noise_multiplier: of the filter.
        epsilon: of its budget.
        clip: of the filter.
    """

    def __init__(
        self, folder: Path, noise_multiplier: float = 0.5, epsilon: float = 1e6, clip: float = 2.0
    ) -> None:
        self.folder = folder / "north"
        self.folder.mkdir(exist_ok=True)
        (self.folder / LEDGER).touch()
        self._filter = SiloPrivacyFilter(str(folder / "{site}"), clip, noise_multiplier, epsilon, DELTA)

    def context(self, job: str) -> FLContext:
        manager = FLContextManager(
            engine=None, identity_name="north", job_id=job, public_stickers={}, private_stickers={}
        )
        return manager.new_context()

    def sent(self, result: Shareable, task: Shareable | None = None, job: str = "job") -> Shareable:
        """Return what leaves the site for a result of a task."""
        context = self.context(job)
        if task is not None:
            ReceivedModelFilter().process(task, context)
            for array in task.get("DXO", {}).get("data", {}).values():
                array *= 0  # a trainer that changes the arrays that it was given
        return self._filter.process(result, context)

    def trained(self, step: float, kind: str = DataKind.WEIGHT_DIFF, job: str = "job") -> dict[str, Any]:
        """Return the data that leaves if training moves every number by ``step``."""
        arrays = model()
        moved = {name: trained(array, step, kind) for name, array in arrays.items()}
        reply = self.sent(DXO(kind, data=moved).to_shareable(), task_of(arrays), job)
        assert reply.get_return_code() == ReturnCode.OK
        sent = from_shareable(reply)
        assert sent.data_kind == kind
        return dict(sent.data)

    def charges(self) -> int:
        path = self.folder / LEDGER
        return len(read_entries(path)) if path.exists() else 0


def task_of(arrays: dict[str, Any]) -> Shareable:
    task = DXO(DataKind.WEIGHTS, data=model() if arrays is None else dict(arrays)).to_shareable()
    task.set_header("current_round", 3)
    return task


@pytest.mark.parametrize("step", [0.0, 1.0, 1e30, 1e300, np.nan])
def test_an_update_is_clipped_and_has_the_noise(tmp_path: Path, step: float) -> None:
    sent = Site(tmp_path).trained(step)
    row = np.concatenate([sent["weight"].reshape(-1), sent["bias"].numpy()])
    length = 0.0 if not step < 1e39 else min(2.0, step * np.sqrt(row.size))  # 1e39: beyond float32
    noise = row - length / np.sqrt(row.size)
    assert abs(noise.mean()) < 5.2 / np.sqrt(row.size)
    assert abs(noise.std() - 1) < 5.2 / np.sqrt(2 * row.size)


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_names_shapes_types_and_whole_numbers_are_the_servers(tmp_path: Path, kind: str) -> None:
    sent, arrays = Site(tmp_path, noise_multiplier=2.0**-9).trained(1.0, kind), model()
    assert list(sent) == list(arrays)
    for name, before in arrays.items():
        assert type(sent[name]) is type(before)
        assert sent[name].dtype == before.dtype
        assert sent[name].shape == before.shape
    whole = kind == DataKind.WEIGHTS
    assert sent["batches"] == (7 if whole else 0)
    moved = sent["weight"] - arrays["weight"] if whole else sent["weight"]
    assert np.linalg.norm(moved) < 2.0 * (1 + 6 * 2.0**-9 * np.sqrt(NUMBERS))
    assert abs(moved.mean() - 2 / np.sqrt(NUMBERS + 5)) < 1e-3


def test_nothing_else_of_a_result_leaves(tmp_path: Path) -> None:
    meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: 137, MetaKey.INITIAL_METRICS: {"accuracy": 0.98765}}
    result = DXO(DataKind.WEIGHTS, data=model(), meta=meta).to_shareable()
    result.set_header("patients", 54321)
    result["beside"] = "private"
    reply = Site(tmp_path).sent(result, task_of(model()))
    assert set(reply) == {"__headers__", "DXO"}
    assert reply["DXO"]["meta"] == {MetaKey.NUM_STEPS_CURRENT_ROUND: 1}
    assert reply["__headers__"] == {"__content_type__": "DXO", "current_round": 3}


def other(**changed: Any) -> Shareable:
    arrays = {name: array for name, array in (model() | changed).items() if array is not None}
    return DXO(DataKind.WEIGHT_DIFF, data=arrays).to_shareable()


REFUSED = {
    "no DXO": Shareable({"weights": 1.0}),
    "metrics": DXO(DataKind.METRICS, data={"accuracy": 0.9}).to_shareable(),
    "empty": DXO(DataKind.WEIGHTS, data={}).to_shareable(),
    "a collection": DXO(
        DataKind.COLLECTION, data={"model": DXO(DataKind.WEIGHTS, data=model())}
    ).to_shareable(),
    "an array too few": other(weight=None),
    "an array too many": other(counts=np.array([1.0])),
    "another shape": other(bias=np.zeros(6)),
    "text": other(bias=np.array(["a"] * 5)),
    "objects": other(bias=np.array([{}] * 5)),
    "a list": other(bias=[0.0] * 5),
    "a tensor without numbers": other(bias=torch.zeros(5, device="meta")),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_update_does_not_leave_and_costs_nothing(tmp_path: Path, name: str) -> None:
    site = Site(tmp_path)
    reply = site.sent(REFUSED[name], task_of(model()))
    assert reply == make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    assert site.charges() == 0


def test_a_result_of_a_failed_task_or_of_a_task_without_a_model_does_not_leave(tmp_path: Path) -> None:
    site = Site(tmp_path)
    failed = other()
    failed.set_return_code(ReturnCode.EXECUTION_EXCEPTION)
    assert site.sent(failed, task_of(model())) == make_reply(ReturnCode.EXECUTION_EXCEPTION)
    for code in ({"accuracy": 0.9}, ["accuracy"], "accuracy 0.9"):
        failed.set_return_code(code)
        assert site.sent(failed, task_of(model())) == make_reply(ReturnCode.EXECUTION_EXCEPTION)
    for task in (None, Shareable(), DXO(DataKind.METRICS, data={"a": 1.0}).to_shareable()):
        assert site.sent(other(), task) == make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    assert site.charges() == 0


def test_what_cannot_be_charged_does_not_leave(tmp_path: Path) -> None:
    site = Site(tmp_path, noise_multiplier=40.0, epsilon=gaussian_epsilon(2 / 40.0, DELTA) + 1e-6)
    site.trained(1.0)
    for job in ("job", "another job"):
        assert site.sent(other(), task_of(model()), job) == make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    assert site.charges() == 1
    site.folder.rename(tmp_path / "elsewhere")
    assert site.sent(other(), task_of(model())) == make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)


def test_no_errors_text_reaches_nvflares_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of a model that torch does not read, of a result that is none, or of the numbers in one."""
    site, sparse = Site(tmp_path), torch.eye(3).to_sparse() * 41.5
    result: Any = {"accuracy 41.5": 41.5}
    for sent, task in (
        (other(), DXO(DataKind.WEIGHTS, data={"w": torch.empty(3, device="meta")}).to_shareable()),
        (DXO(DataKind.WEIGHTS, data={"w": sparse}).to_shareable(), task_of({"w": np.zeros((3, 3))})),
        (result, task_of(model())),
    ):
        assert site.sent(sent, task) == make_reply(ReturnCode.TASK_RESULT_FILTER_ERROR)
    assert "does not leave" in caplog.text
    assert "41.5" not in caplog.text
    assert site.charges() == 0


EXECUTOR = """
from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.executor import Executor


class Trainer(Executor):
    def execute(self, task_name, shareable, fl_ctx, abort_signal):
        arrays = from_shareable(shareable).data
        for array in arrays.values():
            array += 100.0
        meta = {"NUM_STEPS_CURRENT_ROUND": 137}
        return DXO(DataKind.WEIGHTS, data=arrays, meta=meta).to_shareable()
"""

PERSISTOR = """
import json
import numpy as np
from nvflare.app_common.abstract.model import make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor


class Models(ModelPersistor):
    def load_model(self, fl_ctx):
        return make_model_learnable({"w": np.zeros(1000, dtype=np.float32)}, {})

    def save_model(self, model, fl_ctx):
        with open(OUT, "a") as stream:
            stream.write(json.dumps(model["weights"]["w"].tolist()) + "\\n")
"""


MODULE = "fedveil.federation.transport.nvflare"
RECEIVE = {"path": f"{MODULE}.ReceivedModelFilter", "args": {}}


def releasing(folder: Path, rounds: int) -> dict[str, Any]:
    """Return the filter as NVFlare's files name it, with a budget for so many rounds of noise multiplier 2."""
    epsilon = gaussian_epsilon(2 * np.sqrt(rounds) / 2.0, DELTA) + 1e-6
    arguments = {"folder": str(folder), "clip": 1.0, "noise_multiplier": 2.0}
    return {
        "path": f"{MODULE}.SiloPrivacyFilter",
        "args": arguments | {"epsilon": epsilon, "delta": DELTA},
    }


def write_job(folder: Path, models: Path, sites: list[str], filters: dict[str, Any]) -> None:
    """Write a FedAvg job of three rounds whose server appends each model to a file."""
    workflow = {
        "id": "fedavg",
        "path": "nvflare.app_common.workflows.fedavg.FedAvg",
        "args": {"num_clients": len(sites), "num_rounds": 3, "persistor_id": "persistor"},
    }
    client = {
        "executors": [{"tasks": ["train"], "executor": {"path": "parts.Trainer", "args": {}}}]
    } | filters
    server = {
        "workflows": [workflow],
        "components": [{"id": "persistor", "path": "parts.Models", "args": {}}],
    }
    version = {"format_version": 2, "components": []}
    documents = {
        "meta.json": {
            "name": "test",
            "resource_spec": {},
            "min_clients": len(sites),
            "deploy_map": {"app": ["server", *sites]},
        },
        "app/config/config_fed_server.json": version | server,
        "app/config/config_fed_client.json": version | client,
    }
    for name, document in documents.items():
        (path := folder / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(document))
    (folder / "app" / "custom").mkdir()
    (folder / "app" / "custom" / "parts.py").write_text(f"OUT = {str(models)!r}\n{PERSISTOR}{EXECUTOR}")


def assert_noised(models: Path, sites: int, printed: str) -> None:
    """Check two models: the mean of updates of length 1, each with noise of 2 a number."""
    found = [np.array(json.loads(line)) for line in models.read_text().splitlines()]
    assert len(found) == 2, printed
    before, std = np.zeros(1000), 2 / np.sqrt(sites)
    for after in found:
        noise = after - before - 1 / np.sqrt(1000)
        assert abs(noise.std() - std) < 5.2 * std / np.sqrt(2000)
        before = after


@pytest.mark.slow
def test_a_fedavg_job_is_noised_and_ends_at_the_budget(tmp_path: Path) -> None:
    """FedAvg of NVFlare over two sites in its simulator; the budget pays for two rounds of three."""
    release = releasing(tmp_path / "{site}", 2)
    filters = {
        "task_data_filters": [{"tasks": ["train"], "filters": [RECEIVE]}],
        "task_result_filters": [{"tasks": ["train"], "filters": [release]}],
    }
    sites = ["north", "south"]
    write_job(tmp_path / "job", tmp_path / "models", sites, filters)
    for site in sites:
        (tmp_path / site).mkdir()
        (tmp_path / site / LEDGER).touch()
    command = [sys.executable, "-m", "nvflare.private.fed.app.simulator.simulator", tmp_path / "job"]
    command += ["-w", tmp_path / "work", "-c", ",".join(sites), "-t", "2"]
    environment = os.environ | {"HOME": str(tmp_path)}
    done = subprocess.run(
        list(map(str, command)), env=environment, capture_output=True, text=True, timeout=300
    )
    printed = done.stdout + done.stderr
    assert_noised(tmp_path / "models", 2, printed)
    for site in sites:
        assert len(read_entries(tmp_path / site / LEDGER)) == 2
        assert "one silo" in (tmp_path / site / STATEMENT).read_text()
    assert "would spend more than epsilon" in printed


@pytest.mark.slow
def test_a_sites_own_policy_filters_a_job_that_has_no_filter(tmp_path: Path) -> None:
    """A deployment of NVFlare (POC mode), whose site has the filters in local/privacy.json."""
    from tests.test_nvflare_bridge import Deployment

    deployment = Deployment(tmp_path / "nvflare", tmp_path)
    (tmp_path / "account").mkdir()
    (tmp_path / "account" / LEDGER).touch()
    release = releasing(tmp_path / "account", 2)
    scope = {"name": "default", "task_data_filters": [RECEIVE], "task_result_filters": [release]}
    policy = deployment.folder_of("site-1") / "local" / "privacy.json"
    policy.write_text(json.dumps({"scopes": [scope], "default_scope": "default"}))
    write_job(tmp_path / "job", tmp_path / "models", ["site-1"], {})
    log = tmp_path / "nvflare" / "site-1.log"
    with contextlib.closing(deployment), deployment.start("server"), deployment.start("site-1"):
        wait_for(log, "Successfully registered client")
        deployment.submit(tmp_path / "job")
        wait_for(log, "would spend more than epsilon", seconds=300.0)
    assert_noised(tmp_path / "models", 1, log.read_text())
    assert len(read_entries(tmp_path / "account" / LEDGER)) == 2
