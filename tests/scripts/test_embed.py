"""The command that embeds texts into files, alone and in several processes."""

from __future__ import annotations

import json
import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from accelerate import PartialState
from datasets import Dataset, load_from_disk

from scripts import embed
from tests import warm_processes
from tests.trainers.tiny_run import start_two
from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder, bulk


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
        np.testing.assert_array_equal(array, expected.layers[layer])
    halves = ["--format", "datasets", "--dtype", "float16"]
    embed.main(command_line(tiny_checkpoint, files, tmp_path / "rows", *halves))
    embed.main(command_line(tiny_checkpoint, files, tmp_path / "table", "--format", "parquet"))
    rows = load_from_disk(str(tmp_path / "rows" / "dataset"))
    table = Dataset.from_parquet(str(tmp_path / "table" / "embeddings.parquet"), cache_dir=str(tmp_path / "cache"))
    for dataset, tolerance in ((rows, 2e-3), (table, 0)):
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
    np.testing.assert_allclose(np.array(table["layer_2"][:]), unit, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--format", "csv"], "--format csv is unknown; legal values: npy, datasets, parquet"),
        (["--dtype", "int8"], "--dtype int8 is unknown; legal values: float32, float16"),
        (["--normalize"], "--normalize needs --format datasets or --format parquet"),
        (["--normalize", "--format", "parquet"], "--normalize needs a grid with one dim per layer; this .* 2,6x8,16"),
        (["--text_column", "body+text"], "lacks the column.* body; it has id, title, text"),
        (["--grid", "9x8"], "outside of it: 9x8"),
        (["--device", "cuda:99"], "device='cuda:99' is not on this machine; legal values: "),
        (["--compute_dtype", "int8"], "compute_dtype='int8' is unknown; legal values: float32, bfloat16, float16"),
        (["--attn_implementation", "quick"], "attn_implementation='quick' is unknown; legal values: eager, sdpa"),
    ],
)
def test_bad_options_are_refused(tiny_checkpoint, files, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        embed.main(command_line(tiny_checkpoint, files, tmp_path / "out", *options))


def test_something_has_to_be_named(tiny_checkpoint):
    with pytest.raises(ValueError, match="Nothing to embed: pass --files FILE"):
        embed.main(["--model_name_or_path", tiny_checkpoint])


@pytest.mark.parametrize("module", [["scripts.embed"], ["m3bert", "embed"]], ids="-".join)
def test_several_processes_fill_the_same_arrays(tiny_checkpoint, files, expected, tmp_path, monkeypatch, module):
    """Called as a module of the checkout, and through the command line."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "1")
    name, *words = module
    code = f"import runpy; runpy.run_module({name!r}, run_name='__main__', alter_sys=True)"
    done = start_two(code, *words, *command_line(tiny_checkpoint, files, tmp_path))
    assert ["11 texts at 2,6x8,16" in each.stdout for each in done] == [True, False], "the first process reports"
    for layer in (2, 6):
        np.testing.assert_allclose(np.load(tmp_path / f"layer_{layer}.npy"), expected.layers[layer], atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_the_process_group_is_destroyed_at_the_end(tiny_checkpoint, files, tmp_path, monkeypatch, fails):
    """Also after an error, and however the command was called."""
    destroyed = []
    monkeypatch.setattr(PartialState, "destroy_process_group", lambda self: destroyed.append(self.process_index))
    line = command_line(tiny_checkpoint, files, tmp_path / "out", *(["--grid", "9x8"] if fails else []))
    with pytest.raises(ValueError, match="9x8") if fails else nullcontext():
        embed.main(line)
    assert destroyed == [0]


def test_shards_together_are_one_run(tiny_checkpoint, tmp_path, sentences, expected, capsys):
    """Each input file becomes an output file with the same rows; a second start makes none again."""
    names = []
    for part in range(5):
        rows = [{"id": row, "title": "open", "text": sentences[row]} for row in range(11) if row % 5 == part]
        names.append(str(tmp_path / f"part-{part}.jsonl"))
        Path(names[-1]).write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "parts"
    line = command_line(tiny_checkpoint, names[0], out, "--format", "parquet")
    line[line.index(names[0]) : line.index(names[0]) + 1] = names
    for share in range(4):
        embed.main([*line, "--shard", f"{share}/4"])
    capsys.readouterr()
    tables = [Dataset.from_parquet(str(file), cache_dir=str(tmp_path / "cache")) for file in sorted(out.iterdir())]
    assert [table["id"][:] for table in tables] == [[row for row in range(11) if row % 5 == part] for part in range(5)]
    for table in tables:
        rows = table["id"][:]
        np.testing.assert_allclose(np.array(table["layer_6"][:]), expected.layers[6][rows], atol=1e-5)
    times = [file.stat().st_mtime_ns for file in sorted(out.iterdir())]
    embed.main([*line, "--shard", "0/1"])
    assert capsys.readouterr().out.count("is there already") == 5
    assert [file.stat().st_mtime_ns for file in sorted(out.iterdir())] == times
    with pytest.raises(ValueError, match="was made with another grid"):
        embed.main([*line, "--shard", "0/1", "--grid", "6x8"])


def parts_line(model, folder: Path, files: list[str], out: Path, *options: str) -> list[str]:
    """The command line that embeds parts in a folder."""
    inputs = [str(folder / file) for file in files]
    line = ["--model_name_or_path", model, "--files", *inputs, "--output_dir", str(out)]
    return [*line, "--grid", "2,6x8,16", "--batch_size", "4", *options]


KILLED = """
import os, signal, sys
import torch
from scripts import embed
from trainers.evaluation import bulk
call, calls = bulk.GridEmbedder.__call__, []

def killed(self, batch):
    calls.append(batch)
    if len(calls) == 5:  # parts have three batches of rows, so this is in the middle of the second one
        os.kill(os.getpid(), signal.SIGKILL)
    return call(self, batch)

torch.set_num_threads(int(sys.argv[1]))
bulk.ROWS_AT_ONCE, bulk.GridEmbedder.__call__ = 4, killed
embed.main(sys.argv[2:])
"""


@pytest.mark.slow
def test_a_killed_share_goes_on(tiny_checkpoint, tmp_path, sentences, monkeypatch, capsys):
    """A complete part is not written again, half a part is, and what the dead process left goes."""
    names = [f"part.{part}.jsonl" for part in range(3)]
    for part, name in enumerate(names):
        rows = [{"id": f"{part}-{row}", "text": sentences[10 * part + row]} for row in range(10)]
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(bulk, "ROWS_AT_ONCE", 4)
    embed.main(parts_line(tiny_checkpoint, tmp_path, names, tmp_path / "whole", "--shard", "0/1"))
    out = tmp_path / "killed"
    line = parts_line(tiny_checkpoint, tmp_path, names, out, "--shard", "0/1")
    options = {"path": [str(ROOT)], "arguments": [str(torch.get_num_threads()), *line]}
    (done,) = warm_processes.server().run(KILLED, ROOT, [dict(os.environ)], **options)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    first, left = sorted(out.iterdir())
    assert first.name == "part.0.parquet" and re.fullmatch(r"part\.1\.parquet\.[0-9a-f]{8}\.unfinished", left.name)
    other = out / "part.1.parquet.part.1.parquet.01234567.unfinished"  # of a part with another name
    other.touch()
    before = first.stat().st_mtime_ns
    capsys.readouterr()
    embed.main(line)
    assert capsys.readouterr().out.count("is there already") == 1
    assert first.stat().st_mtime_ns == before
    files = [f"part.{part}.parquet" for part in range(3)]
    assert sorted(file.name for file in out.iterdir()) == sorted([*files, other.name])
    for file in files:
        assert (out / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def test_shards_have_the_type_that_was_asked_for(tiny_checkpoint, files, expected, tmp_path):
    halves = ["--format", "parquet", "--shard", "0/1", "--dtype", "float16", "--id_column", "id"]
    embed.main(command_line(tiny_checkpoint, files, tmp_path / "out", *halves))
    column = pq.read_table(tmp_path / "out" / "corpus.parquet")["layer_6"]
    assert column.type == pa.list_(pa.float16(), 16)
    found = column.combine_chunks().flatten().to_numpy().reshape(-1, 16)
    np.testing.assert_allclose(found, expected.layers[6], atol=2e-3)


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ({"a.jsonl": '{"text": "open"}\n'}, ["--shard", "1/2"], "shard='1/2' has no file: of 1 files"),
        ({"a.csv": "id,text\n"}, [], "a.csv has no rows"),
        (
            {"a.jsonl": '{"text": "open"}\n'},
            ["--id_column", "id"],
            r"a.jsonl: .* lacks the column\(s\) id; it has text",
        ),
        (
            {"a.jsonl": '{"id": 1, "text": "open"}\n{"id": null, "text": "open"}\n'},
            ["--id_column", "id"],
            "a.jsonl, line 2: the row has no id in the column id",
        ),
        ({"a.jsonl": '{"body": "open"}\n'}, [], r"a.jsonl: .* lacks the column\(s\) text; it has body"),
        (
            {"a.jsonl": '{"text": "open"}\n', "b/a.jsonl": '{"text": "open"}\n'},
            [],
            "two would have the name a.parquet: .*a.jsonl and .*b/a.jsonl",
        ),
        ({"a.jsonl": '{"text": "open"}\n'}, ["--format", "npy"], "--shard needs --format parquet"),
        ({"a.jsonl": '{"layer_6": 1, "text": "open"}\n'}, [], "have a column layer_6 already"),
    ],
    ids=["share", "file", "rows", "column", "id", "text", "names", "format", "taken"],
)
def test_bad_parts_are_refused(tiny_checkpoint, tmp_path, content, options, message):
    """In one line, and without a file."""
    for name, text in content.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    line = parts_line(tiny_checkpoint, tmp_path, list(content), tmp_path / "out", "--shard", "0/1", *options)
    with pytest.raises(ValueError, match=message) as error:
        embed.main(line)
    assert "\n" not in str(error.value).strip()
    assert not list((tmp_path / "out").glob("*"))


def test_inputs_that_changed_or_would_be_replaced_are_refused(tiny_checkpoint, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "open"}\n')
    embed.main(parts_line(tiny_checkpoint, tmp_path, ["a.jsonl"], tmp_path / "out", "--shard", "0/1"))
    (tmp_path / "a.jsonl").write_text('{"text": "read"}\n')
    with pytest.raises(ValueError, match="a.parquet was made with another input: remove it, or choose another folder"):
        embed.main(parts_line(tiny_checkpoint, tmp_path, ["a.jsonl"], tmp_path / "out", "--shard", "0/1"))
    (tmp_path / "out" / "a.parquet").write_text("text")
    with pytest.raises(ValueError, match="a.parquet is not a Parquet file: remove it"):
        embed.main(parts_line(tiny_checkpoint, tmp_path, ["a.jsonl"], tmp_path / "out", "--shard", "0/1"))
    pq.write_table(pa.table({"text": ["open"]}), tmp_path / "in.parquet")
    with pytest.raises(ValueError, match="would replace its input .*in.parquet: choose another --output_dir"):
        embed.main(parts_line(tiny_checkpoint, tmp_path, ["in.parquet"], tmp_path, "--shard", "0/1"))
    with pytest.raises(ValueError, match="--id_column needs --shard"):
        embed.main(parts_line(tiny_checkpoint, tmp_path, ["in.parquet"], tmp_path, "--id_column", "id"))
