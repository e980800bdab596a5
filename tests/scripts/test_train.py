"""The training command, end to end: methods, data, recipes over recipes, and checkpoints."""

import json
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch
from peft import PeftModel

from m3bert.commands import train
from m3bert.commands.training_data import DataArguments, masked_lm_data
from m3bert.encode.quantizer import find_quantizer
from m3bert.hub_cards.training_record import TrainingRecord
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.trainers import IBKDConfig, IBKDTrainer
from tests.conftest import padded_batch, refused, tiny_config
from tests.evaluation_data import serve_datasets


MLM_TERMS = {"mlm_2x8", "mlm_2x32", "mlm_6x8", "mlm_6x32"}


def run(*arguments: object) -> None:
    train.main([str(argument) for argument in arguments])


def logged(output_dir: Path) -> list[dict]:
    (checkpoint,) = output_dir.glob("checkpoint-3")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


def model_config() -> dict[str, int]:
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings")
    return {name: getattr(tiny_config(), name) for name in names}


def test_masked_lm_of_a_new_model_in_two_languages(text_files, quick_options):
    recipe = text_files / "recipe.yaml"
    values = {"warmup_steps": 1, "mlm_probability": 0.3, "grid": "9x9", "max_length": 32}
    recipe.write_text(json.dumps({"model_config": model_config(), **values}))
    run(
        "multigranular-mlm", "--config", recipe, "--tokenizer_name", text_files / "tokenizer", "--grid", "2,6x8,32",
        "--train_files", text_files / "en.txt", text_files / "de.txt", "--language_exponent", "0.7", "--eval_files",
        text_files / "de.txt", "--output_dir", text_files / "out", *quick_options(),
    )  # fmt: skip
    logs = logged(text_files / "out")
    assert len(logs) == 3
    assert set(logs[0]) >= MLM_TERMS
    assert "eval_mlm_2x8" in json.loads((text_files / "out" / "eval_results.json").read_text())
    loaded = M3BertForMaskedLM.from_pretrained(text_files / "out", output_layer=2, output_dim=8)
    assert loaded.config.matryoshka_dims == [8, 32]


def test_contrastive_of_a_checkpoint_and_resuming(text_files, tiny_checkpoint, quick_options):
    arguments = [
        "contrastive", "--model_name_or_path", tiny_checkpoint, "--train_files", text_files / "pairs.jsonl",
        "--output_dir", text_files / "out", "--per_device_train_batch_size", 8, *quick_options(save_steps=1),
    ]  # fmt: skip
    run(*arguments)
    assert "contrastive_4x16" in logged(text_files / "out")[0]
    assert TrainingRecord.find(text_files / "out").files == ["pairs.jsonl"]
    final = M3BertModel.from_pretrained(text_files / "out").state_dict()
    run(*arguments, "--resume_from_checkpoint", text_files / "out" / "checkpoint-2")
    for name, tensor in M3BertModel.from_pretrained(text_files / "out").state_dict().items():
        assert tensor.allclose(final[name], atol=1e-6), name


def test_files_with_names_are_several_data_sets(text_files, tiny_checkpoint, quick_options, capsys):
    lines = (text_files / "pairs.jsonl").read_text().splitlines()
    (text_files / "first.jsonl").write_text("\n".join(lines[:10]))
    (text_files / "second.jsonl").write_text("\n".join([*lines[10:], lines[0]]))
    rows = [f"{row} open,{row} read,{row} list" for row in "abcdefgh"]
    (text_files / "triplets.csv").write_text("\n".join(["anchor,positive,negative", *rows]))
    files = [f"pairs={text_files}/first.jsonl", f"triplets={text_files}/triplets.csv"]
    run(
        "contrastive", "--model_name_or_path", tiny_checkpoint, "--train_files", *files,
        f"pairs={text_files}/second.jsonl", "--eval_files", *files, "--output_dir", text_files / "out",
        "--clean_pairs", "--per_device_train_batch_size", 8, "--batch_sampler", "no_duplicates",
        "--multi_dataset_batch_sampler", "round_robin", *quick_options(),
    )  # fmt: skip
    said = capsys.readouterr().out
    assert "pairs: Kept 24 of 25 pairs" in said and "triplets: Kept 8 of 8" in said
    record = TrainingRecord.find(text_files / "out")
    assert record.sets == {"pairs": 24, "triplets": 8}
    assert record.files == ["first.jsonl", "second.jsonl", "triplets.csv"]
    assert {"batch_sampler", "multi_dataset_batch_sampler"} <= record.settings.keys()
    evaluated = json.loads((text_files / "out" / "eval_results.json").read_text())
    assert {"eval_pairs_loss", "eval_triplets_loss"} <= evaluated.keys()


def test_an_adapter_is_saved_alone_or_merged(text_files, tiny_model, tiny_checkpoint, quick_options):
    arguments = [
        "contrastive", "--model_name_or_path", tiny_checkpoint, "--grid", "2,6x8,32",
        "--train_files", text_files / "pairs.jsonl", "--per_device_train_batch_size", 8, "--learning_rate", 0.1,
        "--peft", "lora", "--lora_r", 2, *quick_options(),
    ]  # fmt: skip
    run(*arguments, "--output_dir", text_files / "adapter")
    assert (text_files / "adapter" / "adapter_model.safetensors").is_file()
    assert not (text_files / "adapter" / "model.safetensors").is_file()
    adapted = PeftModel.from_pretrained(M3BertModel.from_pretrained(tiny_checkpoint), text_files / "adapter").eval()
    evaluation = ["--eval_files", text_files / "pairs.jsonl"]
    run(*arguments, "--output_dir", text_files / "merged", "--merge_adapter", *evaluation)
    assert "eval_loss" in json.loads((text_files / "merged" / "eval_results.json").read_text())
    merged = M3BertModel.from_pretrained(text_files / "merged").eval()
    inputs = padded_batch()
    states = [model(**inputs).last_hidden_state for model in (adapted, merged, tiny_model.eval())]
    torch.testing.assert_close(states[0], states[1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(states[1], states[2], atol=1e-3)
    assert merged.config.matryoshka_dims == [8, 32]


@pytest.mark.parametrize("frozen", [True, False])
def test_a_quantizer(text_files, tiny_checkpoint, quick_options, frozen):
    """Of an encoder that stays as it is, or is trained with it; resumed, it is the same."""
    pytest.importorskip("sentence_transformers")
    arguments = [
        "qama", "--model_name_or_path", tiny_checkpoint, "--train_files", text_files / "en.txt", "--grid", "6x8,32",
        "--output_dir", text_files / "out", "--teacher_cache_dir", text_files / "teachers", "--frozen", frozen,
        "--max_length", 48, "--per_device_train_batch_size", 8, "--codes", "qama-1.5", "--quantizer_config",
        "{skip: none, intermediate_size: 40}", "--quantized_gradient", "--weights", "{rank: 0.5}",
        *quick_options(save_steps=1),
    ]  # fmt: skip
    run(*arguments)
    assert {"qama_sim_6x8", "qama_rank_6x32@qama-1.5"} <= set(logged(text_files / "out")[0])
    assert frozen == (not (text_files / "out" / "training.json").exists())
    first = find_quantizer(str(text_files / "out"))
    assert (first.config.skip, first.config.intermediate_size, first.config.dims) == ("none", 40, [8, 32])
    before, after = (M3BertModel.from_pretrained(folder) for folder in (tiny_checkpoint, text_files / "out"))
    assert torch.equal(before.embed_tokens.weight, after.embed_tokens.weight) == frozen
    run(*arguments, "--resume_from_checkpoint", text_files / "out" / "checkpoint-2")
    assert find_quantizer(str(text_files / "out")).fingerprint == first.fingerprint


def test_a_config_of_ones_own_may_extend_a_method(tmp_path):
    file = tmp_path / "student.py"
    file.write_text("from m3bert import IBKDConfig\nclass StudentConfig(IBKDConfig): ...\nclass Other: ...\n")
    config, trainer = train.method_of(f"{file}:StudentConfig")
    assert issubclass(config, IBKDConfig) and trainer is IBKDTrainer
    refused("student.py defines no Typo", train.method_of, f"{file}:Typo")
    refused("Other in .* must derive from EmbeddingConfig", train.method_of, f"{file}:Other")


def options_of(method: str, *arguments: object) -> tuple:
    return train.parse(train.method_of(method)[0], [str(argument) for argument in arguments])


def test_a_later_recipe_wins_and_the_command_line_wins_over_all(tmp_path):
    (tmp_path / "first.yaml").write_text("temperature: 0.1\nmax_length: 64\npic: {pooling: mean, temperature: 0.2}\n")
    (tmp_path / "second.yaml").write_text("temperature: 0.3\npic: {temperature: 0.4}\nsia: {layers: [2, 4]}\n")
    files = ["--config", tmp_path / "first.yaml", "--config", tmp_path / "second.yaml"]
    *_, args = options_of("mixture", *files, "--output_dir", tmp_path)
    assert (args.temperature, args.max_length) == (0.3, 64)
    assert args.pic == {"pooling": "mean", "temperature": 0.4} and args.sia == {"layers": [2, 4]}
    more = ["--temperature", 0.5, "--pic", "{detach_target: true, temperature: 0.6}", "--scr", "{threshold: 0.2}"]
    *_, args = options_of("mixture", *files, "--output_dir", tmp_path, *more)
    assert args.temperature == 0.5 and args.scr == {"threshold": 0.2} and args.sia == {"layers": [2, 4]}
    assert args.pic == {"pooling": "mean", "temperature": 0.6, "detach_target": True}


def test_streamed_pairs_are_cleaned_before_training(text_files, tiny_checkpoint, quick_options, capsys):
    file = text_files / "pairs.jsonl"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, lines[0]]))
    options = ["--model_name_or_path", tiny_checkpoint, "--per_device_train_batch_size", 8, *quick_options()]
    options += ["--output_dir", text_files / "out", "--train_files", file, "--streaming"]
    run("contrastive", *options, "--clean_pairs", "--max_pairs_per_query", 3)
    assert f"Kept {len(lines)} of {len(lines) + 1} pairs; dropped 1 duplicates and 0 " in capsys.readouterr().out


def test_the_data_set_that_is_asked_for_is_trained_on(text_files, tiny_checkpoint, quick_options, monkeypatch):
    asked = []
    rows = [json.loads(line) for line in (text_files / "pairs.jsonl").read_text().splitlines()]

    def load_dataset(name, config, **options):
        asked.append((name, config, options))
        dataset = datasets.Dataset.from_list(rows)
        return dataset.to_iterable_dataset() if options["streaming"] else dataset

    serve_datasets(monkeypatch, load_dataset)
    options = ["--model_name_or_path", tiny_checkpoint, "--per_device_train_batch_size", 8, *quick_options()]
    options += ["--output_dir", text_files / "out", "--dataset_name", "user/data", "--dataset_config", "small"]
    run("contrastive", *options, "--split", "train[:90%]", "--eval_split", "dev", "--streaming")
    assert asked == [
        ("user/data", "small", {"split": "train[:90%]", "streaming": True}),
        ("user/data", "small", {"split": "dev", "streaming": False}),
    ]
    assert json.loads((text_files / "out" / "training.json").read_text())["datasets"] == ["user/data"]
    message = r"^user/data lacks the column\(s\) reply; it has query, answer\.$"
    refused(message, run, "contrastive", *options, "--overwrite", "--text_columns", "query", "reply")


def test_the_checkpoint_to_resume_from(tmp_path):
    """The last complete one in the order of steps; `auto` starts anew without one."""

    def found(named: str | None) -> str | None:
        return train.resumed_checkpoint(SimpleNamespace(resume_from_checkpoint=named, output_dir=str(tmp_path)))

    assert found(None) is found("false") is found("auto") is None
    assert found("elsewhere/checkpoint-7") == "elsewhere/checkpoint-7"
    refused("has no complete checkpoint to resume from", found, "true")
    for step in (9, 100, 20):
        (tmp_path / f"checkpoint-{step}").mkdir()
        (tmp_path / f"checkpoint-{step}" / "trainer_state.json").write_text("{}")
    (tmp_path / "checkpoint-200").mkdir()  # being written
    assert found("true") == found("auto") == str(tmp_path / "checkpoint-100")


def test_named_files_are_for_pairs(text_files):
    data = DataArguments(train_files=[f"english={text_files / 'en.txt'}"])
    refused("NAME=FILE is for pairs", masked_lm_data, data, None, None, evaluation=False)
