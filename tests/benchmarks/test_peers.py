"""The comparison with sentence-transformers: the texts, and that both sides compute the same."""

import pytest
import torch

from benchmarks._pairs import mixed_pairs


pytestmark = pytest.mark.slow
pytest.importorskip("sentence_transformers")
steps = pytest.importorskip("benchmarks._peer_steps")

THEIRS = {"last layer": (steps.LAST_LAYER, steps.matryoshka), "grid": (steps.GRID, steps.matryoshka_2d)}


@pytest.fixture(scope="module")
def pairs(data_folder) -> list[dict[str, str]]:
    return mixed_pairs(100)


@pytest.fixture(scope="module")
def short(pairs) -> list[dict[str, str]]:
    return [{column: " ".join(text.split()[:6]) for column, text in pair.items()} for pair in pairs]


@pytest.mark.parametrize("name", list(THEIRS))
def test_both_sides_have_the_same_loss(name, pairs, minilm, capsys):
    grid, make_loss = THEIRS[name]
    steps.check_losses("step", steps.ours(pairs[:6], 3, grid), steps.theirs(pairs[:6], 3, make_loss))
    assert float(capsys.readouterr().out.split()[-1]) < 1e-5


def test_both_sides_have_the_same_loss_with_cached_gradients(pairs, minilm, capsys):
    our, their = (steps.cached_side(name, pairs[:5], 2) for name in ("ours", "sentence-transformers"))
    steps.check_losses("step", our, their)
    assert float(capsys.readouterr().out.split()[-1]) < 1e-5


@pytest.mark.parametrize("name", list(THEIRS))
def test_a_step_trains_the_encoder_and_takes_the_next_batch(name, short, minilm):
    grid, make_loss = THEIRS[name]
    for side in (steps.ours(short[:4], 2, grid), steps.theirs(short[:4], 2, make_loss)):
        assert len(side.batches) == 2
        keys = [set(column) for column in side.batches[0]]
        weights = dict(side.module.named_parameters())
        layer = next(name for name in weights if "layer.1.attention" in name)
        before = weights[layer].detach().clone()
        step = side.step()
        step()
        assert not torch.equal(before, weights[layer])
        step(), step()  # the first batch again, which must not hold the first step's states
        assert [set(column) for column in side.batches[0]] == keys
