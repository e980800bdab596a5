"""The commands `choose --output_file`, `index` and `search`, from results to hits."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from scripts import choose, index, search
from tests.conftest import write_modules
from tests.scripts.test_choose import results  # noqa: F401  # a fixture
from trainers.index import Plan


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
    assert f"Plan: {file}. Build it: m3bert index {file} --files FILE" in capsys.readouterr().out
    plan = Plan.load(file)
    assert (str(plan.documents), plan.vectors, plan.model) == ("6x32", 1000, "user/model")


def test_build_search_add_and_delete(plan, model, corpus, tmp_path, sentences, capsys, run_bare):
    folder = tmp_path / "index"
    build(plan, model, corpus, folder)
    said = capsys.readouterr().out
    assert f"{folder}: {len(sentences)} documents at 6x32, in faiss (flat), 160 bytes per document" in said
    lines = said.partition("Without m3bert:\n\n")[2].replace("'your question'", repr(sentences[4]))
    assert run_bare(lines).strip().startswith("[('d4', ")

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
    assert "prompt='find '" in capsys.readouterr().out
    search.main([str(tmp_path / "index"), sentences[4], "--device", "cpu"])
    assert capsys.readouterr().out
    with pytest.raises(ValueError, match="is for prompts {'query': 'find '}, and this encoder has {}"):
        search.main([str(tmp_path / "index"), sentences[4], "--device", "cpu", "--query_prompt", ""])


def test_the_printed_lines_read_as_long_a_question_as_the_index(
    plan, tiny_checkpoint, corpus, tmp_path, sentences, capsys, run_bare
):
    write_modules(Path(tiny_checkpoint), width=32, max_length=4)  # published with less than the model reads
    build(plan, tiny_checkpoint, corpus, tmp_path / "index")
    longest = max(range(len(sentences)), key=lambda row: len(sentences[row]))
    lines = capsys.readouterr().out.partition("Without m3bert:\n\n")[2]
    found = ast.literal_eval(run_bare(lines.replace("'your question'", repr(sentences[longest]))).strip())
    assert found[0][0] == f"d{longest}" and found[0][1] == pytest.approx(1, abs=1e-5)


def test_another_model_is_refused(plan, model, corpus, tmp_path):
    build(plan, model, corpus, tmp_path / "index")
    file = Path(model) / "model.safetensors"
    weights = load_file(file)
    next(iter(weights.values())).mul_(1.01)
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match="The index .* is of another model: its weights have the digest"):
        search.main([str(tmp_path / "index"), "question", "--device", "cpu"])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["PLAN"], "Building an index needs --files"),
        (["PLAN", "--files", "a.jsonl"], "Building an index needs --vector_store"),
        (["PLAN", "--files", "a.jsonl", "--vector_store", "faiss"], "Building an index needs --output_dir"),
        (
            ["PLAN", "--files", "a.jsonl", "--vector_store", "annoy", "--output_dir", "x"],
            "--vector_store annoy is unknown; legal",
        ),
        (
            ["PLAN", "--files", "a", "--vector_store", "usearch", "--output_dir", "x"],
            "--vector_store usearch: m3bert builds no index",
        ),
        (["PLAN", "--grid", "6x8"], "--grid: an index has the granularity of its plan"),
        (["PLAN", "--delete", "a"], "--add and --delete need the folder of an index"),
        (["FOLDER"], "Nothing to do for .*: pass --add FILE ... or --delete ID"),
        (["FOLDER", "--delete", "a"], "holds no index: it has no index.json"),
        (
            ["FOLDER", "--delete", "a", "--vector_store", "faiss"],
            "--files, --vector_store and --output_dir are for building",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(plan, tmp_path, options, reason):
    (tmp_path / "folder").mkdir()
    places = {"PLAN": plan, "FOLDER": str(tmp_path / "folder")}
    with pytest.raises(ValueError, match=reason):
        index.main([places.get(word, word) for word in options])


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("part", "--where part: write column=value"),
        ("part=one", "--where part=one: the column has the type integer"),
        ("color=red", "Cannot filter by 'color'; columns of the index: part"),
    ],
)
def test_filters_that_do_not_fit_are_refused(plan, model, corpus, tmp_path, where, reason):
    build(plan, model, corpus, tmp_path / "index")
    with pytest.raises(ValueError, match=reason):
        search.main([str(tmp_path / "index"), "question", "--where", where, "--device", "cpu"])


def test_values_of_filters_have_the_types_of_their_columns():
    columns = {"year": "integer", "score": "number", "open": "boolean", "topic": "text"}
    texts = ["year=1990", "year=1991", "score=1", "open=TRUE", "topic=a=b"]
    assert search.filters(texts, columns) == {"year": [1990, 1991], "score": [1.0], "open": [True], "topic": ["a=b"]}
    with pytest.raises(ValueError, match="the column has the type boolean"):
        search.filters(["open=yes"], columns)


def test_errors_are_one_line(plan, model, corpus, tmp_path, run_module):
    with open(corpus, "a") as file:
        file.write(json.dumps({"_id": "empty", "text": "", "part": 1}) + "\n")
    options = ["--model", model, "--files", corpus, "--vector_store", "faiss", "--output_dir", tmp_path / "index"]
    done = run_module("m3bert", "index", plan, *options, "--id_column", "_id")
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1 and "row " in lines[0] and "has no text in the column text" in lines[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "index").exists()
