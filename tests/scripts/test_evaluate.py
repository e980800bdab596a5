"""The commands that evaluate, choose and embed, on small data."""

from __future__ import annotations

import json

import numpy as np
import pytest
from datasets import Dataset, load_from_disk

from scripts import choose, embed, evaluate
from tests.evaluation_data import write_data
from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder, GridResults


@pytest.fixture
def model(tiny_model, tiny_tokenizer, tmp_path) -> str:
    tiny_model.save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


@pytest.fixture
def data(tmp_path, sentences, monkeypatch):
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path / "data"))
    return write_data(tmp_path / "data", sentences)


TASKS = ["stsb", "mrpc", "tatoeba-deu", "banking77", "cranfield", "stsb-geometry"]


def test_evaluate_then_choose(model, data, tmp_path, capsys):
    out = tmp_path / "out"
    evaluate.main(
        ["--model_name_or_path", model, "--grid", "2,6x8,32", "--output_dir", str(out)]
        + ["--latency_documents", "100", "--tasks", *TASKS]
    )
    printed = capsys.readouterr().out
    assert "| granularity | sts (1) |" in printed
    results = GridResults.load(out / "results.json")
    assert results.tasks() == TASKS and results.model == model and results.latency.encoder == "m3bert"
    families = ("sts", "classification", "pair_classification", "retrieval", "bitext")
    figures = {f"heat_map_{family}.png" for family in families}
    figures |= {"quality_and_bytes.png", "quality_and_latency.png", "variances_stsb-geometry.png"}
    assert {file.name for file in out.iterdir()} == {"results.json", "tables.md", *figures}
    assert all((out / name).stat().st_size > 5000 for name in figures)
    tables = (out / "tables.md").read_text()
    value = results.quality(["cranfield"])[Granularity(6, 32)]
    assert f"{100 * value:.1f}" in tables and "## Two stages, ending with 6x32" in tables

    choose.main([str(out / "results.json"), "--documents", "1000", "--plans"])
    printed = capsys.readouterr().out
    assert printed.startswith("Judged by cranfield. Deploy ") and "| collection | documents |" in printed
    choose.main([str(out / "results.json"), "--documents", "1000", "--tasks", "sts", "mrpc"])
    assert capsys.readouterr().out.startswith("Judged by stsb, mrpc. Deploy ")
    with pytest.raises(ValueError, match="No scores of snli"):
        choose.main([str(out / "results.json"), "--documents", "1000", "--tasks", "snli"])


def test_evaluate_refuses_what_it_does_not_know(model, data, capsys):
    with pytest.raises(ValueError, match="Name what to score"):
        evaluate.main(["--model_name_or_path", model])
    with pytest.raises(ValueError, match="no task 'bleu'"):
        evaluate.main(["--model_name_or_path", model, "--tasks", "bleu"])
    with pytest.raises(ValueError, match="train.jsonl.gz is not there"):
        evaluate.main(["--model_name_or_path", model, "--tasks", "emotion"])
    evaluate.main(["--list_tasks"])
    assert "seeds: stsb, sts12, " in capsys.readouterr().out


@pytest.fixture
def files(tmp_path, sentences) -> str:
    file = tmp_path / "corpus.jsonl"
    rows = [{"id": row, "title": "open", "text": text} for row, text in enumerate(sentences[:11])]
    file.write_text("\n".join(map(json.dumps, rows)))
    return str(file)


@pytest.fixture
def expected(tiny_model, tiny_tokenizer, sentences):
    encoder = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2,6x8,16"), batch_size=4)
    return encoder.encode([f"open </s> {text}" for text in sentences[:11]])


def run_embed(model, files, out, *options):
    embed.main(
        ["--model_name_or_path", model, "--files", files, "--output_dir", str(out), "--batch_size", "4"]
        + ["--text_column", "title+text", "--grid", "2,6x8,16", *options]
    )


def test_embed_writes_arrays_rows_and_tables(model, files, expected, tmp_path, capsys):
    run_embed(model, files, tmp_path / "npy")
    assert "11 texts at 2,6x8,16" in capsys.readouterr().out
    for layer in (2, 6):
        array = np.load(tmp_path / "npy" / f"layer_{layer}.npy", mmap_mode="r")
        np.testing.assert_array_equal(array, expected.layers[layer])
    run_embed(model, files, tmp_path / "rows", "--format", "datasets", "--dtype", "float16")
    run_embed(model, files, tmp_path / "table", "--format", "parquet")
    rows = load_from_disk(str(tmp_path / "rows" / "dataset"))
    table = Dataset.from_parquet(str(tmp_path / "table" / "embeddings.parquet"), cache_dir=str(tmp_path / "cache"))
    for dataset, tolerance in ((rows, 2e-3), (table, 0)):
        assert dataset.column_names == ["id", "title", "text", "layer_2", "layer_6"] and dataset["id"][:] == list(
            range(11)
        )
        np.testing.assert_allclose(np.array(dataset["layer_6"][:]), expected.layers[6], atol=tolerance)
    assert not (tmp_path / "rows" / "arrays").exists()


def test_embed_normalises_after_cutting(model, files, expected, tmp_path):
    run_embed(model, files, tmp_path / "out", "--format", "parquet", "--normalize", "--grid", "2x8,6x16")
    table = Dataset.from_parquet(str(tmp_path / "out" / "embeddings.parquet"), cache_dir=str(tmp_path / "cache"))
    unit = expected.at(Granularity(2, 8), normalize=True)
    np.testing.assert_allclose(np.array(table["layer_2"][:]), unit, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "csv"], "--format csv is unknown; legal values: npy, datasets, parquet"),
        (["--dtype", "int8"], "--dtype int8 is unknown; legal values: float32, float16"),
        (["--normalize"], "--normalize needs --format datasets or parquet"),
        (["--normalize", "--format", "parquet"], "--normalize needs one dim a layer; the grid is 2,6x8,16"),
        (["--text_column", "body+text"], "lacks the column.* body; it has id, title, text"),
        (["--grid", "9x8"], "outside of it: 9x8"),
    ],
)
def test_embed_refuses_bad_options(model, files, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run_embed(model, files, tmp_path / "out", *options)
    with pytest.raises(ValueError, match="Name what to embed"):
        embed.main(["--model_name_or_path", model])
