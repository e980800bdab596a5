"""The small pretraining: its text, its stages, and its committed results."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pytest
import yaml

from benchmarks.pretrain_mini import __main__ as command
from benchmarks.pretrain_mini import text
from scripts.stages import read_pipeline
from tests.evaluation_data import write_rows
from tests.snippets import read
from trainers import Grid
from trainers.evaluation.tasks import BITEXT_LANGUAGES


def sentence(draw: random.Random) -> str:
    return " ".join(draw.choices("a and are be by can do file for from has if in is it list name".split(), k=8))


@pytest.fixture
def data(tmp_path) -> Path:
    """Local data in miniature. Some sentences that are scored also stand among the texts and the pairs."""
    draw, folder = random.Random(0), tmp_path / "data"

    def pairs(count: int) -> list[dict[str, str]]:
        return [{"sentence1": sentence(draw), "sentence2": sentence(draw)} for _ in range(count)]

    scored = [{**pair, "score": row % 6} for row, pair in enumerate(pairs(12))]
    write_rows(folder / "stsb" / "test.jsonl.gz", scored)
    for language in BITEXT_LANGUAGES:
        write_rows(folder / "tatoeba" / f"{language}-eng.jsonl.gz", pairs(6))
    for language in ("en", *text.XNLI):
        rows = [*pairs(40), {**scored[0], "sentence2": sentence(draw)}]
        write_rows(folder / "xnli" / f"{language}-dev.jsonl.gz", rows)
    captions = [{"captions": [sentence(draw) for _ in range(5)]} for _ in range(400)]
    write_rows(folder / "multi30k-captions" / "train.jsonl.gz", captions)
    entailed = [{**pair, "label_text": "entailment"} for pair in [*pairs(20), scored[1]]]
    write_rows(
        folder / "snli" / "train.jsonl.gz", [*entailed, *({**its, "label_text": "neutral"} for its in entailed)]
    )
    for name in [f"text-english/{name}" for name in text.ENGLISH] + ["text-multilingual/deu", "text-multilingual/fra"]:
        file = folder / f"{name}.txt.gz"
        file.parent.mkdir(exist_ok=True)
        with gzip.open(file, "wt", encoding="utf-8") as lines:
            lines.writelines(
                f"{its}\n" for its in [*(sentence(draw) for _ in range(100)), scored[2]["sentence1"].upper()]
            )
    return folder


def contents(folder: Path) -> dict[str, list[str]]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): file.read_text(encoding="utf-8").splitlines() for file in files}


def test_no_sentence_that_is_scored_or_held_out_is_trained_on(data, tmp_path):
    text.write_text(data, tmp_path / "text")
    found = contents(tmp_path / "text")
    languages = ["deu", "eng", "fra"]
    assert sorted(found) == [
        "english-eval.jsonl", "english-eval.txt", "english.jsonl", "english/eng/text.txt", "multilingual-eval.txt",
        "parallel-eval.jsonl", "parallel.jsonl", *(f"train/{language}/text.txt" for language in languages),
    ]  # fmt: skip
    scored = text.scored_sentences(data)
    assert len(scored) > 100
    for name, lines in found.items():
        assert lines, name
        texts = [its for line in lines for its in (json.loads(line).values() if name.endswith("l") else [line])]
        assert not {its.lower() for its in texts} & scored, name
    for name in ("english", "parallel"):
        assert len(found[f"{name}-eval.jsonl"]) == text.EVAL_PAIRS
        assert not set(found[f"{name}-eval.jsonl"]) & set(found[f"{name}.jsonl"])
    trained = {line for language in languages for line in found[f"train/{language}/text.txt"]}
    assert not trained & {*found["english-eval.txt"], *found["multilingual-eval.txt"]}
    assert len(found["multilingual-eval.txt"]) == text.EVAL_PER_LANGUAGE * len(languages)

    text.write_text(data, tmp_path / "again")
    assert contents(tmp_path / "again") == found


def test_the_stages_are_legal_and_score_what_no_stage_trains_on(data, tmp_path, monkeypatch):
    monkeypatch.setenv("PRETRAIN_MINI", str(tmp_path))
    text.write_text(data, tmp_path / "text")
    stages = {stage.name: stage for stage in read_pipeline(command.PIPELINE)}
    for trained, scored in command.MODELS.values():
        tasks = stages[scored].options["tasks"]
        assert set(tasks) <= {"stsb", *(f"tatoeba-{language}" for language in BITEXT_LANGUAGES)}
        for stage in (scored, *([trained] if trained else [])):
            assert len(Grid.parse(stages[stage].options["grid"])) == 12
    assert stages["tokenizer"].options["vocab_size"] == 32_000


def test_without_data_the_command_says_so_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"^There is no folder .*nowhere: set .* M3BERT_DATA to your data\.$"):
        command.main(["--folder", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads(command.FILE.read_text(encoding="utf-8"))


def test_the_loss_of_every_granularity_falls_in_every_stage_but_distillation(results):
    grid = Grid.parse("2,4,6 x 16,32,64,128")
    distilled = "distilled and averaged"
    for model in list(command.MODELS)[1:]:
        if model == distilled:
            continue
        losses = results["models"][model]["losses"]
        assert list(losses) == [str(g) for g in grid]
        assert all(its["after"] < its["before"] for its in losses.values()), model
    assert all(its["after"] < its["before"] + 0.11 for its in results["models"][distilled]["losses"].values())
    assert list(results["models"]) == list(command.MODELS)
    assert {"date", "processor", "cores", "threads", "seed", "commit", "seconds"} <= results.keys()
    assert results["total_seconds"] < 40 * 60


def test_the_page_has_the_tables_of_the_results(results):
    assert command.tables(results) in read("docs/pretrain.md")


@pytest.mark.slow
def test_all_stages_at_tiny_size(data, tmp_path, monkeypatch, capfd):
    content = yaml.safe_load(command.PIPELINE.read_text(encoding="utf-8"))
    for stage in content["stages"].values():
        options = stage["options"]
        for name, value in {
            "max_steps": 2,
            "save_steps": 1,
            "vocab_size": 400,
            "per_device_train_batch_size": 4,
        }.items():
            if name in options:
                options[name] = min(options[name], value)
        if stage["command"] == "evaluate":
            options["tasks"] = ["stsb", "tatoeba-deu"]
    pipeline = tmp_path / "pipeline.yaml"
    pipeline.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    monkeypatch.setenv("M3BERT_DATA", str(data))
    arguments = ["--folder", str(tmp_path / "run"), "--pipeline", str(pipeline), "--results", str(tmp_path / "a.json")]
    command.main(arguments)
    first = json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))
    assert list(first["models"]) == list(command.MODELS)
    printed = capfd.readouterr().out
    assert command.tables(first) in printed
    command.main(arguments)
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["models"] == first["models"]
    assert "finished before" in capfd.readouterr().out
