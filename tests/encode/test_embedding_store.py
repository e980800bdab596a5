"""Embeddings on disk: filled once, continued, never stale."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from m3bert.encode.embedding_store import EmbeddingStore
from m3bert.trainers import Teacher
from tests.conftest import refused
from tests.trainers.tiny_run import run_two


ROWS = torch.arange(20.0).view(10, 2)
BATCHES = [[0, 3, 5], [1, 2], [4, 9, 7], [6, 8]]


def fill(folder: Path, *, stop: int | None = None, **manifest: int) -> tuple[list[int], torch.Tensor]:
    """The batches that were missing, and what is read; before batch `stop` is written, the run is interrupted."""
    with EmbeddingStore(folder, manifest, {"embeddings": 2}, BATCHES) as store:
        missing = store.missing()
        for batch in missing:
            if batch == stop:
                raise KeyboardInterrupt
            store.write(batch, {"embeddings": ROWS[BATCHES[batch]]})
        return missing, torch.from_numpy(np.array(store.read()["embeddings"]))


def test_an_interrupted_fill_continues(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fill(tmp_path / "store", stop=2)
    names = {file.name for file in (tmp_path / "store").iterdir()}
    assert names == {"embeddings.npy.unfinished", "done.npy", "manifest.json"}, "nobody reads zeros"
    missing, actual = fill(tmp_path / "store")
    assert missing == [2, 3] and actual.equal(ROWS)
    missing, actual = fill(tmp_path / "store")
    assert missing == [] and actual.equal(ROWS)
    assert {file.name for file in (tmp_path / "store").iterdir()} == {"embeddings.npy", "manifest.json"}


def test_what_is_of_other_settings_or_damaged_is_refused_and_without_a_manifest_filled_anew(tmp_path):
    np.save(tmp_path / "embeddings.npy", np.zeros((10, 2), np.float32))
    assert fill(tmp_path, seed=1)[0] == [0, 1, 2, 3]
    refused("has embeddings made with other settings: seed differ", fill, tmp_path, seed=2)
    file = tmp_path / "embeddings.npy"
    for size in (file.stat().st_size - 1, 20):
        file.write_bytes(file.read_bytes()[:size])
        refused(r"embeddings.npy cannot be read \(.*\): delete ", fill, tmp_path, seed=1)


def test_a_full_disk_says_so_before_the_work(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 79}))
        with pytest.raises(OSError, match="has no room for 0.0 GB of embeddings"):
            fill(tmp_path)
    assert fill(tmp_path)[1].equal(ROWS)


FILL_TWO = """
import json
from m3bert.trainers import Teacher
from m3bert.data import teacher
from sentence_transformers import SentenceTransformer
torch.distributed.init_process_group("gloo")
teacher.ROWS_OF_A_BATCH = 8
folder, seen = Path(sys.argv[1]), []
encode = SentenceTransformer.encode
SentenceTransformer.encode = lambda self, texts, **options: seen.extend(texts) or encode(self, texts, **options)
texts = json.loads((folder / "texts.json").read_text())
found = Teacher(str(folder / "encoder")).embed(texts, folder / "cache")
torch.save((found.of(texts), len(seen)), folder / f"{torch.distributed.get_rank()}.pt")
"""


def test_two_processes_fill_one_cache(encoder_folder, sentences, tmp_path):
    pytest.importorskip("sentence_transformers")
    shutil.copytree(encoder_folder, tmp_path / "encoder")
    (tmp_path / "texts.json").write_text(json.dumps(sentences))
    run_two(tmp_path, FILL_TWO)
    expected = Teacher(str(encoder_folder)).embed(sentences, tmp_path / "one").of(sentences)
    counts = []
    for rank in (0, 1):
        vectors, count = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
        counts.append(count)
    assert max(counts) <= len(set(sentences)) / 2 + 8 + 1
