"""MIPIC: the paper's values are the defaults."""

from __future__ import annotations

import pytest
from transformers import BertConfig

from m3bert.trainers import MIPICConfig


TINYBERT_CONFIG = BertConfig(num_hidden_layers=6)


def test_mipic_is_what_its_paper_says(tmp_path, quiet_arguments):
    args = MIPICConfig(**quiet_arguments(tmp_path)).with_settings(None, TINYBERT_CONFIG.max_position_embeddings)
    grid = args.grid_for(TINYBERT_CONFIG)
    objective = args.build_objective(grid)
    assert str(grid) == "6x16,32,64,128,256,512,768"
    assert objective.weights == pytest.approx({"mrl": 0.4, "sia": 0.6, "pic": 0.6})
    mrl, sia, pic = objective.parts.values()
    assert (mrl.reduction, mrl.temperature, mrl.pooling) == ("sum", 0.05, "cls")
    assert sia.layers == [1, 2, 3, 4, 5, 6] and sia.temperature == 0.05 and sia.smallest_token_count == 8
    assert sia.token_shares == pytest.approx([0.2, 0.3, 0.4, 0.5, 0.6, 0.7])
    assert str(pic.grid) == "1x16,2x32,3x64,4x256,5x512,6x768" and not pic.detach_target
    assert (pic.temperature, pic.pooling) == (0.05, "cls")
    assert (args.learning_rate, args.max_length, args.num_train_epochs, args.per_device_train_batch_size) == (
        2e-5, 256, 5, 16,
    )  # fmt: skip
    assert args.lr_scheduler_type == "cosine" and args.unsupervised
