"""The teacher's cache: filled once, continued, mended, never stale; and looked up by text."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from tests.trainers.test_distributed import ROOT, run_two
from trainers import Teacher, embedding_folder, teacher


sentence_transformers = pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer  # noqa: E402


@pytest.fixture(scope="session")
def encoder_folder(tiny_tokenizer, tmp_path_factory) -> Path:
    """A tiny BERT, which sentence-transformers reads with mean pooling."""
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("teachers") / "tiny-bert"
    config = BertConfig(
        vocab_size=99, hidden_size=20, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=48, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def small_batches(monkeypatch):
    monkeypatch.setattr(teacher, "ROWS_OF_A_BATCH", 8)


@pytest.fixture
def encoded(monkeypatch) -> list[str]:
    """Collects the texts that any teacher is asked to embed."""
    seen: list[str] = []
    encode = SentenceTransformer.encode

    def counting(self, texts, **options):
        seen.extend(texts)
        return encode(self, texts, **options)

    monkeypatch.setattr(SentenceTransformer, "encode", counting)
    return seen


def cache_of(cache_dir: Path) -> Path:
    (folder,) = cache_dir.iterdir()
    return folder


def test_embeddings_are_the_teachers_own_and_found_by_text(encoder_folder, sentences, tmp_path):
    texts = [*sentences, sentences[0], "", sentences[3]]
    found = Teacher(str(encoder_folder)).embed(texts, tmp_path)
    assert (len(found), found.width) == (len(set(texts)), 20)
    expected = torch.from_numpy(SentenceTransformer(str(encoder_folder)).encode(texts))
    torch.testing.assert_close(found.of(texts), expected, atol=1e-6, rtol=1e-6)
    with pytest.raises(ValueError, match="no embedding of 'another text': embed all texts first"):
        found.of([sentences[0], "another text"])


def test_a_second_run_does_not_load_the_teacher(encoder_folder, sentences, tmp_path, monkeypatch):
    first = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    monkeypatch.setattr(Teacher, "load", lambda self: pytest.fail("loaded"))
    again = Teacher(str(encoder_folder), batch_size=3).embed(reversed(sentences), tmp_path)
    assert again.of(sentences).equal(first.of(sentences))
    assert len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize(
    "change", [{"pooling": "cls"}, {"prompt": "a text"}, {"max_length": 5}, {"dtype": "float16"}, "texts", "weights"]
)
def test_another_teacher_or_corpus_has_another_cache(encoder_folder, sentences, tmp_path, change):
    cache = tmp_path / "cache"
    own = tmp_path / "tiny-bert"
    shutil.copytree(encoder_folder, own)
    before = Teacher(str(own)).embed(sentences, cache)
    changed, texts = Teacher(str(own)), sentences
    if change == "texts":
        texts = [*sentences[1:], "one more text"]
    elif change == "weights":
        model = BertModel.from_pretrained(own)
        with torch.no_grad():
            model.embeddings.word_embeddings.weight.add_(torch.randn_like(model.embeddings.word_embeddings.weight))
        model.save_pretrained(own)
        changed = Teacher(str(own))
    else:
        changed = replace(changed, **change)
    after = changed.embed(texts, cache)
    assert len(list(cache.iterdir())) == 2
    if change != "texts":
        assert not torch.allclose(after.of(sentences[:9]), before.of(sentences[:9]), atol=1e-6)
    assert Teacher(str(encoder_folder)).embed(sentences, cache).of(sentences).equal(before.of(sentences))


def test_poolings_are_those_of_the_token_states(encoder_folder, sentences, tmp_path, tiny_tokenizer):
    model = BertModel.from_pretrained(encoder_folder).eval()
    batch = tiny_tokenizer(sentences[:6], padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    found = Teacher(str(encoder_folder), pooling="cls").embed(sentences[:6], tmp_path)
    torch.testing.assert_close(found.of(sentences[:6]), states[:, 0], atol=1e-5, rtol=1e-5)


def test_an_interrupted_fill_continues(encoder_folder, sentences, tmp_path, monkeypatch, encoded):
    write = embedding_folder.EmbeddingFolder.write

    def stop_at_the_third(self, batch, vectors):
        if batch == 2:
            raise KeyboardInterrupt
        write(self, batch, vectors)

    monkeypatch.setattr(embedding_folder.EmbeddingFolder, "write", stop_at_the_third)
    with pytest.raises(KeyboardInterrupt):
        Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    monkeypatch.setattr(embedding_folder.EmbeddingFolder, "write", write)
    encoded.clear()
    found = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    assert len(encoded) == len(set(sentences)) - 16
    expected = torch.from_numpy(SentenceTransformer(str(encoder_folder)).encode(sentences))
    torch.testing.assert_close(found.of(sentences), expected, atol=1e-6, rtol=1e-6)


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
    assert ("damaged" if damage == "a flipped byte" else "is cut short") in caplog.text
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
    with pytest.raises(ValueError, match="holds embeddings of something else: text_fingerprint"):
        of_all.embed(sentences, tmp_path / "two")


def test_rows_that_are_not_finite_are_refused_and_others_stay(encoder_folder, sentences, tmp_path, monkeypatch):
    encode = SentenceTransformer.encode
    broken = sorted(set(sentences), key=lambda text: (-len(text), text))[12]

    def with_nan(self, texts, **options):
        vectors = encode(self, texts, **options)
        if broken in texts:
            vectors = vectors.clone()
            vectors[texts.index(broken)] = float("nan")
        return vectors

    monkeypatch.setattr(SentenceTransformer, "encode", with_nan)
    with pytest.raises(
        ValueError, match=f"1 of 8 texts embeddings that are not finite as float32: '{broken}' for one"
    ):
        Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    assert (np.load(cache_of(tmp_path) / "checksums.npy") != 0).sum() == 1
    monkeypatch.setattr(SentenceTransformer, "encode", encode)
    assert torch.isfinite(Teacher(str(encoder_folder)).embed(sentences, tmp_path).of(sentences)).all()


def test_a_half_that_overflows_is_refused(encoder_folder, sentences, tmp_path, monkeypatch):
    encode = SentenceTransformer.encode
    monkeypatch.setattr(SentenceTransformer, "encode", lambda self, texts, **o: encode(self, texts, **o) * 1e6)
    with pytest.raises(ValueError, match="not finite as float16"):
        Teacher(str(encoder_folder), dtype="float16").embed(sentences, tmp_path)


def test_a_full_disk_says_so_before_the_work_and_leaves_other_caches(encoder_folder, sentences, tmp_path, monkeypatch):
    first = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}

    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=r"No room for 0.000 GB of embeddings in .*: No space left on device"):
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
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, str(encoder_folder), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "No room for 0.000 GB of embeddings" in done.stdout
    assert not list(tmp_path.iterdir())


def test_what_loads_data_elsewhere_shares_the_file(encoder_folder, sentences, tmp_path):
    found = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    expected = found.of(sentences)
    pickled = pickle.dumps(found)
    assert len(pickled) < 3000 + 16 * len(sentences)
    assert pickle.loads(pickled).of(sentences).equal(expected)


def test_principal_components_are_those_of_a_singular_value_decomposition(encoder_folder, sentences, tmp_path):
    found = Teacher(str(encoder_folder)).embed(sentences, tmp_path)
    vectors = found.of(sorted(set(sentences))).double()
    expected = torch.linalg.svd(vectors - vectors.mean(dim=0)).Vh[:5]
    components = found.principal_components(5).double()
    torch.testing.assert_close((components @ expected.T).abs(), torch.eye(5, dtype=torch.float64), atol=1e-4, rtol=0)
    with pytest.raises(ValueError, match="of 20 dims cannot be compressed to 21"):
        found.principal_components(21)


def test_errors_of_a_teacher(encoder_folder, tmp_path, sentences, monkeypatch):
    with pytest.raises(ValueError, match="There is no text"):
        Teacher(str(encoder_folder)).embed([], tmp_path)
    with pytest.raises(ValueError, match="float32 or float16, not 'int8'"):
        Teacher("x", dtype="int8")
    with pytest.raises(ValueError, match="batch_size must be 1 or more"):
        Teacher("x", batch_size=0)
    with pytest.raises(ValueError, match=r"max_length=99 must be within 1..48"):
        Teacher(str(encoder_folder), max_length=99).embed(sentences, tmp_path)
    with pytest.raises(OSError, match="nobody/nothing"):
        Teacher("nobody/nothing").embed(sentences, tmp_path)
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)
    with pytest.raises(ValueError, match=r"A teacher needs sentence-transformers: pip install 'm3bert\[sentence"):
        Teacher(str(encoder_folder)).embed(sentences, tmp_path)


FILL_TWO = """
import json
from trainers import Teacher, teacher
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
        torch.testing.assert_close(vectors, expected, atol=1e-6, rtol=1e-6)
        counts.append(count)
    assert max(counts) <= len(set(sentences)) / 2 + 8 + 1
