"""Embeddings on disk: filled once, continued, mended, never stale."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests import warm_processes
from tests.trainers.tiny_run import ROOT, run_two
from trainers import Teacher
from trainers.data import embedding_store


pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer


pytestmark = pytest.mark.usefixtures("small_batches")


def cache_of(cache_dir: Path) -> Path:
    (folder,) = cache_dir.iterdir()
    return folder


def test_an_interrupted_fill_continues(encoder_folder, sentences, tmp_path, monkeypatch, encoded):
    write = embedding_store.EmbeddingStore.write

    def stop_at_the_third(self, batch, vectors):
        if batch == 2:
            raise KeyboardInterrupt
        write(self, batch, vectors)

    monkeypatch.setattr(embedding_store.EmbeddingStore, "write", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    monkeypatch.setattr(embedding_store.EmbeddingStore, "write", write)
    names = {file.name for file in cache_of(tmp_path).iterdir()}
    assert names == {"embeddings.npy.unfinished", "checksums.npy", "manifest.json"}, "nobody reads zeros"
    encoded.clear()
    found = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    assert len(encoded) == len(set(sentences)) - 16
    expected = torch.from_numpy(SentenceTransformer(str(encoder_folder)).encode(sentences))
    torch.testing.assert_close(found.of(sentences), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("damage", ["a flipped byte", "cut short", "checksums cut short"])
def test_damage_is_found_and_mended(encoder_folder, sentences, tmp_path, encoded, caplog, damage):
    before = Teacher(str(encoder_folder)).embed(sentences, tmp_path).of(sentences)
    name = "checksums.npy" if "checksums" in damage else "embeddings.npy"
    file = cache_of(tmp_path) / name
    content = bytearray(file.read_bytes())
    if damage == "a flipped byte":
        content[-10 * 80] ^= 1  # in the second batch from the end
    else:
        content = content[: -(8 if "checksums" in damage else 9 * 80)]  # the last batch, or a row more
    file.write_bytes(content)
    encoded.clear()
    with caplog.at_level("WARNING"):
        after = Teacher(str(encoder_folder)).embed(sentences, tmp_path).of(sentences)
    assert 0 < len(encoded) <= 16
    assert ("damaged" if damage == "a flipped byte" else "is truncated") in caplog.text
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def test_a_file_without_its_head_is_an_error(encoder_folder, sentences, tmp_path):
    Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    file = cache_of(tmp_path) / "embeddings.npy"
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(ValueError, match=r"embeddings.npy cannot be read \(.*\): delete "):
        Teacher(str(encoder_folder)).embed(sentences, tmp_path)


def test_a_cache_of_another_corpus_in_its_place_is_an_error(encoder_folder, sentences, tmp_path):
    of_all = Teacher(str(encoder_folder))
    of_all.embed(sentences, tmp_path / "one")
    of_all.embed(sentences[1:], tmp_path / "two")
    wrong = tmp_path / "two" / cache_of(tmp_path / "one").name
    cache_of(tmp_path / "two").rename(wrong)
    with pytest.raises(ValueError, match="has embeddings made with other settings: text_fingerprint"):
        of_all.embed(sentences, tmp_path / "two")


def test_a_full_disk_says_so_before_the_work_and_leaves_other_caches(encoder_folder, sentences, tmp_path, monkeypatch):
    first = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"Cannot allocate 0.000 GB for embeddings in .*: No space left on device"):
            Teacher(str(encoder_folder)).embed(sentences[1:], tmp_path)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before
    assert Teacher(str(encoder_folder)).embed(sentences, tmp_path).of(sentences).equal(first.of(sentences))
    Teacher(str(encoder_folder)).embed(sentences[1:], tmp_path)  # with room again


LIMITED = """
import resource, signal, sys
from trainers import Teacher
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
try:
    Teacher(sys.argv[1]).embed([f"text {n}" for n in range(99)], sys.argv[2])
except OSError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits the size of files as Linux does")
def test_no_room_for_a_file_is_an_error_and_no_crash(encoder_folder, tmp_path):
    options = {"path": [str(ROOT)], "arguments": [str(encoder_folder), str(tmp_path)]}
    (done,) = warm_processes.server().run(LIMITED, ROOT, [dict(os.environ)], **options)
    assert done.returncode == 0, done.stderr
    assert "Cannot allocate 0.000 GB for embeddings" in done.stdout
    assert not list(tmp_path.iterdir())


FILL_TWO = """
import json
from trainers import Teacher
from trainers.data import teacher
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
    shutil.copytree(encoder_folder, tmp_path / "encoder")
    (tmp_path / "texts.json").write_text(json.dumps(sentences))
    run_two(tmp_path, FILL_TWO)
    expected = torch.from_numpy(SentenceTransformer(str(encoder_folder)).encode(sentences))
    counts = []
    for rank in (0, 1):
        vectors, count = torch.load(tmp_path / f"{rank}.pt")
        torch.testing.assert_close(vectors, expected, atol=1e-5, rtol=1e-5)
        counts.append(count)
    assert max(counts) <= len(set(sentences)) / 2 + 8 + 1
