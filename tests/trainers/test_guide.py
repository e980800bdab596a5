"""A guide that finds false negatives: where its embeddings come from, cached gradients, and what is refused."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from tests.conftest import quiet
from tests.trainers.tiny_run import assert_same_weights, quiet_model
from trainers import (
    Composition,
    ContrastiveConfig,
    ContrastiveTrainer,
    Grid,
    MIPICConfig,
    Teacher,
)


def trained(tokenizer, folder, texts, **changes) -> ContrastiveTrainer:
    """One step of SGD on pairs."""
    values = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0, "grid": "2,6x8,32"}
    values |= {"per_device_train_batch_size": 12, "train_sampling_strategy": "sequential"}
    args = ContrastiveConfig(**quiet(folder, **{**values, "guide_cache_dir": str(folder / "cache"), **changes}))
    pairs = Dataset.from_dict({"query": texts[:12], "title": texts[12:24], "text": texts[24:36]})
    trainer = ContrastiveTrainer(quiet_model().model, args, tokenizer, pairs)
    trainer.train()
    return trainer


def test_a_guide_embeds_the_texts_once_and_changes_what_is_learned(
    tiny_tokenizer, encoder_folder, sentences, tmp_path
):
    """Fields are joined for the guide as for the encoder, and prompts are its own."""
    columns = {"text_columns": ["query", "title+text"], "query_prompt": "to the "}
    guide = {"name_or_path": str(encoder_folder), "prompt": "file "}
    without = trained(tiny_tokenizer, tmp_path, sentences, **columns)
    one, cached = (
        trained(tiny_tokenizer, tmp_path, sentences, guide=guide, guide_margin=0.02, mini_batch_size=size, **columns)
        for size in (None, 3)
    )
    assert without.teacher is None and len(list((tmp_path / "cache").iterdir())) == 1
    joined = f"{sentences[13]} </s> {sentences[25]}"
    expected = Teacher(**guide).embed([sentences[1], joined], tmp_path / "other").of([joined, sentences[1]])
    torch.testing.assert_close(one.teacher.of([joined, sentences[1]]), expected, atol=1e-5, rtol=1e-4)
    assert_same_weights(one.backbone, cached.backbone)
    assert not without.backbone.embed_tokens.weight.equal(one.backbone.embed_tokens.weight)


def test_options_reach_the_objectives(tmp_path):
    guide = "{name_or_path: some/model}"
    args = ContrastiveConfig(**quiet(tmp_path, guide=guide))
    assert args.guide == {"name_or_path": "some/model"} and args.build_objective(Grid.parse("2x8")).guide_margin == 0
    args = MIPICConfig(
        **quiet(tmp_path, guide=guide, guide_margin=0.1, gather_negatives=False, relative_guide_margin=True)
    )
    mixture = args.build_objective(Grid.parse("6x8,32"))
    assert isinstance(mixture, Composition)
    mrl, pic = mixture.members["mrl"], mixture.members["pic"]
    assert (mrl.guide_margin, mrl.relative_guide_margin, mrl.gather_negatives) == (0.1, True, False)
    assert not pic.gather_negatives


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"guide_margin": 0.1}, "guide_margin needs a guide: name one in guide"),
        ({"guide": {"prompt": "x"}}, "guide needs a name_or_path"),
        (
            {"guide": {"name_or_path": "x", "model": 1}},
            "guide names unknown arguments: model; legal values: name_or_pa",
        ),
        ({"guide": "some/model"}, "guide='some/model' must be a mapping"),
        ({"guide": {"name_or_path": "no-such-folder"}, "ring": True}, "ring does not pass a guide's embeddings"),
    ],
)
def test_what_cannot_be_is_refused(tiny_tokenizer, sentences, tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        trained(tiny_tokenizer, tmp_path, sentences, text_columns=["query", "text"], **changes)
