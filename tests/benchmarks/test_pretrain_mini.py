"""The small pretraining: its text, its stages, and its committed results."""

import gzip
import json
import random
import shutil
from pathlib import Path

import pytest

from benchmarks.pretrain_mini import __main__ as command, text
from m3bert.commands import train
from m3bert.commands.recipes import read_recipes
from m3bert.evaluation.tasks import BITEXT_LANGUAGES
from m3bert.trainers import Grid
from tests.evaluation_data import write_rows
from tests.snippets import read


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
        "english-eval.txt", "english/eng/text.txt", *(f"languages/{language}/text.txt" for language in languages),
        "multilingual-eval.txt", "pairs-eval.jsonl", "pairs/english.jsonl", "pairs/translations.jsonl",
    ]  # fmt: skip
    scored = text.scored_sentences(data)
    assert len(scored) > 100
    for name, lines in found.items():
        assert lines, name
        texts = [its for line in lines for its in (json.loads(line).values() if name.endswith("l") else [line])]
        assert not {its.lower() for its in texts} & scored, name
    assert len(found["pairs-eval.jsonl"]) == text.EVAL_PAIRS
    assert not set(found["pairs-eval.jsonl"]) & {*found["pairs/english.jsonl"], *found["pairs/translations.jsonl"]}
    trained = {line for language in languages for line in found[f"languages/{language}/text.txt"]}
    assert not trained & {*found["english-eval.txt"], *found["multilingual-eval.txt"]}
    assert len(found["multilingual-eval.txt"]) == text.EVAL_PER_LANGUAGE * len(languages)

    text.write_text(data, tmp_path / "again")
    assert contents(tmp_path / "again") == found


def test_the_sizes_are_options_of_the_stages():
    """And the grid is the one that is scored."""
    for method, recipe, sizes in (
        ("multigranular-mlm", "m3bert_stage1", "mlm.yaml"),
        ("multigranular-mlm", "m3bert_stage2", "mlm.yaml"),
        ("contrastive", "m3bert_stage3", "pairs.yaml"),
    ):
        options = ["--config", recipe, "--config", str(command.FOLDER / sizes), "--output_dir", "out"]
        _, _, args = train.parse(train.method_of(method)[0], options)
        assert Grid.parse(args.grid) == command.GRID and not args.bf16
        assert args.max_steps == read_recipes([str(command.FOLDER / sizes)])["max_steps"]
    assert {name for names in command.TASKS.values() for name in names} <= {
        "stsb",
        *(f"tatoeba-{language}" for language in BITEXT_LANGUAGES),
    }


@pytest.fixture(scope="module")
def results() -> dict:
    return json.loads(command.FILE.read_text(encoding="utf-8"))


def test_the_loss_of_every_granularity_falls_in_every_stage(results):
    assert list(results["models"]) == list(command.MODELS.values())
    for folder, model in command.MODELS.items():
        if folder != "untrained":
            losses = results["models"][model]["losses"]
            assert list(losses) == [str(g) for g in command.GRID]
            assert all(its["after"] < its["before"] for its in losses.values()), model
    assert {"date", "processor", "cores", "threads", "seed", "commit"} <= results.keys()
    assert not results["continued"]


def test_the_page_has_the_tables_of_the_results(results):
    page = read("docs/pretrain.md")
    assert command.with_tables(page, results) == page


def test_the_page_has_the_script():
    assert f"```sh\n{read('benchmarks/pretrain_mini/stages.sh')}```" in read("docs/pretrain.md")


@pytest.mark.slow
def test_all_stages_at_tiny_size_also_after_an_interruption(data, tmp_path, monkeypatch):
    """Stage 1 is kept, stage 2 continues from its checkpoint to the same weights, stage 3 runs again."""
    for name, value in {"M3BERT_DATA": data, "VOCABULARY": 400, "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}.items():
        monkeypatch.setenv(name, str(value))
    run, file, tasks = tmp_path / "run" / "run", tmp_path / "results.json", ["stsb", "tatoeba-deu"]
    more = ["--max_steps", "2", "--save_steps", "1", "--save_total_limit", "2", "--per_device_train_batch_size", "4"]
    command.pretrain(tmp_path / "run", file, tasks, more)
    results = json.loads(file.read_text(encoding="utf-8"))
    assert list(results["models"]) == list(command.MODELS.values()) and not results["continued"]
    assert command.tables(results) in command.with_tables(read("docs/pretrain.md"), results)
    weights = {stage: (run / stage / "model.safetensors").read_bytes() for stage in command.EVALUATION}
    kept = [run / "stage1" / "model.safetensors", run / "stage2" / "checkpoint-1" / "model.safetensors"]
    times = [file.stat().st_mtime_ns for file in kept]

    (run / "stage2" / "model.safetensors").unlink()
    shutil.rmtree(run / "stage2" / "checkpoint-2")
    for folder in ("stage3", "stage3-scores"):
        shutil.rmtree(run / folder)
    command.pretrain(tmp_path / "run", file, tasks, more)
    again = json.loads(file.read_text(encoding="utf-8"))
    assert again["continued"] and again["models"] == results["models"]
    assert [file.stat().st_mtime_ns for file in kept] == times
    assert weights == {stage: (run / stage / "model.safetensors").read_bytes() for stage in command.EVALUATION}
