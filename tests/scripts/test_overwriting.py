"""Commands that write a folder: what it holds is refused or replaced, and an interrupted evaluation resumes."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from m3bert.commands import convert, evaluate, export, fit, join, train, trim
from m3bert.commands.command import EXPORT_FILES, MODEL_FILES, check_overwriting
from m3bert.evaluation import GridEncoder, GridResults
from m3bert.utils.durable import remove_files
from tests.conftest import refused
from tests.evaluation_data import write_data


@pytest.mark.parametrize(
    ("main", "arguments", "name"),
    [
        (train.main, ["contrastive", "--train_files", "pairs.jsonl", "--output_dir"], "checkpoint-5"),
        (convert.main, ["model"], "config.json"),
        (fit.main, ["--files", "texts.txt", "--", "model"], "config.json"),
        (trim.main, ["--files", "texts.txt", "--", "model"], "config.json"),
        (join.main, ["--vectors", "rows.jsonl", "--", "model"], "config.json"),
        (export.main, ["--output_dir"], "onnx"),
        (export.main, ["--format", "static", "--model_name_or_path", "model", "--output_dir"], "modules.json"),
        (evaluate.main, ["--tasks", "stsb", "--output_dir"], "results.json"),
    ],
)
def test_a_folder_that_holds_a_result_is_refused(main, arguments, name, tmp_path):
    out = tmp_path / "out"
    (out / name).mkdir(parents=True)
    refused(f"out holds {name}: pass --overwrite to replace it, or ", main, [*arguments, str(out)])
    assert [file.name for file in out.iterdir()] == [name]


def test_only_the_files_of_a_command_are_removed(tmp_path):
    for name in ("config.json", "model-00001-of-00002.safetensors", "notes.txt", "README.md"):
        (tmp_path / name).touch()
    for name in ("1_Pooling", "onnx", "data"):
        (tmp_path / name).mkdir()
    check_overwriting(tmp_path, ["results.json"], overwrite=False)
    refused("is the source", check_overwriting, tmp_path, MODEL_FILES, overwrite=True, source=str(tmp_path))
    remove_files(tmp_path, EXPORT_FILES)
    assert {file.name for file in tmp_path.iterdir()} == {"notes.txt", "README.md", "data"}


def test_training_replaces_a_model_or_continues_it(text_files, tiny_checkpoint, tmp_path, quick_options):
    out = tmp_path / "out"
    line = ["contrastive", "--model_name_or_path", tiny_checkpoint, "--train_files", str(text_files / "pairs.jsonl")]
    line += ["--output_dir", str(out), "--grid", "6x8,32", "--save_strategy", "steps", "--save_steps", "1"]
    line += ["--lr_scheduler_type", "constant", "--per_device_train_batch_size", "8"]

    def trained(steps, *more):
        train.main([*line, *quick_options(max_steps=steps), *more])
        return load_file(out / "model.safetensors")["embed_tokens.weight"].clone()

    weights = trained(1)
    assert not torch.equal(trained(2, "--resume_from_checkpoint", "auto"), weights)
    (out / "notes.txt").touch()
    assert torch.equal(trained(1, "--overwrite"), weights)
    assert not (out / "checkpoint-2").exists() and (out / "notes.txt").exists()


def test_an_interrupted_evaluation_resumes(tiny_checkpoint, tmp_path, sentences, monkeypatch):
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path / "data"))
    write_data(tmp_path / "data", sentences)
    own = tmp_path / "own.csv"
    rows = [f"{sentences[row]},{sentences[row + 8]},{row}\n" for row in range(8)]
    own.write_text("sentence1,sentence2,score\n" + "".join(rows))
    line = ["--model_name_or_path", tiny_checkpoint, "--grid", "2x8", "--tasks", "stsb", "cranfield", "--no_latency"]
    line += ["--pairs", str(own), "--output_dir"]
    evaluate.main([*line, str(tmp_path / "whole")])

    encoded: list[str] = []
    encode = GridEncoder.encode

    def stopping(after: int):
        def stopped(self, *arguments, description=None, **options):
            if len(set(encoded)) == after and description not in encoded:
                raise KeyboardInterrupt
            encoded.append(description)
            return encode(self, *arguments, description=description, **options)

        monkeypatch.setattr(GridEncoder, "encode", stopped)

    out = tmp_path / "out"
    stopping(after=2)
    with pytest.raises(KeyboardInterrupt):
        evaluate.main([*line, str(out)])
    assert set(encoded) == {"stsb", "cranfield"}
    (unfinished,) = out.iterdir()
    assert GridResults.load(unfinished).tasks() == ["stsb", "cranfield"]

    encoded.clear()
    stopping(after=9)
    evaluate.main([*line, str(out)])
    assert set(encoded) == {"own"}
    assert not list(out.glob("unfinished-*"))
    results, whole = (GridResults.load(Path(folder, "results.json")) for folder in (out, tmp_path / "whole"))
    assert results.scores == whole.scores and results.two_stage_searches == whole.two_stage_searches
