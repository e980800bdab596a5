"""The command that embeds texts into files, alone and in several processes."""

import json
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
from accelerate import PartialState
from datasets import Dataset, load_from_disk

from m3bert.commands import embed
from m3bert.evaluation import GridEncoder
from m3bert.trainers import Granularity, Grid
from tests.conftest import assert_close, refused
from tests.trainers.tiny_run import start_two


ROOT = Path(__file__).resolve().parents[2]


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


def command_line(model, files, out, *options) -> list[str]:
    line = ["--model_name_or_path", model, "--files", files, "--output_dir", str(out), "--batch_size", "4"]
    return [*line, "--text_column", "title+text", "--grid", "2,6x8,16", *options]


def test_arrays_rows_and_tables_are_written(tiny_checkpoint, files, expected, tmp_path, capsys):
    embed.main(command_line(tiny_checkpoint, files, tmp_path / "npy"))
    assert "11 texts at 2,6x8,16" in capsys.readouterr().out
    for layer in (2, 6):
        array = np.load(tmp_path / "npy" / f"layer_{layer}.npy", mmap_mode="r")
        assert_close(array, expected.layers[layer])
    halves = ["--format", "datasets", "--dtype", "float16"]
    embed.main(command_line(tiny_checkpoint, files, tmp_path / "rows", *halves))
    embed.main(command_line(tiny_checkpoint, files, tmp_path / "table", "--format", "parquet"))
    rows = load_from_disk(str(tmp_path / "rows" / "dataset"))
    table = Dataset.from_parquet(str(tmp_path / "table" / "embeddings.parquet"), cache_dir=str(tmp_path / "cache"))
    for dataset, tolerance in ((rows, 2e-3), (table, 1e-6)):
        assert dataset.column_names == ["id", "title", "text", "layer_2", "layer_6"]
        assert dataset["id"][:] == list(range(11))
        np.testing.assert_allclose(np.array(dataset["layer_6"][:]), expected.layers[6], atol=tolerance)
    assert not (tmp_path / "rows" / "arrays").exists()


@pytest.mark.parametrize(
    ("kind", "method", "name"),
    [("parquet", "to_parquet", "embeddings.parquet"), ("datasets", "save_to_disk", "dataset")],
)
def test_half_a_file_does_not_replace_a_whole_one(tiny_checkpoint, files, tmp_path, monkeypatch, kind, method, name):
    line = command_line(tiny_checkpoint, files, tmp_path / "out", "--format", kind)
    embed.main(line)
    whole = tmp_path / "out" / name
    before = {file: file.read_bytes() for file in (whole, *whole.rglob("*")) if file.is_file()}
    write = getattr(Dataset, method)

    def half(dataset: Dataset, target: str) -> None:
        write(dataset.select([0]), target)
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Dataset, method, half)
        with pytest.raises(OSError, match="No space left"):
            embed.main(line)
    assert {file: file.read_bytes() for file in (whole, *whole.rglob("*")) if file.is_file()} == before
    embed.main(line)
    assert [file.name for file in (tmp_path / "out").iterdir()] == [name]


def test_mixed_precision_is_stored_in_float32(tiny_checkpoint, files, expected, tmp_path):
    embed.main(command_line(tiny_checkpoint, files, tmp_path, "--compute_dtype", "bfloat16", "--device", "cpu"))
    array = np.load(tmp_path / "layer_6.npy")
    assert array.dtype == np.float32 and not np.array_equal(array, expected.layers[6])
    np.testing.assert_allclose(array, expected.layers[6], atol=0.1)


def test_vectors_are_normalised_after_truncation(tiny_checkpoint, files, expected, tmp_path):
    options = ["--format", "parquet", "--normalize", "--grid", "2x8,6x16"]
    embed.main(command_line(tiny_checkpoint, files, tmp_path / "out", *options))
    table = Dataset.from_parquet(str(tmp_path / "out" / "embeddings.parquet"), cache_dir=str(tmp_path / "cache"))
    unit = expected.at(Granularity(2, 8), normalize=True)
    assert_close(np.array(table["layer_2"][:]), unit)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--normalize"], "--normalize needs --format datasets or --format parquet"),
        (["--normalize", "--format", "parquet"], "--normalize needs a grid with one dim per layer; this .* 2,6x8,16"),
    ],
)
def test_bad_options_are_refused(tiny_checkpoint, files, tmp_path, options, message):
    refused(message, embed.main, command_line(tiny_checkpoint, files, tmp_path / "out", *options))


def test_several_processes_fill_the_same_arrays(tiny_checkpoint, files, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    code = "import runpy; runpy.run_module('m3bert', run_name='__main__', alter_sys=True)"
    done = start_two(code, "embed", *command_line(tiny_checkpoint, files, tmp_path))
    assert ["11 texts at 2,6x8,16" in each.stdout for each in done] == [True, False], "the first process reports"
    for layer in (2, 6):
        assert_close(np.load(tmp_path / f"layer_{layer}.npy"), expected.layers[layer])


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_is_destroyed_at_the_end(tiny_checkpoint, files, tmp_path, monkeypatch, fails):
    """Also after an error, and however the command was called."""
    destroyed = []
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda self: destroyed.append(self.process_index))
    line = command_line(tiny_checkpoint, files, tmp_path / "out", *(["--grid", "9x8"] if fails else []))
    with pytest.raises(ValueError, match="9x8") if fails else nullcontext():
        embed.main(line)
    assert destroyed == [0]
