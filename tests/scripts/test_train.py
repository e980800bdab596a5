"""The training command, end to end in its own process, and its errors."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import padded_batch, tiny_config


ROOT = Path(__file__).resolve().parents[2]
QUICK = ["--use_cpu", "--max_steps", "3", "--logging_steps", "1", "--report_to", "none", "--disable_tqdm", "true"]


def command(*arguments: object, module: str = "scripts.train") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


def logged(output_dir: Path) -> list[dict]:
    state = json.loads((output_dir / "checkpoint-3" / "trainer_state.json").read_text())
    return [entry for entry in state["log_history"] if "loss" in entry]


@pytest.fixture
def folder(tmp_path, tiny_tokenizer, sentences) -> Path:
    tiny_tokenizer.save_pretrained(tmp_path / "tokenizer")
    (tmp_path / "en.txt").write_text("\n".join(sentences[:32]))
    (tmp_path / "de.txt").write_text("\n".join(sentences[32:40]))
    pairs = [{"query": a, "answer": b} for a, b in zip(sentences[:24], sentences[24:], strict=True)]
    (tmp_path / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    return tmp_path


def test_masked_lm_of_a_new_model_in_two_languages(folder):
    config = {
        key: value for key, value in tiny_config().to_dict().items() if key in ("hidden_size", "intermediate_size")
    }
    config |= {"num_hidden_layers": 6, "num_attention_heads": 4, "max_position_embeddings": 48}
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        json.dumps(
            {"model_config": config, "warmup_steps": 1, "mlm_probability": 0.3, "grid": "9x9", "max_length": 32}
        )
    )
    done = command(
        "multigranular-mlm", "--config", recipe, "--tokenizer_name", folder / "tokenizer", "--grid", "2,6x8,32",
        "--train_files", folder / "en.txt", folder / "de.txt", "--language_exponent", "0.7",
        "--eval_files", folder / "de.txt", "--output_dir", folder / "out", *QUICK,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    logs = logged(folder / "out")
    assert len(logs) == 3
    assert {"mlm_2x8", "mlm_2x32", "mlm_6x8", "mlm_6x32"} <= set(logs[0])
    assert "eval_mlm_2x8" in json.loads((folder / "out" / "eval_results.json").read_text())
    loaded = M3BertForMaskedLM.from_pretrained(folder / "out", output_layer=2, output_dim=8)
    assert loaded.config.matryoshka_dims == [8, 32]


def test_contrastive_of_a_checkpoint_and_resuming(folder, tiny_model):
    tiny_model.save_pretrained(folder / "model")
    arguments = [
        "contrastive", "--model_name_or_path", folder / "model", "--tokenizer_name", folder / "tokenizer",
        "--train_files", folder / "pairs.jsonl", "--output_dir", folder / "out", "--save_steps", "1",
        "--per_device_train_batch_size", "8", *QUICK,
    ]  # fmt: skip
    done = command(*arguments)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "contrastive_4x16" in logged(folder / "out")[0]
    final = M3BertModel.from_pretrained(folder / "out").state_dict()
    done = command(*arguments, "--resume_from_checkpoint", folder / "out" / "checkpoint-2")
    assert done.returncode == 0, done.stderr[-3000:]
    for name, tensor in M3BertModel.from_pretrained(folder / "out").state_dict().items():
        assert tensor.allclose(final[name], atol=1e-6), name


@pytest.mark.parametrize("objective", ["contrastive", "espresso", "2dmse", "starbucks"])
def test_an_adapter_is_saved_alone_or_merged(folder, tiny_model, objective):
    from peft import PeftModel

    from scripts.train import main

    tiny_model.save_pretrained(folder / "model")
    grid = "2x8,6x32" if objective == "starbucks" else "2,6x8,32"
    arguments = [
        objective, "--model_name_or_path", folder / "model", "--tokenizer_name", folder / "tokenizer", "--grid", grid,
        "--train_files", folder / "pairs.jsonl", "--per_device_train_batch_size", "8", "--learning_rate", "0.1",
        "--peft", "lora", "--lora_r", "2", *QUICK,
    ]  # fmt: skip
    main([*map(str, arguments), "--output_dir", str(folder / "adapter")])
    assert (folder / "adapter" / "adapter_model.safetensors").is_file()
    assert not (folder / "adapter" / "model.safetensors").is_file()
    adapted = PeftModel.from_pretrained(M3BertModel.from_pretrained(folder / "model"), folder / "adapter").eval()
    evaluation = ["--eval_files", str(folder / "pairs.jsonl")]
    main([*map(str, arguments), "--output_dir", str(folder / "merged"), "--merge_adapter", *evaluation])
    assert "eval_loss" in json.loads((folder / "merged" / "eval_results.json").read_text())
    merged = M3BertModel.from_pretrained(folder / "merged").eval()
    inputs = padded_batch()
    states = [model(**inputs).last_hidden_state for model in (adapted, merged, tiny_model.eval())]
    torch.testing.assert_close(states[0], states[1], atol=1e-5, rtol=1e-4)
    assert not torch.allclose(states[1], states[2], atol=1e-3)
    assert merged.config.matryoshka_dims == [8, 32]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["nothing"], "Name an objective first: multigranular-mlm, matryoshka-distillation, contrastive"),
        (["contrastive", "--output_dir", "OUT"], "Training needs --train_files"),
        (["contrastive", "FILES", "missing.jsonl"], "missing.jsonl does not exist"),
        (["contrastive", "FILES", "en.txt"], "needs two text columns or more; found: text"),
        (["contrastive", "FILES", "empty.jsonl"], "The dataset is empty"),
        (["contrastive", "FILES", "nothing.jsonl.gz"], "The dataset is empty: nothing in"),
        (["contrastive", "FILES", "notes.pdf"], "notes.pdf is of an unknown kind; known: .txt, .jsonl"),
        (["contrastive", "FILES", "en.txt", "FOLDER/pairs.jsonl"], "Give files of one kind; got json, text"),
        (["contrastive", "FILES", "pairs.jsonl", "--grid", "2,9x8"], "outside of it: 9x8"),
        (["contrastive", "FILES", "pairs.jsonl", "--text_columns", "query", "reply"], "lacks the column(s) reply"),
        (["contrastive", "FILES", "pairs.jsonl", "--per_device_train_batch_size", "1"], "without negatives"),
        (["contrastive", "FILES", "pairs.jsonl", "--config", "FOLDER/bad.yaml"], "unknown options: temprature"),
        (["contrastive", "FILES", "pairs.jsonl", "--peft", "prefix"], "peft='prefix' is unknown; legal values: lora"),
        (["contrastive", "FILES", "pairs.jsonl", "--mini_batch_size", "0"], "mini_batch_size=0 must be 1 or more"),
        (["contrastive", "FILES", "pairs.jsonl", "--grid", "2,6x8,64"], "outside of it: 2x64, 6x64"),
        (["contrastive", "FILES", "pairs.jsonl", "--streaming"], "max_steps has to be specified"),
        (["contrastive", "FILES", "pairs.jsonl", "--clean_pairs", "--max_pairs_per_query", "0"], "must be 1 or more"),
        (["simcse", "FILES", "pairs.jsonl"], "takes one text column; found: query, answer"),
        (["simcse", "FILES", "en.txt", "--clean_pairs"], "--clean_pairs cleans pairs, and this objective trains on"),
        (["multigranular-mlm", "FILES", "en.txt", "--streaming"], "--streaming is for the contrastive objectives"),
        (["contrastive", "FILES", "pairs.jsonl", "--max_pairs_per_query", "2"], "needs --clean_pairs"),
        (["contrastive", "FILES", "pairs.jsonl", "--merge_adapter"], "needs an adapter: pass --peft lora"),
        (["espresso", "FILES", "pairs.jsonl", "--grid", "2,4x8,16"], "needs the full size 6x32"),
        (["2dmse", "FILES", "pairs.jsonl", "--grid", "6x8,32"], "2DMSE needs layers x dims"),
        (["starbucks", "FILES", "pairs.jsonl", "--grid", "2,6x8,32"], "grow in layer and dim together"),
        (["starbucks", "FILES", "pairs.jsonl", "--per_device_train_batch_size", "1"], "without negatives"),
        (["multigranular-mlm", "FILES", "pairs.jsonl"], "lacks the column(s) text; it has query, answer"),
        (["multigranular-mlm", "FILES", "empty.txt"], "The dataset is empty"),
        (["contrastive", "FILES", "broken.jsonl"], "Cannot read .*broken.jsonl: "),
    ],
)
def test_what_is_wrong_is_said_in_one_line(folder, tiny_model, change, message, monkeypatch):
    from scripts.train import main

    tiny_model.save_pretrained(folder / "model")
    for name in ("empty.jsonl", "empty.txt", "notes.pdf"):
        (folder / name).write_text("")
    (folder / "nothing.jsonl.gz").write_bytes(gzip.compress(b""))
    (folder / "broken.jsonl").write_text('{"query": "a", "ans')
    (folder / "bad.yaml").write_text("temprature: 0.1")
    arguments = []
    for word in change:
        if word == "FILES":
            arguments += ["--model_name_or_path", "FOLDER/model", "--tokenizer_name", "FOLDER/tokenizer"]
            arguments += ["--output_dir", "OUT", "--use_cpu", "--train_files"]
        else:
            arguments.append(f"FOLDER/{word}" if arguments[-1:] == ["--train_files"] else word)
    arguments = [word.replace("FOLDER", str(folder)).replace("OUT", str(folder / "out")) for word in arguments]
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")) as caught:
        main(arguments)
    assert "\n" not in str(caught.value)


def test_the_command_prints_an_error_and_no_traceback():
    done = command("nothing")
    assert done.returncode == 1
    objectives = (
        "multigranular-mlm, matryoshka-distillation, contrastive, simcse, espresso, 2dmse, starbucks, mipic, mic"
    )
    assert (
        done.stderr.strip().splitlines()[-1] == f"error: Name an objective first: {objectives}, ibkd, ibkd-finetuning."
    )


def test_convert_writes_an_elastic_checkpoint(minilm, tmp_path, run_bare):
    done = command(minilm, tmp_path / "model", module="scripts.convert")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "6 layers, width 384" in done.stdout
    printed = run_bare(
        """
        from transformers import AutoModel, AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained("model", trust_remote_code=True)
        model = AutoModel.from_pretrained("model", trust_remote_code=True, output_layer=4, output_dim=64)
        print(tuple(model(**tokenizer("a short text", return_tensors="pt")).last_hidden_state.shape))
        """
    )
    assert "(1, 5, 64)" in printed


def test_convert_says_why_it_cannot(tmp_path):
    import transformers

    config = transformers.ModernBertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
        pad_token_id=0, cls_token_id=0, sep_token_id=0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    transformers.ModernBertModel(config).save_pretrained(tmp_path / "source")
    from tests.conftest import tiny_tokenizer

    tiny_tokenizer.__wrapped__().save_pretrained(tmp_path / "source")
    done = command(tmp_path / "source", tmp_path / "out", module="scripts.convert")
    assert done.returncode == 1
    assert "ModernBertConfig cannot be converted exactly: it alternates local and global attention" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_source_that_is_not_there_is_said_in_one_line(tmp_path):
    done = command(tmp_path / "nowhere", tmp_path / "out", module="scripts.convert")
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert "nowhere" in done.stderr
    assert "Traceback" not in done.stderr
