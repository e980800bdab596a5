"""MIC: the paper's values are the defaults."""

from __future__ import annotations

from transformers import BertConfig

from m3bert.trainers import MICConfig


BERT_CONFIG = BertConfig()


def test_mic_is_what_its_paper_says(tmp_path, quiet_arguments):
    args = MICConfig(**quiet_arguments(tmp_path)).with_settings(None, BERT_CONFIG.max_position_embeddings)
    grid = args.grid_for(BERT_CONFIG)
    objective = args.build_objective(grid)
    assert objective.weights == {"mrl": 1.0, "scr": 0.6, "sir": 0.6}
    mrl, scr, sir = objective.parts.values()
    assert mrl.reduction == "mean" and mrl.grid == grid
    assert scr.layers == sir.layers == [8, 10]
    assert (scr.threshold, scr.variance_weight, sir.scale, sir.pooling) == (0.1, 0.1, 2.0, "mean")
    assert sir.grid.dims == scr.grid.dims == [16, 32, 64, 128, 256, 512, 768]
    assert (args.learning_rate, args.max_length, args.num_train_epochs, args.per_device_train_batch_size) == (
        2e-5, 256, 5, 32,
    )  # fmt: skip
    assert args.lr_scheduler_type == "cosine" and args.unsupervised
