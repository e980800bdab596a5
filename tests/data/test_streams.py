"""Training on streams: every row once per epoch over all ranks and workers, and the same weights after resuming."""

import json
from itertools import islice

import pytest
import torch
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import AutoTokenizer

from m3bert.data import streams
from m3bert.data.files import load_files, tokenize_texts
from m3bert.data.streams import Epochs
from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, MultigranularMLMConfig, MultigranularMLMTrainer
from tests.conftest import quiet, tiny_config
from tests.trainers.tiny_run import assert_same_weights, pair_config, quiet_model, run_two


def write_rows(folder, files: int, rows: int = 36) -> list[str]:
    """Files with `rows` rows in all; one has many more than the others."""
    cuts = [0, *(min(rows, 2 + 3 * index) for index in range(files - 1)), rows]
    for index in range(files):
        lines = (json.dumps({"id": f"{row:02}"}) + "\n" for row in range(cuts[index], cuts[index + 1]))
        (folder / f"{index}.jsonl").write_text("".join(lines))
    return [str(folder / f"{index}.jsonl") for index in range(files)]


@pytest.fixture
def epochs_of(monkeypatch):
    """The rows of a rank of several, which are all in this process."""

    def build(files, rank: int = 0, ranks: int = 1, buffer_size: int = 5) -> Epochs:
        monkeypatch.setattr(streams, "rank", lambda: rank)
        monkeypatch.setattr(streams, "world_size", lambda: ranks)
        return Epochs(load_files(files, streaming=True), buffer_size, seed=1)

    return build


def ids(rows) -> list[int]:
    return [int(row["id"]) for row in rows]


@pytest.mark.parametrize(("ranks", "files"), [(1, 3), (2, 4), (4, 3), (4, 8)])
def test_each_row_is_seen_once_per_epoch_over_all_ranks(tmp_path, epochs_of, ranks, files):
    """Files are divided among ranks if they can be, else rows are."""
    names = write_rows(tmp_path, files)
    for epoch in range(2):
        rows = [row for rank in range(ranks) for row in ids(epochs_of(names, rank, ranks).rows(epoch))]
        assert sorted(rows) == [*range(36)]


@pytest.mark.parametrize("files", [1, 2, 3])
def test_two_workers_read_each_row_once(tmp_path, epochs_of, files):
    """Also where there is one file, and so nothing to read for the second worker."""
    loader = DataLoader(epochs_of(write_rows(tmp_path, files)), batch_size=None, num_workers=2)
    assert {*ids(islice(loader, 400))} == {*range(36)}


def test_two_ranks_are_one_batch_and_epochs_differ(tmp_path, epochs_of):
    names = write_rows(tmp_path, 3)
    whole = ids(islice(epochs_of(names), 72))
    assert sorted(whole[:36]) == sorted(whole[36:]) and whole[:36] != whole[36:]
    for rank in (0, 1):
        assert ids(islice(epochs_of(names, rank, 2), 36)) == whole[rank::2]
    assert ids(islice(epochs_of(names, buffer_size=0), 40)) == [*range(36), *range(4)]


def test_an_empty_stream_is_named(tmp_path, tiny_tokenizer):
    empty = IterableDataset.from_generator(lambda: iter(()))
    args = ContrastiveConfig(**quiet(tmp_path / "out", max_steps=1, text_columns=["query", "answer"]))
    with pytest.raises(ValueError, match=r"lacks the column\(s\) query, answer|has no rows"):
        ContrastiveTrainer(quiet_model().model, args, tiny_tokenizer, empty)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_streamed_masked_lm_is_resumed_exactly(tmp_path, tiny_tokenizer, sentences, workers):
    """Masks and dropout after a resume are those of a run without a break, also in the second epoch."""
    for part in range(2):
        lines = (json.dumps({"text": text}) + "\n" for text in sentences[part:24:2])
        (tmp_path / f"{part}.jsonl").write_text("".join(lines))
    files = [str(tmp_path / f"{part}.jsonl") for part in range(2)]

    def build(folder):
        torch.manual_seed(4)
        model = M3BertForMaskedLM(tiny_config(embedding_dropout=0.2))
        values = {"max_steps": 9, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "shuffle_buffer_size": 7}
        values |= {"grid": "2,6x8,32", "warmup_steps": 0, "save_strategy": "steps", "save_steps": 4}
        values |= {"dataloader_num_workers": workers}
        stream = tokenize_texts(load_files(files, streaming=True), tiny_tokenizer, max_length=16)
        return MultigranularMLMTrainer(
            model, MultigranularMLMConfig(**quiet(folder, **values)), tiny_tokenizer, stream
        )

    whole = build(tmp_path / "whole")
    whole.train()
    for step in (4, 8):
        again = build(tmp_path / f"again-{step}")
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert_same_weights(whole.model, again.model, atol=0)


def train_streamed(folder, processes: int) -> None:
    """Train on a stream with cached gradients, in one process with a batch as large as that of two."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    args = pair_config(
        ContrastiveConfig, folder / f"out-{processes}", grid="2,6x8,32", mini_batch_size=2,
        per_device_train_batch_size=8 // processes, shuffle_buffer_size=5, learning_rate=0.1, optim="sgd",
        dataloader_num_workers=1,
    )  # fmt: skip
    pairs = load_files([str(folder / "pairs.jsonl")], streaming=True)
    trainer = ContrastiveTrainer(quiet_model().model, args, tokenizer, pairs)
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.backbone.state_dict(), folder / f"{processes}.pt")


def test_two_processes_are_one_on_a_stream(tmp_path, tiny_tokenizer, sentences):
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    rows = [json.dumps({"query": a, "answer": b}) + "\n" for a, b in zip(sentences, sentences[::-1], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    train_streamed(tmp_path, 1)
    run_two(tmp_path, "from tests.data.test_streams import train_streamed\ntrain_streamed(Path(sys.argv[1]), 2)")
    one, two = (torch.load(tmp_path / f"{count}.pt") for count in (1, 2))
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-5, msg=name)
