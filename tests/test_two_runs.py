"""Two runs that begin in one folder at the same moment: the second one waits, or is refused, and nothing is mixed."""

import json
import os
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file

from m3bert.commands import embed, train
from m3bert.evaluation import GridEncoder
from m3bert.index import Corpus, Index, Plan
from m3bert.trainers import Granularity, Teacher
from tests import warm_processes
from tests.conftest import assert_close, quiet


ROOT = Path(__file__).parents[1]
TOGETHER = """
import json, os, sys, time
from contextlib import contextmanager
from pathlib import Path

folder, words = Path(sys.argv[1]), sys.argv[2:]

def begin():
    (folder / f"ready-{os.getpid()}").touch()
    while len([*folder.glob("ready-*")]) < 2:
        time.sleep(0.001)

@contextmanager
def refusal():
    begin()
    try:
        yield
    except ValueError as error:
        print("REFUSED", error)

def slowly(function):
    def slow(*arguments, **options):
        print("worked")
        time.sleep(0.2)
        return function(*arguments, **options)
    return slow
"""
CACHE = """
from m3bert.trainers import Teacher
from m3bert.data import teacher
teacher.ROWS_OF_A_BATCH, teacher.Teacher._encode = 16, slowly(Teacher._encode)
begin()
Teacher(str(folder / "encoder")).embed(json.loads((folder / "texts.json").read_text()), folder / "out")
"""
EMBED = """
from m3bert.commands import embed
embed.load_encoder = slowly(embed.load_encoder)
with refusal():
    embed.main(words)
"""
INDEX = """
from m3bert.trainers import Granularity
from m3bert.evaluation import GridEncoder
from m3bert.index import Corpus, Index, Plan, index
index.CHUNK, index.embedded = 16, slowly(index.embedded)
plan = Plan(Granularity(6, 32))
encoder = GridEncoder.from_pretrained(folder / "model", grid=plan.grid())
with refusal():
    Index.build(folder / "out", "faiss", plan, encoder, Corpus([str(folder / "text.txt")], "text")).close()
"""
TRAIN = """
from m3bert.commands import train
train.build_trainer = slowly(train.build_trainer)
with refusal():
    train.main(words)
"""


@pytest.fixture
def folder(tmp_path, tiny_checkpoint, sentences) -> Path:
    (tmp_path / "texts.json").write_text(json.dumps(sentences))
    (tmp_path / "text.txt").write_text("".join(f"{text}\n" for text in sentences))
    return tmp_path


def run_both(folder: Path, code: str, *words: str) -> list[str]:
    """What two processes print, which begin at the same moment."""
    options = {"path": [str(ROOT)], "arguments": [str(folder), *words]}
    environment = {**os.environ, "HF_DATASETS_CACHE": str(folder / "datasets")}
    done = warm_processes.server().run(TOGETHER + code, ROOT, [environment] * 2, **options)
    assert [each.returncode for each in done] == [0, 0], "".join(each.stderr[-3000:] for each in done)
    return [each.stdout for each in done]


def assert_one_is_refused(said: list[str], folder: Path) -> None:
    (refused,) = [text for text in said if "REFUSED" in text]
    assert f"Another process writes to {folder / 'out'}: wait until it ends, or name another folder." in refused
    assert "worked" not in refused and "worked" in "".join(said)
    assert not [*folder.glob(".*.lock")]


def test_a_cache_is_filled_by_one_and_read_by_both(folder, encoder_folder, sentences):
    pytest.importorskip("sentence_transformers")
    (folder / "encoder").symlink_to(encoder_folder)
    said = run_both(folder, CACHE)
    parts = len(set(sentences)) // 16
    assert sorted(text.count("worked") for text in said) == [0, parts]
    (cache,) = (folder / "out").iterdir()
    found = np.load(cache / "embeddings.npy")
    alone = Teacher(str(folder / "encoder")).embed(sentences, folder / "alone").vectors
    np.testing.assert_allclose(found, alone, atol=1e-5)


def test_a_folder_of_embeddings_has_one_writer(folder):
    words = ["--model_name_or_path", str(folder / "model"), "--files", str(folder / "text.txt"), "--grid", "6x32"]
    words += ["--format", "parquet", "--device", "cpu", "--output_dir"]
    assert_one_is_refused(run_both(folder, EMBED, *words, str(folder / "out")), folder)
    embed.main([*words, str(folder / "alone")])
    found, alone = (pq.read_table(folder / name / "embeddings.parquet") for name in ("out", "alone"))
    assert found["text"] == alone["text"]
    assert_close(found["layer_6"].to_pylist(), alone["layer_6"].to_pylist())


def test_an_index_has_one_writer(folder, sentences):
    pytest.importorskip("faiss")
    assert_one_is_refused(run_both(folder, INDEX), folder)
    plan = Plan(Granularity(6, 32))
    encoder = GridEncoder.from_pretrained(folder / "model", grid=plan.grid())
    with Index.open(folder / "out", encoder) as index:
        hits = index.search(sentences, len(sentences))
    assert all(len({hit.id for hit in found}) == len(sentences) for found in hits)
    with Index.build(folder / "out", "faiss", plan, encoder, Corpus([str(folder / "text.txt")], "text")):
        pass


def test_a_folder_of_a_training_has_one_writer(folder, monkeypatch):
    options = quiet(folder / "out", model_name_or_path=folder / "model", train_files=folder / "text.txt", max_steps=2)
    options |= {"save_strategy": "steps", "save_steps": 1, "per_device_train_batch_size": 8}

    def words(**changes: object) -> list[str]:
        return ["simcse", *(str(word) for key, value in (options | changes).items() for word in (f"--{key}", value))]

    assert_one_is_refused(run_both(folder, TRAIN, *words()), folder)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", folder / "datasets")
    train.main(words(output_dir=folder / "alone"))
    found, alone = (load_file(folder / name / "model.safetensors") for name in ("out", "alone"))
    for name in found | alone:
        assert_close(found[name], alone[name])
