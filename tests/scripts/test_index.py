"""The commands `choose --output_file`, `index` and `search`, from results to hits."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from m3bert.commands import choose, index, search
from m3bert.index import Plan
from tests.conftest import refused, write_modules
from tests.scripts.test_choose import results  # noqa: F401  # a fixture


pytest.importorskip("faiss")


@pytest.fixture
def model(tiny_checkpoint) -> str:
    write_modules(Path(tiny_checkpoint), width=32, max_length=64)
    return tiny_checkpoint


@pytest.fixture
def corpus(tmp_path, sentences) -> str:
    rows = ({"_id": f"d{row}", "text": text, "part": row % 2} for row, text in enumerate(sentences))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(tmp_path / "corpus.jsonl")


@pytest.fixture
def plan(tmp_path) -> str:
    (tmp_path / "plan.json").write_text('{"documents": "6x32", "first_dim": 8, "shortlist": 20}')
    return str(tmp_path / "plan.json")


def build(plan: str, model: str, corpus: str, output: Path, *options: str) -> None:
    fixed = ["--model", model, "--files", corpus, "--output_dir", str(output), "--device", "cpu", "--id_column", "_id"]
    index.main([plan, *fixed, "--vector_store", "faiss", *options])


def test_a_choice_becomes_a_plan(results, tmp_path, capsys):  # noqa: F811
    results.save(tmp_path / "results.json")
    file = tmp_path / "runs" / "plan.json"
    choose.main([str(tmp_path / "results.json"), "--documents", "1000", "--output_file", str(file)])
    assert f"Plan: {file}\nNext: m3bert index {file} --files " in capsys.readouterr().out
    plan = Plan.load(file)
    assert (str(plan.documents), plan.vectors, plan.model) == ("6x32", 1000, "user/model")


def test_build_search_add_and_delete(plan, model, corpus, tmp_path, sentences, capsys):
    folder = tmp_path / "index"
    build(plan, model, corpus, folder)
    said = capsys.readouterr().out
    assert f"{folder}: {len(sentences)} documents at 6x32, in faiss (flat), 160 bytes per document" in said
    search.main([str(folder), sentences[4], "--top_k", "2", "--where", "part=0", "--device", "cpu"])
    first, text, metadata, second, *_ = capsys.readouterr().out.splitlines()
    assert first.split()[0] == "1" and first.endswith("  d4") and second.split()[0] == "2"
    assert " ".join(sentences[4].split())[:40] in text and metadata.strip() == "part=0"

    (tmp_path / "new.jsonl").write_text(json.dumps({"_id": "new", "text": sentences[4], "part": 7}) + "\n")
    index.main([str(folder), "--delete", "d4", "d5", "--add", str(tmp_path / "new.jsonl"), "--device", "cpu"])
    assert (
        f"Deleted 2 documents.\nAdded 1 documents.\n{folder}: {len(sentences) - 1} documents"
        in capsys.readouterr().out
    )
    search.main([str(folder), sentences[4], "--top_k", "1", "--device", "cpu"])
    assert capsys.readouterr().out.splitlines()[0].endswith("  new")
    search.main([str(folder), sentences[4], "--where", "part=99", "--device", "cpu"])
    assert capsys.readouterr().out == "Nothing found.\n"


def test_the_prompts_and_lengths_of_the_build_are_used_by_the_search(plan, model, corpus, tmp_path, sentences, capsys):
    build(plan, model, corpus, tmp_path / "index", "--query_prompt", "find ", "--max_length", "20")
    encoder = json.loads((tmp_path / "index" / "index.json").read_text())["encoder"]
    assert (encoder["prompts"], encoder["max_length"]) == ({"query": "find "}, 20)
    capsys.readouterr()
    search.main([str(tmp_path / "index"), sentences[4], "--device", "cpu"])
    assert capsys.readouterr().out
    with pytest.raises(ValueError, match="is of another encoder: prompts {'query': 'find '}, not {}"):
        search.main([str(tmp_path / "index"), sentences[4], "--device", "cpu", "--query_prompt", ""])


def test_another_model_is_refused(plan, model, corpus, tmp_path):
    build(plan, model, corpus, tmp_path / "index")
    file = Path(model) / "model.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).mul_(1.01)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="The index .* is of another encoder: weights "):
        search.main([str(tmp_path / "index"), "question", "--device", "cpu"])


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("part", "--where part: write column=value"),
        ("part=one", "Cannot filter by part="),
        ("color=red", "Cannot filter by color="),
    ],
)
def test_filters_that_do_not_fit_are_refused(plan, model, corpus, tmp_path, where, reason):
    build(plan, model, corpus, tmp_path / "index")
    refused(reason, search.main, [str(tmp_path / "index"), "question", "--where", where, "--device", "cpu"])


def test_values_of_filters_have_the_types_of_their_columns():
    columns = {"year": "integer", "score": "number", "open": "boolean", "topic": "text"}
    texts = ["year=1990", "year=1991", "score=1", "open=TRUE", "topic=a=b"]
    assert search.filters(texts, columns) == {"year": [1990, 1991], "score": [1], "open": [True], "topic": ["a=b"]}
