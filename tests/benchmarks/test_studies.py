"""The studies: training data without test sentences, students, runs and stored results."""

import gzip
import json
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from torch.nn.functional import cosine_similarity, normalize
from transformers import AutoTokenizer

from benchmarks.reproduction import embedding, exits, fit_texts, paths, study
from benchmarks.reproduction.backbones import backbone, contrastive, reinitialised
from benchmarks.reproduction.encoders import BLOCK, four_bits
from benchmarks.reproduction.join import METHODS
from benchmarks.reproduction.studies import IBKD, REGULARIZERS
from benchmarks.reproduction.terms import gradients
from benchmarks.reproduction.training_data import STS_TESTS, regularizer_sentences, training_pairs, unlabelled_texts
from benchmarks.static_query import elastic
from m3bert.evaluation import GridEncoder
from m3bert.evaluation.readers import read_rows
from m3bert.trainers import Contrastive, Granularity, Grid, Teacher
from tests.evaluation_data import write_rows


def sentences_of_pairs(data: Path) -> list[str]:
    return [sentence for pair in training_pairs(data) for sentence in pair]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("training_texts", "tests", "least"),
    [
        (unlabelled_texts, STS_TESTS, 50_000),
        (regularizer_sentences, REGULARIZERS.tests, 15_000),
        (sentences_of_pairs, STS_TESTS, 60_000),
    ],
)
def test_no_sentence_of_an_evaluation_set_is_trained_on(
    data_folder, training_texts: Callable[[Path], list[str]], tests: Iterable[str], least: int
):
    texts = training_texts(data_folder)
    assert len(texts) > least and texts == training_texts(data_folder), "the same texts in every run"
    assert training_texts is sentences_of_pairs or len(texts) == len(set(texts))
    trained = {text.strip().lower() for text in texts}
    splits = [(name, "test") for name in tests]
    for name, split in [*splits, ("stsb", "dev")] if training_texts is sentences_of_pairs else splits:
        for row in read_rows(data_folder / name / f"{split}.jsonl.gz"):
            sides = {row[side].strip().lower() for side in ("text", "sentence1", "sentence2") if side in row}
            assert not trained & sides


def test_the_reinitialised_encoder_is_the_same_for_every_seed(minilm):
    torch.manual_seed(1)
    first = reinitialised().state_dict()
    torch.manual_seed(2)
    second, whole = reinitialised().state_dict(), contrastive().state_dict()
    assert first.keys() == second.keys() < whole.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    kept = {name for name in first if torch.equal(first[name], whole[name])}
    drawn = {name for name in first if name.startswith("encoder.layer.3.")}
    assert drawn and not kept & {name for name in drawn if name.endswith("weight")}
    assert set(first) - drawn == kept - drawn


TEXTS = [f"sentence number {row} about {row * 7}" for row in range(140)]
ONE_STEP = {"max_steps": 1, "warmup_steps": 0, "per_device_train_batch_size": 4, "use_cpu": True}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["HPD", "IBKD (ours), fine-tuned, 128"])
def test_a_method_of_ibkd_trains(name, minilm, tmp_path):
    pytest.importorskip("sentence_transformers")
    (model, tokenizer), method = backbone("student"), IBKD.methods[name]
    before = model.layers[0].mlp.up_proj.weight.detach().clone()
    if method.then is not None:
        rows = Dataset.from_dict({"anchor": TEXTS[:8], "positive": TEXTS[8:16], "negative": TEXTS[16:24]})
        stage = replace(method.then, settings={**method.then.settings, **ONE_STEP})
        trainer = stage.train(model, tokenizer, rows)
    else:
        parts = {"teacher": Teacher(minilm).embed(TEXTS, tmp_path / "teachers")}
        rows = Dataset.from_dict({"text": TEXTS})
        trainer = method.train(model, tokenizer, rows, parts, **{**IBKD.settings, **ONE_STEP})
    assert not before.equal(model.layers[0].mlp.up_proj.weight)
    assert trainer.projection.out_features == 128
    trainer.save_model(str(tmp_path / "student"))
    encoder = GridEncoder.from_pretrained(tmp_path / "student", grid=IBKD.sizes(name, "student"), max_length=128)
    assert encoder.encode(TEXTS[:2]).at(Granularity(3, 128)).shape == (2, 128)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MIPIC (ours)", "MIC, SIR 0.3, t 0.5, floor"])
def test_a_method_of_the_regularizers_trains(name, minilm):
    model, rows = reinitialised(), Dataset.from_dict({"text": TEXTS[:8]})
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    REGULARIZERS.methods[name].train(model, tokenizer, rows, **{**REGULARIZERS.settings, **ONE_STEP})
    assert any(not torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


class Opposite(Contrastive):
    def forward(self, batch):
        return {term: -2 * value for term, value in super().forward(batch).items()}


def test_gradients_are_relative_to_those_of_the_first_term(tiny_model):
    grid, ids = Grid.parse("2x32"), torch.randint(5, 99, (3, 6))
    batch = {"a": {"input_ids": ids}, "b": {"input_ids": ids}}
    found = gradients(tiny_model, {"first": Contrastive(grid), "second": Opposite(grid)}, [batch, batch])
    assert found["second"]["value"] == pytest.approx(-2 * found["first"]["value"], rel=1e-3)
    assert [found[name]["gradient"] for name in ("first", "second")] == pytest.approx([1, 2])
    assert [found[name]["cosine"] for name in ("first", "second")] == pytest.approx([1, -1])


@pytest.fixture
def study_of_paths(tmp_path, monkeypatch):
    """A folder with one collection, and the study of paths in an empty folder."""
    data = tmp_path / "data"
    topics = ["wings of an aircraft", "a loaf of bread", "the heart and its blood", "a jury in court"] * 3
    rows = [{"id": str(n), "title": "", "text": f"{text}, part {n}"} for n, text in enumerate(topics)]
    write_rows(data / "cranfield" / "corpus.jsonl.gz", rows)
    write_rows(data / "cranfield" / "queries.jsonl.gz", [{"id": "q", "text": "how do planes fly?"}])
    with gzip.open(data / "cranfield" / "qrels.tsv.gz", "wt") as file:
        file.write("query-id\tcorpus-id\tscore\n" + "".join(f"q\t{n}\t1\n" for n in (0, 4, 8)))
    changed = {
        "TESTS": {"tiny": ["cranfield"]}, "SYMMETRIC": {"tiny": []}, "DEPTHS": {"tiny": [2]},
    }  # fmt: skip
    for name, value in changed.items():
        monkeypatch.setattr(paths, name, value)
    for module in (paths, embedding):
        monkeypatch.setattr(module, "FOLDER", tmp_path)
    monkeypatch.setattr(study, "RESULTS", tmp_path / "results")
    return data


def test_every_list_of_layers_is_scored(minilm, study_of_paths, tmp_path, monkeypatch):
    texts = [
        f"{text} {number}" for number in range(100) for text in ("a file", "remove the tree of", "a list in", "no")
    ]
    monkeypatch.setattr(paths, "texts_of", lambda *_: {"texts": texts})
    paths.score_candidates("tiny", minilm, study_of_paths)
    found = json.loads((tmp_path / "results" / "candidates_tiny.json").read_text())["scores"]
    assert {run: {*its["0"]} for run, its in found.items()} == {"1,6": {"cranfield asymmetric"}}
    monkeypatch.setattr(paths, "add_run", None)
    paths.score_candidates("tiny", minilm, study_of_paths)


def test_paths_are_scored_with_documents_of_the_whole_encoder_and_of_the_deepest_path(
    minilm, study_of_paths, tmp_path, monkeypatch
):
    """What is scored is not scored again."""
    data, folder = study_of_paths, tmp_path / "elastic"
    elastic(folder, joint=True)
    (folder / "seconds").write_text("5")
    paths.score_encoder("tiny", minilm, folder, data)
    file = tmp_path / "results" / "paths_tiny.json"
    found = json.loads(file.read_text())["scores"]
    values = {run: its["0"]["cranfield asymmetric"] for run, its in found.items()}
    assert {run: [*its] for run, its in values.items()} == {
        "full": ["6x384"], "table": ["0x384"], "1,6": ["2x384"]
    }  # fmt: skip
    assert {*found["1,6"]["0"]} == {"cranfield asymmetric", "cranfield documents by 2 layers"}
    assert values["full"]["6x384"] == 1.0
    monkeypatch.setattr(paths, "add_run", None)
    paths.score_encoder("tiny", minilm, folder, data)


def test_a_study_runs_without_the_sets_that_are_not_there(tmp_path, capsys):
    (tmp_path / "banking77").mkdir()
    with gzip.open(tmp_path / "banking77" / "train.jsonl.gz", "wt") as file:
        file.write('{"text": "Where is my card?"}\n')
    assert fit_texts.sources(tmp_path) == {"questions": ["Where is my card?"]}
    with pytest.raises(ValueError, match=f"There are no tests of this study in {tmp_path}: set M3BERT_DATA"):
        exits.evaluators(tmp_path, development=True)
    said = capsys.readouterr().out
    names = ("text-english/news.txt.gz", "wikitext-2/dev.txt.gz", "stsb-dev", "msmarco-mini")
    assert all(f"The study runs without {name}" in said for name in names)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dims", [(24, 24), (24, 40), (40, 24)])
def test_every_map_learns_a_rotation(method, dims):
    inputs, targets = dims
    rows = normalize(torch.randn(700, 10) @ torch.randn(10, inputs))  # of few directions, which a rotation keeps
    turn = torch.linalg.qr(torch.randn(max(dims), max(dims)))[0][:inputs, :targets]
    goal = normalize(rows @ turn) if inputs <= targets else normalize(rows @ torch.linalg.svd(rows)[2][:targets].T)
    mapped = METHODS[method](rows[:600], goal[:600])(rows[600:])
    assert mapped.shape == (100, targets) and cosine_similarity(mapped, goal[600:]).mean() > 0.95


def test_four_bits_are_scaled_integers():
    """Against a block at a time, a byte at a time."""
    draw = np.random.default_rng(0)
    scales, content = draw.normal(size=3).astype(np.float16), draw.integers(0, 256, (3, 16), dtype=np.uint8)
    raw = b"".join(struct.pack("<e16B", scale, *nibbles) for scale, nibbles in zip(scales, content, strict=True))
    expected = []
    for scale, nibbles in zip(scales, content.tolist(), strict=True):
        expected += [(byte % 16 - 8) * np.float32(scale) for byte in nibbles]
        expected += [(byte // 16 - 8) * np.float32(scale) for byte in nibbles]
    np.testing.assert_array_equal(four_bits(np.frombuffer(raw, BLOCK)), np.array(expected, np.float32))
