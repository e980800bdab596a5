"""MRL, MIPIC and MIC make small sizes better on pairs that they did not see."""

from copy import deepcopy
from itertools import combinations

import pytest
from datasets import Dataset

from m3bert.evaluation import GridEncoder
from m3bert.trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    Grid,
    MICConfig,
    MICTrainer,
    MIPICConfig,
    MIPICTrainer,
)
from tests.conftest import WORDS, quiet
from tests.trainers.tiny_run import quiet_model


HALF = len(WORDS) // 2
# A text and its translation, word by word, into words that the text does not have.
PAIRS = [
    (" ".join(WORDS[i] for i in four), " ".join(WORDS[HALF + i] for i in four))
    for four in combinations(range(HALF), 4)
]
TRAINED, HELD_OUT = [pair for row, pair in enumerate(PAIRS) if row % 8], PAIRS[::8]
METHODS = {
    "mrl": (ContrastiveConfig, ContrastiveTrainer, "1,2x8,32", 40),
    "mipic": (MIPICConfig, MIPICTrainer, "2x8,32", 80),
    "mic": (MICConfig, MICTrainer, "2x8,32", 40),
}


def found(model, tokenizer, size: str) -> float:
    """The share of held-out texts whose nearest translation is their own."""
    encoder = GridEncoder(model, tokenizer, Grid.parse(size))
    texts, translations = (
        encoder.encode(list(side)).at(encoder.grid.full, normalize=True) for side in zip(*HELD_OUT, strict=True)
    )
    nearest = (texts @ translations.T).argmax(dim=1)
    return float((nearest == nearest.new_tensor(range(len(nearest)))).float().mean())


@pytest.mark.parametrize("name", METHODS)
def test_small_sizes_improve_on_held_out_pairs(name, tiny_tokenizer, tmp_path):
    config_class, trainer_class, grid, steps = METHODS[name]
    model = quiet_model(num_hidden_layers=2, matryoshka_layers=[1, 2]).model
    sizes = [str(g) for g in Grid.parse(grid)][:-1]
    before = {size: found(deepcopy(model), tiny_tokenizer, size) for size in sizes}
    args = config_class(
        **quiet(tmp_path, grid=grid, max_steps=steps, learning_rate=5e-3, per_device_train_batch_size=16),
        unsupervised=False,
    )
    rows = Dataset.from_dict(dict(zip(("anchor", "positive"), map(list, zip(*TRAINED, strict=True)), strict=True)))
    trainer_class(model, args, tiny_tokenizer, rows).train()
    after = {size: found(model, tiny_tokenizer, size) for size in sizes}
    chance = 1 / len(HELD_OUT)
    assert all(value < 3 * chance for value in before.values()), before
    assert all(value > 6 * chance for value in after.values()), after
