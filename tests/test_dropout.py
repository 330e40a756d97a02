"""The law of the seeded dropout masks, and that a mask belongs to its contribution alone."""

import pytest
import torch
from scipy import stats

from fedveil.training.counters import SeededDropout, derive, mix, mix_scalar, seed_names, with_seeded_dropout

FALSE_ALARM = 1e-7


def kept(p: float, seeds: int, entries: int, layer: int = 0, channels: bool = False) -> torch.Tensor:
    dropout = SeededDropout(p, layer, channels)
    inputs = torch.ones(1, entries, 2) if channels else torch.ones(1, entries)

    def one(seed: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(dropout, {"seed": seed}, (inputs,))[0]

    return torch.func.vmap(one)(mix(torch.arange(seeds)))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_entries_are_kept_with_probability_one_minus_p(p):
    masks = kept(p, 2_000, 200)
    assert masks.unique().tolist() == pytest.approx([0.0, 1 / (1 - p)])
    total = int((masks > 0).sum())
    assert stats.binomtest(total, masks.numel(), 1 - p).pvalue > FALSE_ALARM
    assert stats.binomtest(total, masks.numel(), (1 - p) * 0.97).pvalue < FALSE_ALARM


def test_entries_seeds_and_layers_are_uncorrelated():
    first, second = (kept(0.5, 2_000, 200, layer) - 1 for layer in (0, 1))
    count = first.numel()
    limit = stats.norm.isf(FALSE_ALARM) * count**0.5
    assert abs(float((first * second).sum())) < limit
    assert abs(float((first[:, 1:] * first[:, :-1]).sum())) < limit
    assert abs(float((first[1:] * first[:-1]).sum())) < limit
    assert abs(float((first * first).sum())) > limit


def test_the_number_kept_is_binomial():
    counts = torch.bincount((kept(0.5, 20_000, 8) > 0).sum(1), minlength=9).numpy()
    expected = stats.binom.pmf(range(9), 8, 0.5) * 20_000
    assert stats.chisquare(counts, expected).pvalue > FALSE_ALARM
    tilted = stats.binom.pmf(range(9), 8, 0.53) * 20_000
    assert stats.chisquare(counts, tilted / tilted.sum() * 20_000).pvalue < FALSE_ALARM


def test_a_number_is_hashed_as_a_tensor_is():
    numbers = [0, 1, -1, 7, 2**63 - 1, -(2**63), 0x9E3779B97F4A7C15 - 2**64]
    words = mix(torch.tensor(numbers))
    assert [mix_scalar(number) for number in numbers] == words.tolist()
    seeds = torch.tensor([3, -5])
    assert all(torch.equal(derive(seeds, number), derive(seeds, torch.tensor(number))) for number in numbers)


@pytest.mark.parametrize("p", [1e-18, 2.0**-53, 0.1, 0.5, 0.75, 1 - 2.0**-53])
def test_an_entry_is_kept_whose_first_53_bits_are_at_least_p(p, monkeypatch):
    least = int(p * 2**53) << 11  # of a word without sign
    near = {least + step for step in (-1, 0, 1, 1 << 11, -1 << 11)} | {0, 2**63 - 1, 2**63, 2**64 - 1}
    words = sorted(word for word in near if 0 <= word < 2**64)
    signed = torch.tensor([word - (word >> 63 << 64) for word in words])
    monkeypatch.setattr("fedveil.training.counters.derive", lambda *_: signed.clone())
    masks = SeededDropout(p, 0, False)(torch.ones(1, len(words)))[0]
    assert (masks > 0).tolist() == [word >> 11 >= int(p * 2**53) for word in words]


def test_channels_are_dropped_whole():
    masks = kept(0.5, 500, 40, channels=True)
    assert torch.equal(masks[..., 0], masks[..., 1])
    assert stats.binomtest(int((masks[..., 0] > 0).sum()), 500 * 40, 0.5).pvalue > FALSE_ALARM


def test_padding_a_batch_changes_no_mask():
    dropout = SeededDropout(0.5, 3, False)
    dropout.seed = derive(torch.tensor(5), 9)
    assert torch.equal(dropout(torch.ones(7, 11))[:4], dropout(torch.ones(4, 11)))


@pytest.mark.parametrize("layer", [torch.nn.Dropout(0.3), torch.nn.Dropout2d(0.3), torch.nn.Dropout(0.0)])
def test_evaluation_mode_passes_inputs_through(layer):
    inputs = torch.randn(2, 3, 4, 4)
    assert torch.equal(with_seeded_dropout(layer).eval()(inputs), inputs)


def test_everything_is_dropped_at_one():
    assert SeededDropout(1.0, 0, False)(torch.ones(3, 3)).abs().sum() == 0


def test_every_dropout_of_a_model_is_replaced_and_numbered():
    inner = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout(0.2))
    model = with_seeded_dropout(torch.nn.Sequential(inner, torch.nn.Dropout2d(0.5)))
    layers = [module for module in model.modules() if isinstance(module, SeededDropout)]
    assert sorted(layer.layer for layer in layers) == [0, 1]
    assert seed_names(model) == ("0.1.seed", "1.seed")
    assert "channels=True" in repr(model)
