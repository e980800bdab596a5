"""The batches of a stream: distributed over ranks and workers, resumed at any step, and what is wrong with a row."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from itertools import islice

import pytest
import torch
from transformers import AutoTokenizer, DataCollatorForTokenClassification

from modeling_m3bert import M3BertForMaskedLM
from tests.conftest import quiet, tiny_config
from tests.trainers.tiny_run import (
    assert_same_weights,
    masked_dataset,
    pair_config,
    quiet_model,
    run_two,
)
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    MultigranularMLMConfig,
    MultigranularMLMTrainer,
)
from trainers.core.streams.loader import Layout, StreamLoader
from trainers.data.files import stream_files, tokenize_texts


def write_rows(folder, files: int, rows: int) -> list[str]:
    """Files with `rows` rows in all; one has many more than the others."""
    names = []
    cuts = [0, *(min(rows, 2 + 3 * index) for index in range(files - 1)), rows]
    for index in range(files):
        file = folder / f"{index}.jsonl"
        file.write_text("".join(json.dumps({"id": row}) + "\n" for row in range(cuts[index], cuts[index + 1])))
        names.append(str(file))
    return names


def ids(rows) -> list[int]:
    return [row["id"] for row in rows]


def loader(stream, collator=ids, *, rank=0, ranks=1, workers=0, batch_size=3, buffer_size=5) -> StreamLoader:
    layout = Layout(batch_size, buffer_size, seed=1, rank=rank, ranks=ranks, workers=max(1, workers))
    return StreamLoader(stream, collator, layout, num_workers=workers)


@pytest.mark.parametrize(("ranks", "workers", "files"), [(1, 0, 3), (2, 0, 4), (4, 0, 3), (4, 0, 8), (2, 2, 3)])
def test_each_row_is_seen_once_per_epoch_over_all_ranks(tmp_path, ranks, workers, files):
    """In an epoch of 36 rows, which are a whole number of batches: 3 files are shared by all, 8 are divided."""
    stream = stream_files(write_rows(tmp_path, files, 36))
    own = files % (ranks * max(1, workers)) == 0 and ranks * max(1, workers) > 1
    loaders = [loader(stream, rank=rank, ranks=ranks, workers=workers) for rank in range(ranks)]
    assert loaders[0].layout.has_own_shards(stream) is own
    epochs: dict[int, Counter] = {}
    for each in loaders:
        layout = each.layout
        if own:  # each reader is at an epoch of its own: read its parts of the first two
            for worker in range(layout.workers):
                reading = layout.reading(stream, worker)
                for epoch in range(2):
                    rows = sum(1 for shard in reading.order(epoch) for _ in shard.rows())
                    start = type(each.states[0].position)(epoch=epoch)
                    epochs.setdefault(epoch, Counter()).update(
                        row.values["id"] for row, _ in islice(reading.rows(start), rows)
                    )
        else:
            batches = list(islice(each, 2 * 36 // (3 * ranks)))
            half = len(batches) // 2
            for epoch, part in enumerate((batches[:half], batches[half:])):
                epochs.setdefault(epoch, Counter()).update(row for batch in part for row in batch)
    for counts in epochs.values():
        assert sorted(counts) == list(range(36))
        assert set(counts.values()) == {1}


def test_two_ranks_are_one_batch(tmp_path):
    stream = stream_files(write_rows(tmp_path, 3, 37))
    whole = list(islice(loader(stream, batch_size=6), 20))
    parts = [list(islice(loader(stream, rank=rank, ranks=2), 20)) for rank in range(2)]
    assert whole == [first + second for first, second in zip(*parts, strict=True)]


@pytest.mark.parametrize(("files", "workers"), [(3, 0), (3, 2), (4, 2)])
def test_a_run_continues_after_any_batch(tmp_path, workers, files):
    """With the batches not seen, and no others, although workers prepare batches in advance; random draws included."""

    def noisy(rows):
        return ids(rows), torch.rand(2).tolist()

    stream = stream_files(write_rows(tmp_path, files, 37))
    whole = list(islice(loader(stream, noisy, workers=workers), 30))
    for taken in range(1, 28, 2) if workers == 0 else (2, 13):
        first = loader(stream, noisy, workers=workers)
        assert list(islice(first, taken)) == whole[:taken]
        first.save(tmp_path)
        second = loader(stream, noisy, workers=workers)
        second.load(tmp_path)
        assert list(islice(second, 30 - taken)) == whole[taken:], taken
        assert second.epoch == min(state.position.epoch for state in second.states)


def test_a_position_is_for_the_same_data_and_settings(tmp_path):
    stream = stream_files(write_rows(tmp_path, 3, 37))
    started = loader(stream)
    next(iter(started))
    started.save(tmp_path)
    with pytest.raises(ValueError, match=r"other settings of the stream: batch_size 3 \(now 4\)"):
        loader(stream, batch_size=4).load(tmp_path)
    with pytest.raises(ValueError, match=r"no position in the stream: it lacks stream-1.json"):
        loader(stream, rank=1, ranks=2).load(tmp_path)
    (tmp_path / "0.jsonl").write_text('{"id": 99}\n')
    with pytest.raises(ValueError, match=r"other settings of the stream: data "):
        loader(stream_files([str(tmp_path / f"{index}.jsonl") for index in range(3)])).load(tmp_path)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_row_is_named(tmp_path, tiny_tokenizer, workers):
    rows = [{"text": f"a text {index}"} for index in range(10)]
    rows[6] = {"txt": "misspelt"}
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stream = tokenize_texts(stream_files([str(tmp_path / "texts.jsonl")]), tiny_tokenizer)
    batches = iter(loader(stream, len, workers=workers, buffer_size=0))
    assert [next(batches), next(batches)] == [3, 3]
    with pytest.raises(ValueError, match=r"texts.jsonl, line 7: Column 'text' of a row is not text: None") as caught:
        next(batches)
    assert "\n" not in str(caught.value)


def test_a_dead_worker_ends_the_run(tmp_path):
    stream = stream_files(write_rows(tmp_path, 3, 37))
    batches = iter(loader(stream, lambda rows: os.getpid(), workers=1))
    os.kill(next(batches), signal.SIGKILL)
    with pytest.raises(RuntimeError, match="worker"):
        list(islice(batches, 50))


# ---------------------------------------------------------------------------------------------------------------------
# Training


def write_masked(folder, files: int = 3) -> list[str]:
    """Tokenised texts with labels already made, in files."""
    rows = [json.dumps(row) + "\n" for row in masked_dataset(22)]
    names = []
    for index in range(files):
        (folder / f"masked-{index}.jsonl").write_text("".join(rows[index::files]))
        names.append(str(folder / f"masked-{index}.jsonl"))
    return names


def stream_trainer(tokenizer, folder, files, **changes):
    values = {"max_steps": 7, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2}
    values |= {"lr_scheduler_type": "constant", "shuffle_buffer_size": 5, "grid": "2,6x8,32", "warmup_steps": 0}
    trainer = MultigranularMLMTrainer(
        quiet_model(), MultigranularMLMConfig(**quiet(folder, **{**values, **changes})), tokenizer, stream_files(files)
    )
    return trainer


def with_labels(trainer, tokenizer):
    trainer.data_collator = DataCollatorForTokenClassification(tokenizer)
    trainer.columns = ("input_ids", "labels")
    return trainer


def test_a_streamed_masked_lm_is_tokenised_masked_and_resumed_exactly(tmp_path, tiny_tokenizer, sentences):
    """The collator's masks and the dropout after a resume are those of a run without a break, at every step."""
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in sentences))

    def build(folder, **changes):
        model = M3BertForMaskedLM(tiny_config(embedding_dropout=0.2))
        values = {"max_steps": 6, "per_device_train_batch_size": 4, "logging_steps": 1, "learning_rate": 1e-2}
        values |= {"shuffle_buffer_size": 7, "grid": "2,6x8,32", "warmup_steps": 0, "save_strategy": "steps"}
        args = MultigranularMLMConfig(**{**quiet(folder, **{**values, **changes}), "save_steps": 1})
        stream = tokenize_texts(stream_files([str(tmp_path / "texts.jsonl")]), tiny_tokenizer, max_length=16)
        return MultigranularMLMTrainer(model, args, tiny_tokenizer, stream)

    whole = build(tmp_path / "whole")
    whole.train()
    for step in (4,):
        again = build(tmp_path / f"again-{step}", dataloader_num_workers=0)
        again.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{step}"))
        assert_same_weights(whole.model, again.model, atol=0)
    rows = 6 * 4
    assert whole.state.log_history[-2]["epoch"] == (rows - 1) // len(sentences)


def write_pairs(folder, sentences) -> None:
    rows = [json.dumps({"query": a, "answer": b}) + "\n" for a, b in zip(sentences, sentences[::-1], strict=True)]
    (folder / "pairs.jsonl").write_text("".join(rows))


def train_streamed(kind: str, folder, processes: int = 2):
    """Train on a stream, and save the weights and losses. In one process: with a batch as large as that of all."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    batch = 8 // processes
    if kind == "mlm":
        files = [str(folder / f"masked-{index}.jsonl") for index in range(3)]
        trainer = with_labels(
            stream_trainer(
                tokenizer, folder / f"out-{processes}", files, per_device_train_batch_size=batch, optim="sgd",
                gradient_accumulation_steps=2, dataloader_num_workers=1,
            ),
            tokenizer,
        )  # fmt: skip
    else:
        args = pair_config(
            ContrastiveConfig, folder / f"out-{processes}", grid="2,6x8,32", mini_batch_size=2,
            per_device_train_batch_size=batch, shuffle_buffer_size=5, learning_rate=0.1, optim="sgd",
        )  # fmt: skip
        trainer = ContrastiveTrainer(quiet_model().model, args, tokenizer, stream_files([str(folder / "pairs.jsonl")]))
    trainer.train()
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        torch.save((trainer.backbone.state_dict(), losses), folder / f"{kind}-{processes}.pt")


KINDS = ("mlm", "contrastive")


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_tokenizer, sentences):
    """A folder in which each kind was trained by one process and by two; the latter then got different files."""
    folder = tmp_path_factory.mktemp("two")
    tiny_tokenizer.save_pretrained(folder / "tokenizer")
    write_masked(folder)
    write_pairs(folder, sentences)
    for kind in KINDS:
        train_streamed(kind, folder, processes=1)
    code = f"""
from transformers import AutoTokenizer
from tests.trainers.core.streams.test_loader import stream_trainer, train_streamed
folder = Path(sys.argv[1])
for kind in {KINDS}:
    train_streamed(kind, folder)
files = [str(folder / f"masked-{{index}}.jsonl") for index in range(3)][int(os.environ["RANK"]):]
trainer = stream_trainer(AutoTokenizer.from_pretrained(folder / "tokenizer"), folder / "out", files)
try:
    trainer.train()
except ValueError as error:
    (folder / f"error-{{os.environ['RANK']}}").write_text(str(error))
"""
    run_two(folder, code)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_are_one_on_a_stream(trained, kind):
    """Masked LM with accumulation and a worker, and contrastive with cached gradients."""
    (one, its_losses), (two, their_losses) = (torch.load(trained / f"{kind}-{count}.pt") for count in (1, 2))
    assert len(its_losses) >= 4
    torch.testing.assert_close(torch.tensor(their_losses), torch.tensor(its_losses), atol=1e-5, rtol=1e-5)
    assert one.keys() == two.keys()
    for name in one:
        torch.testing.assert_close(two[name], one[name], atol=1e-5, rtol=1e-5, msg=name)


def test_ranks_with_different_data_are_refused(trained):
    for rank in range(2):
        assert (trained / f"error-{rank}").read_text().startswith("The ranks read different data: pass the same")
