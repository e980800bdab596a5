"""What is trained and written, and how it is read again."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file
from transformers import BertConfig, BertModel

from hub_cards.metadata import Statements
from hub_cards.publication import Options, write_card
from modeling_m3bert import EmbeddingSettings, M3BertForMaskedLM
from scripts import convert, embed, push_to_hub, train
from scripts.command import one_line
from tests.conftest import WORDS, tiny_config, word_tokenizer
from trainers import Granularity, Teacher
from trainers.evaluation import GridEncoder
from trainers.index import Corpus, Index, Plan

from .processes import REFUSALS


STEPS = 12
TRAINING = {
    "per_device_train_batch_size": 8, "max_steps": STEPS, "save_steps": 2, "save_total_limit": 2, "logging_steps": 4,
    "learning_rate": 1e-3, "report_to": "none", "disable_tqdm": "true", "use_cpu": "true", "overwrite": "true",
    "resume_from_checkpoint": "auto",
}  # fmt: skip
PAIRS = {"train_files": "pairs.jsonl", "grid": "2,6x8,32", "text_columns": "anchor positive"}
# Method, and its options. A resumed run must have the weights of one that was never stopped, bit for bit.
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "masked LM": ("multigranular-mlm", {"train_files": "text.txt", "max_length": 32, "warmup_steps": 2}),
    "contrastive, cached gradients": ("contrastive", {**PAIRS, "mini_batch_size": 4}),
    "MIPIC": ("mipic", {**PAIRS, "unsupervised": "false"}),
    "IBKD with a teacher's cache": (
        "ibkd", {"train_files": "text.txt", "teacher_name_or_path": "teacher", "teacher_cache_dir": "{out}/cache"},
    ),
    "a stream": (
        "contrastive",
        {**PAIRS, "streaming": "true", "shuffle_buffer_size": 16, "dataloader_num_workers": 2},
    ),
}  # fmt: skip
STATEMENTS = [Statements(license="mit"), Statements(license="apache-2.0", languages=("en",))]


def prepare(work: Path) -> None:
    """Models, a teacher and data."""
    tokenizer, draw = word_tokenizer(), random.Random(0)
    torch.manual_seed(0)
    config = tiny_config(embedding_dropout=0.1)
    M3BertForMaskedLM(config).save_pretrained(work / "masked")
    base = BertConfig(vocab_size=99, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24)
    BertModel(base).save_pretrained(work / "teacher")
    six_layers = {"hidden_size": 32, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 37}
    for version in (0, 1):
        bert = BertConfig(vocab_size=99, max_position_embeddings=48, **six_layers)
        BertModel(bert).save_pretrained(work / f"bert{version}")
        EmbeddingSettings(pooling="cls", max_length=48).write(work / f"bert{version}", width=32)
    for name in ("masked", "teacher", "bert0", "bert1"):
        tokenizer.save_pretrained(work / name)
    for version in (0, 1):
        convert.convert(str(work / f"bert{version}"), str(work / f"model{version}"))
    texts = [" ".join(draw.choices(WORDS, k=draw.randint(4, 14))) for _ in range(96)]
    (work / "text.txt").write_text("".join(f"{text}\n" for text in texts))
    pairs = [{"id": f"d{row}", "anchor": text, "positive": texts[-row - 1]} for row, text in enumerate(texts)]
    (work / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))


def fit(out: str, name: str, *more: str) -> None:
    """Train, or go on with a training that was stopped."""
    method, options = TRAININGS[name]
    base = "masked" if method == "multigranular-mlm" else "model0"
    options = {**TRAINING, **options, "model_name_or_path": base, "output_dir": out}
    words = [word for key, value in options.items() for word in (f"--{key}", *str(value).format(out=out).split())]
    train.main([method, *words, *more])


def digest(folder: Path) -> str:
    found = hashlib.sha256()
    for file in sorted([*folder.glob("model*.safetensors"), *folder.glob("2_Dense/*.safetensors")]):
        found.update(file.read_bytes())
    return found.hexdigest()


def weights_of(folder: Path, work: Path) -> int:
    """Which version of the model a folder holds, whole and with its settings."""
    encoder = GridEncoder.from_pretrained(folder)
    assert encoder.pooling == "cls", f"the pooling of {folder} is lost"
    found = encoder.model.state_dict()
    for version in (0, 1):
        saved = load_file(work / f"model{version}" / "model.safetensors")
        if all(torch.equal(found[name], saved[name]) for name in saved):
            return version
    raise AssertionError(f"{folder} has weights of no version")


@dataclass(frozen=True)
class Place:
    """
    Something that is written.

    Args:
        write (`Callable`): Writes version 0 or 1 of it into a folder.
        read (`Callable`): The version that the folder holds. Raises what a reader of it raises.
        begins_with (`int`, *optional*): The version that is there before; `None` for an empty folder.
    """

    write: Callable[[Path, int], None]
    read: Callable[[Path], int]
    begins_with: int | None = 0


def write_checkpoint(folder: Path, version: int) -> None:
    convert.convert(f"bert{version}", str(folder), overwrite=True)


def write_publication(folder: Path, version: int) -> None:
    push_to_hub.main([str(folder), "user/name", "--dry_run", "--license", STATEMENTS[version].license or ""])


def card(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def read_card(folder: Path) -> int:
    text = card(folder)
    assert text.rstrip().endswith("My own words.") and text.startswith("---"), f"half a card: {text[-300:]}"
    return int("apache-2.0" in text)


def write_index(folder: Path, version: int) -> None:
    plan = Plan(Granularity(6, 32), first_dim=8, shortlist=10)
    encoder = GridEncoder.from_pretrained("model0", grid=plan.grid())
    Index.build(folder, "faiss", plan, encoder, Corpus(["pairs.jsonl"], "anchor", "id")).close()


def read_index(folder: Path) -> int:
    with Index.open(folder, GridEncoder.from_pretrained("model0", grid=Plan(Granularity(6, 32)).grid())) as opened:
        rows = [json.loads(line) for line in Path("pairs.jsonl").read_text().splitlines()]
        hits = opened.search([row["anchor"] for row in rows], 96)
    assert all({hit.id for hit in found} == {row["id"] for row in rows} for found in hits)
    return 1


def write_parts(folder: Path, version: int, *more: str) -> None:
    words = ["--model_name_or_path", "model0", "--files", "pairs.jsonl", "--text_column", "anchor", "--grid", "6x32"]
    embed.main([*words, "--batch_size", "1", "--device", "cpu", "--output_dir", str(folder), *more])


def read_vectors(vectors: Any, texts: Sequence[str], expected: Any) -> int:
    np.testing.assert_allclose(np.asarray(vectors), expected(texts), atol=1e-4)
    return 1


def expected_vectors(texts: Sequence[str]) -> np.ndarray:
    found = GridEncoder.from_pretrained("model0", grid="6x32").encode(list(texts), role="document")
    return found.at(Granularity(6, 32)).numpy()


def read_parquet(file: Path) -> int:
    table = pq.read_table(file).to_pydict()
    return read_vectors(table["layer_6"], table["anchor"], expected_vectors) if len(table["anchor"]) == 96 else -1


def anchors() -> list[str]:
    return [json.loads(line)["anchor"] for line in Path("pairs.jsonl").read_text().splitlines()]


def write_cache(folder: Path, version: int) -> None:
    Teacher("teacher", batch_size=1).embed(anchors(), folder)


def read_cache(folder: Path) -> int:
    files = [*folder.glob("*/embeddings.npy")]
    if not files:
        raise FileNotFoundError(folder)
    found = np.load(files[0])
    assert (np.abs(found).sum(axis=1) > 0).all(), "rows without embeddings"
    write_cache(folder, 1)
    np.testing.assert_array_equal(np.load(files[0]), found)
    return 1


PLACES: dict[str, Place] = {
    "a checkpoint": Place(write_checkpoint, lambda folder: weights_of(folder, Path.cwd())),
    "a card": Place(lambda folder, v: write_card(folder, "user/name", Options(statements=STATEMENTS[v])), read_card),
    "a publication (--dry_run)": Place(write_publication, read_card),
    "an index": Place(write_index, read_index, None),
    "embeddings as a Parquet file": Place(
        lambda folder, v: write_parts(folder, v, "--format", "parquet"),
        lambda folder: read_parquet(folder / "embeddings.parquet"), None,
    ),
    "embeddings as arrays": Place(
        write_parts, lambda folder: read_vectors(np.load(folder / "layer_6.npy"), anchors(), expected_vectors), None,
    ),
    "a teacher's cache": Place(write_cache, read_cache, None),
}  # fmt: skip


def begin(folder: Path, name: str) -> None:
    """What is there before a trial."""
    shutil.rmtree(folder, ignore_errors=True)
    if PLACES[name].begins_with is None:
        return
    shutil.copytree("model0", folder)
    if name != "a checkpoint":
        write_card(folder, "user/name", Options(statements=STATEMENTS[0]))
        text = card(folder)
        (folder / "README.md").write_text(text.rstrip() + "\n\nMy own words.\n", encoding="utf-8")


def check(folder: Path, name: str, complete: bool) -> None:
    """The place holds the old version, the new one, or is refused; the new one if it is complete."""
    place = PLACES[name]
    allowed = {place.begins_with, 1} if name != "a publication (--dry_run)" else {0}
    try:
        found = place.read(folder)
    except REFUSALS as error:
        assert not complete, f"a complete write is refused: {error}"
        assert "\n" not in one_line(error)
        return
    assert found in ({1} & allowed or {0} if complete else allowed), f"version {found} of {allowed}"
