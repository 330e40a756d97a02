"""The examples run as they stand, where the libraries that they are about are installed."""

from __future__ import annotations

import runpy
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "hugging_face.py"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("model", "library", "trained"),
    [
        pytest.param(
            model, library, trained, marks=pytest.mark.skipif(find_spec(library) is None, reason=reason)
        )
        for model, library, trained, reason in (
            ("Classifier", "transformers", None, "transformers is not installed here"),
            ("lora", "peft", 2 * 2 * 2 * 4 * 32 + 2 * 32 + 2, "peft is not installed here"),
        )
    ],
)
def test_a_transformer_and_its_adapters_are_trained(
    model: str, library: str, trained: int | None, tmp_path: Path
) -> None:
    """Adapters: two layers, query and value, two matrices of rank 4 each; and the head. Nothing else moves."""
    example = runpy.run_path(str(EXAMPLE))
    torch.manual_seed(0)
    made = example[model]()
    result = example["train"](made, rounds=1, folder=str(tmp_path))
    before, after = dict(made.named_parameters()), dict(result.model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name, value in before.items() if value.requires_grad}
    count = sum(before[name].numel() for name in moved)
    assert count == (sum(value.numel() for value in made.parameters()) if trained is None else trained)
    assert result.statement.epsilon is not None
