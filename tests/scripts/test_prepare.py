"""The command that prepares text, and training on what it wrote."""

import json
from pathlib import Path

import pytest

from m3bert.commands import prepare, train
from m3bert.modeling import M3BertForMaskedLM
from tests.scripts.test_train import MLM_TERMS, logged, model_config


@pytest.fixture
def languages(text_files) -> Path:
    """A folder with one folder of text per language."""
    for language in ("en", "de"):
        (text_files / "data" / language).mkdir(parents=True)
        (text_files / f"{language}.txt").rename(text_files / "data" / language / "a.txt")
    with (text_files / "data" / "de" / "a.txt").open("a") as file:
        file.write("\n\n")
    return text_files


def run_prepare(folder: Path, *options: object) -> None:
    arguments = ["--tokenizer_name", folder / "tokenizer", "--output_dir", folder / "prepared", *options]
    prepare.main([str(argument) for argument in arguments])


def test_text_is_prepared_and_trained_on(languages, quick_options, capsys):
    run_prepare(languages, "--files", languages / "data", "--max_length", 24)
    printed = capsys.readouterr().out
    assert "| language | documents | tokens | rows | full % | tokens % | drawn % | passes |" in printed
    assert [line.split(" | ")[0] for line in printed.splitlines()[2:4]] == ["| de", "| en"]
    assert printed.endswith("1 documents without text are left out.\n")
    saved = json.loads((languages / "prepared" / "prepared.json").read_text())
    tokens = {language: entry["tokens"] for language, entry in saved["languages"].items()}
    assert f"| de | 8 | {tokens['de']} |" in printed and f"| en | 32 | {tokens['en']} |" in printed

    (languages / "eval.txt").write_text((languages / "data" / "de" / "a.txt").read_text().strip())
    arguments = [
        "multigranular-mlm", "--output_dir", languages / "out", "--prepared_data", languages / "prepared",
        "--tokenizer_name", languages / "tokenizer",
        "--model_config", json.dumps(model_config()), "--grid", "2,6x8,32",
        "--eval_files", languages / "eval.txt", "--warmup_steps", 1, "--language_exponent", 0.5,
        *quick_options(mlm_probability=0.3),
    ]  # fmt: skip
    train.main([str(argument) for argument in arguments])
    logs = logged(languages / "out")
    assert len(logs) == 3 and set(logs[0]) >= MLM_TERMS
    assert "eval_mlm_2x8" in json.loads((languages / "out" / "eval_results.json").read_text())
    assert json.loads((languages / "out" / "training_args.json").read_text())["max_length"] == 24
    files = {Path(name).name for name, _ in saved["settings"]["files"]}
    assert files and set(json.loads((languages / "out" / "training.json").read_text())["files"]) == files
    assert M3BertForMaskedLM.from_pretrained(languages / "out").config.matryoshka_dims == [8, 32]


def test_a_shuffled_column_of_languages_and_two_processes(text_files, sentences, capsys):
    rows = [{"lang": ("en", "de")[number % 2], "text": text} for number, text in enumerate(sentences)]
    (text_files / "all.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["--files", text_files / "all.jsonl", "--language_column", "lang"]
    run_prepare(text_files, *options, "--num_proc", 2)
    assert "| de | 24 |" in capsys.readouterr().out
