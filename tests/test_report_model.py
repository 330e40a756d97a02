"""Section of a report on the released model: of the model and the schema alone, and right about both."""

from __future__ import annotations

import html
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedveil.errors import RunFolderError
from fedveil.randomness import ExperimentRandomness
from fedveil.report.document import Section
from fedveil.report.drawing import Plot
from fedveil.report.figure_files import write_figures
from fedveil.report.page import model_section, report_page, run_plots
from fedveil.report.run_data import load_run
from fedveil.training.models import MODELS, build_model
from fedveil.training.newton import WhitenedLinear
from fedveil.training.trees import BoostedTrees
from tests.report_folders import write_run

SCHEMA = """
n_users = 100
user = "who"
invalid = "bin"
[features]
age = { kind = "number", lower = 20, upper = 80, missing = "indicator" }
ward = { kind = "category", categories = ["east", "west"] }
day = { kind = "date", lower = "2020-01-01", upper = "2021-01-01" }
[target]
kind = "label"
column = "sick"
classes = ["no", "yes"]
"""
WIDTH = 3 + 3 + 2


SEED = 9
"""Of the experiment, and so of the structure of its trees: tree 24 of round 12 divides by features 0, 4 and 1."""


def folder_of(path: Path, name: str, module: nn.Module, schema: str | None = SCHEMA) -> Path:
    """Write a run folder with the trained parameters of a model, as runs do; its tables are nowhere."""
    folder = write_run(path / "run", rounds=3)
    lines = [f'[model]\nname = "{name}"\n']
    if schema is not None:
        (path / "schema.toml").write_text(schema)
        lines.append(
            f'[data.table]\nschema_file = "{path / "schema.toml"}"\nfiles = ["{path / "gone.csv"}"]\n'
        )
    text = f'schema_version = 2\nname = "little"\nseed = {SEED}\n' + "".join(lines)
    (folder / "experiment.toml").write_text(text)
    tensors = {key: value.detach().contiguous() for key, value in module.named_parameters()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def section(folder: Path) -> Section:
    found = model_section(load_run(folder))
    assert found is not None
    return found


def plots(folder: Path) -> dict[str, Plot]:
    return {plot.title: plot for plot in section(folder).plots}


def linear(coefficients: dict[int, float], intercept: float = 0.0) -> WhitenedLinear:
    module = WhitenedLinear(WIDTH, 1)
    with torch.no_grad():
        module.weight.zero_()
        for place, value in coefficients.items():
            module.weight[0, place] = value
        module.weight[0, -1] = intercept
    return module


def test_partial_dependence_is_the_model_at_public_reference_values(tmp_path: Path) -> None:
    # Features: age, missing, invalid; east, west, invalid; day, invalid.
    found = plots(folder_of(tmp_path, "whitened-linear", linear({0: 2.0, 3: 0.5, 4: -1.0}, 0.25)))
    age = found["Partial dependence on age"].series[0]
    assert (age.x[0], age.x[-1]) == (20.0, 80.0)
    expected = [1 / (1 + np.exp(-(2.0 * (one - 50) / 30 + 0.5 + 0.25))) for one in age.x]
    assert age.y == pytest.approx(expected)
    ward = found["Partial dependence on ward"]
    assert ward.x.categories == ("east", "west")
    assert ward.series[0].y == pytest.approx([1 / (1 + np.exp(-0.75)), 1 / (1 + np.exp(0.75))])
    assert ward.y.title == "probability of yes"
    # What moves most comes first, and what the model does not use is flat.
    assert next(iter(found)) == "Partial dependence on age"
    flat = found["Partial dependence on day"].series[0].y
    assert flat == pytest.approx([1 / (1 + np.exp(-0.75))] * len(flat))


def trees() -> BoostedTrees:
    module = build_model(
        "boosted-trees", input_shape=(WIDTH,), n_outputs=1, randomness=ExperimentRandomness(SEED)
    )
    assert isinstance(module, BoostedTrees)
    assert module.feature[12, 24].tolist() == [0, 4, 1]
    with torch.no_grad():
        module.leaves[12, 24, :, 0] = torch.arange(8.0) - 3
        for feature, rank, cut in zip((0, 4, 1), module.rank[12, 24].tolist(), (0.5, 0.25, 0.1), strict=True):
            module.cuts[feature, rank] = cut
    return module


def test_the_tree_that_is_drawn_is_the_one_whose_leaves_differ_most(tmp_path: Path) -> None:
    tree = plots(folder_of(tmp_path, "boosted-trees", trees()))["One tree of the model"]
    assert tree.y.categories == ("age > 65?", "ward = west?", "age missing?", "leaf")
    assert tree.x.categories == ("-3", "-2", "-1", "+0", "+1", "+2", "+3", "+4")
    no, yes = tree.series
    # The root, at the top, lies above the middle of all leaves; its edges end above the middle of each half.
    assert (no.x[:2], yes.x[:2]) == ((3.5, 1.5), (3.5, 5.5))
    assert (no.y[:2], yes.y[:2]) == ((0, 1), (0, 1))
    # The last edges of a side end at its leaves: even ones of "no", odd ones of "yes".
    assert [no.x[3 * edge + 1] for edge in range(3, 7)] == [0, 2, 4, 6]
    assert [yes.x[3 * edge + 1] for edge in range(3, 7)] == [1, 3, 5, 7]


def test_partial_dependence_of_trees_steps_at_their_cuts(tmp_path: Path) -> None:
    age = plots(folder_of(tmp_path, "boosted-trees", trees()))["Partial dependence on age"].series[0]
    low, high = 1 / (1 + np.exp(3.0)), 1 / (1 + np.exp(-1.0))
    assert age.y == pytest.approx([high if one > 65 else low for one in age.x])


def test_a_page_and_figures_have_the_model_without_any_table(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "boosted-trees", trees())
    page = html.unescape(report_page(load_run(folder)))
    assert "no record is read" in page
    assert "age > 65?" in page
    written = write_figures(run_plots(load_run(folder)), tmp_path / "figures", ["svg"])
    assert any("tree" in path.name for path in written)


@pytest.mark.parametrize("name", ["linear", "whitened-rates", "whitened-hazards"])
def test_models_without_a_schema_have_numbered_features(name: str, tmp_path: Path) -> None:
    found = plots(folder_of(tmp_path, name, MODELS[name]((3,), 1), schema=None))
    assert set(found) == {f"Partial dependence on feature {place}" for place in range(3)}


def test_other_models_and_schemas_of_another_width(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    folder = folder_of(tmp_path / "other", "mlp", MODELS["mlp"]((3,), 1), schema=None)
    assert model_section(load_run(folder)) is None
    folder = folder_of(tmp_path, "linear", MODELS["linear"]((3,), 1))
    assert "Partial dependence on feature 0" in plots(folder)
    (folder / "model.safetensors").unlink()
    assert model_section(load_run(folder)) is None


def test_a_model_of_another_form_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, "boosted-trees", MODELS["linear"]((3,), 1), schema=None)
    with pytest.raises(RunFolderError, match=r"model\.safetensors does not hold the model boosted-trees"):
        section(folder)
