"""Every row of an evaluation counts once, in whatever batches, on one process and on two."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset, IterableDataset

from m3bert.data.samplers import evaluation_batches
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, MultigranularMLMConfig, MultigranularMLMTrainer
from tests.conftest import quiet, refused, word_tokenizer
from tests.trainers.tiny_run import masked_dataset, pair_config, quiet_model, run_two


SENTENCES = [f"open {a} the {b} file" for a in ("a", "no", "one", "text") for b in ("list", "name", "for", "by", "of")]
METRICS = ("eval_loss", "eval_contrastive_2x8", "eval_contrastive_6x32")


def contrastive(folder, data, batch: int, **changes) -> ContrastiveTrainer:
    changes |= {"grid": "2x8,6x32", "per_device_eval_batch_size": batch}
    args = pair_config(ContrastiveConfig, folder, **changes)
    return ContrastiveTrainer(quiet_model().model, args, word_tokenizer(), eval_dataset=data)


def pairs(rows: int) -> Dataset:
    return Dataset.from_dict({"query": SENTENCES[:rows], "answer": SENTENCES[::-1][:rows]})


def metrics_of_two(folder: str) -> None:
    """In each of two processes: evaluate 17 pairs in batches of 4, and nine masked texts whose labels are counted."""
    found = contrastive(folder, pairs(17), 4).evaluate()
    args = MultigranularMLMConfig(**quiet(folder, grid="6x32", per_device_eval_batch_size=2))
    seen = []

    def compute_metrics(prediction):
        seen.append(prediction.label_ids.shape[0] == prediction.predictions.shape[0])
        return {"texts": len(prediction.label_ids)}

    texts = masked_dataset(9).remove_columns("labels")
    trainer = MultigranularMLMTrainer(
        quiet_model(), args, word_tokenizer(), eval_dataset=texts, compute_metrics=compute_metrics
    )
    found |= trainer.evaluate(metric_key_prefix="mlm")
    assert seen == [True]
    Path(folder, f"{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def of_two(tmp_path_factory) -> list[dict[str, float]]:
    folder = tmp_path_factory.mktemp("two")
    run_two(folder, f"from {__name__} import metrics_of_two\nmetrics_of_two(sys.argv[1])")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(("rows", "drop_last"), [(2, True), (7, True), (9, False), (16, True), (17, True)])
def test_the_loss_and_its_terms_are_means_over_all_rows(tmp_path, rows, drop_last):
    trainer = contrastive(tmp_path, pairs(rows), 8, dataloader_drop_last=drop_last)
    parts = np.array_split(np.arange(rows), -(-rows // 8))
    expected = dict.fromkeys(METRICS, 0.0)
    with torch.no_grad():
        for part in parts:
            inputs = trainer.data_collator([trainer.eval_dataset[int(row)] for row in part])
            loss, *terms = (found := trainer.nested.eval()(**inputs))["loss"], *found["terms"].values()
            for name, value in zip(METRICS, [loss, *terms], strict=True):
                expected[name] += value.item() * len(part) / rows
    found = trainer.evaluate()
    assert {name: found[name] for name in METRICS} == pytest.approx(expected, rel=1e-5)
    stream = IterableDataset.from_generator(lambda: iter(pairs(rows)))
    assert trainer.evaluate(stream)["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-5)


def test_two_processes_evaluate_what_one_does(of_two, tmp_path):
    expected = contrastive(tmp_path, pairs(17), 8).evaluate()
    for found in of_two:
        assert [found[name] for name in METRICS] == pytest.approx([expected[name] for name in METRICS], rel=1e-5)
        assert found["mlm_texts"] == 9


def test_each_row_is_in_one_batch_and_no_batch_is_much_smaller(monkeypatch):
    module = sys.modules[evaluation_batches.__module__]
    for ranks in (1, 2, 3):
        monkeypatch.setattr(module, "world_size", lambda ranks=ranks: ranks)
        for rows in range(ranks, 30):
            for size in (1, 4, 8):
                shares = []
                for rank in range(ranks):
                    monkeypatch.setattr(module, "rank", lambda rank=rank: rank)
                    shares.append(evaluation_batches(rows, size))
                batches = [sum(parts, []) for parts in zip(*shares, strict=True)]
                assert sum(batches, []) == list(range(rows))
                assert all(1 <= len(part) <= size + (size == 1) for share in shares for part in share)
                assert max(map(len, batches)) - min(map(len, batches)) <= 1
        refused(f"has {ranks - 1} rows, too few for {ranks} process", evaluation_batches, ranks - 1, 8)
