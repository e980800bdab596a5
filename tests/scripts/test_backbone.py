"""The recipes of distillation: the papers' values, and runs of a small model with a real teacher."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from scripts.train import OBJECTIVES, main, parse
from tests.scripts.test_recipes import LOCALLY, RECIPES, folder  # noqa: F401  (a fixture)


# Table 1 of IBKD (2311.05472): learning rate, batch size, epochs, tau; section 4.3: gamma and the two beta.
PAPER = {
    "ibkd_sts": (1e-4, 256, 10, 0.1, 1.0),
    "ibkd_sts_finetuning": (3e-5, 256, 3, 0.05, 0.5),
    "ibkd_retrieval": (1e-4, 128, 3, 0.1, 1.0),
    "ibkd_retrieval_finetuning": (1e-5, 128, 3, 0.05, 0.5),
}
OVERLAYS = {
    "ablations/ibkd_ckd": {"method": "ckd"},
    "ablations/ibkd_mse": {"method": "mse"},
    "ablations/ibkd_crd": {"method": "crd"},
    "ablations/ibkd_hpd": {"method": "hpd", "projection_dim": 128},
    "ablations/ibkd_linear_kernel": {"hsic_kernel": "linear"},
    "ablations/ibkd_imq_kernel": {"hsic_kernel": "imq"},
    "studied/ibkd_normalised": {"hsic_normalize": True, "beta": 100.0},
}
RECIPE_NAMES = {*PAPER, "m3bert_matryoshka_distillation"}


def args_of(tmp_path, *recipes: str) -> Any:
    objective = "ibkd-finetuning" if recipes[0].endswith("finetuning") else "ibkd"
    arguments = [argument for recipe in recipes for argument in ("--config", str(RECIPES / f"{recipe}.yaml"))]
    arguments += ["--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false", "--train_files", "x.txt"]
    return parse(OBJECTIVES[objective][0], arguments)[1]


@pytest.mark.parametrize("recipe", list(PAPER))
def test_recipes_of_ibkd_are_the_papers(tmp_path, recipe):
    args = args_of(tmp_path, recipe)
    found = (args.learning_rate, args.per_device_train_batch_size, args.num_train_epochs, args.temperature, args.beta)
    assert found == PAPER[recipe]
    assert (args.hsic_kernel, args.hsic_gamma, args.hsic_input_layer) == ("rbf", 0.5, 0)
    assert not args.hsic_normalize


@pytest.mark.parametrize("overlay", list(OVERLAYS))
def test_overlays_change_what_they_say(tmp_path, overlay):
    before, after = args_of(tmp_path, "ibkd_sts"), args_of(tmp_path, "ibkd_sts", overlay)
    changed = {name for name, value in after.to_dict().items() if before.to_dict()[name] != value}
    assert changed - {"logging_dir"} == OVERLAYS[overlay].keys()
    assert {name: getattr(after, name) for name in OVERLAYS[overlay]} == OVERLAYS[overlay]


def run(*arguments: object) -> None:
    main([str(argument) for argument in arguments])


def log_of(output) -> list[dict[str, float]]:
    (checkpoint,) = output.glob("checkpoint-*")
    return json.loads((checkpoint / "trainer_state.json").read_text())["log_history"]


def test_both_stages_train_a_cut_of_the_teacher(folder, minilm):  # noqa: F811
    pytest.importorskip("sentence_transformers")
    sentences = (folder / "sentences.txt").read_text().splitlines()[:64]
    (folder / "few.txt").write_text("\n".join(sentences))
    first, second = folder / "first", folder / "second"
    run(
        "ibkd", "--config", RECIPES / "ibkd_sts.yaml", "--teacher_name_or_path", minilm, "--student_layers", 2,
        "--teacher_cache_dir", folder / "teachers", "--train_files", folder / "few.txt", "--output_dir", first,
        *LOCALLY, "--teacher_pooling", "mean", "--max_steps", 3, "--logging_steps", 1,
    )  # fmt: skip
    assert {"infonce_2x384", "hsic_2x384"} <= log_of(first)[0].keys()
    student = M3BertModel.from_pretrained(first)
    assert (len(student.layers), student.config.hidden_size) == (2, 384)
    (folder / "negatives.jsonl").write_text(
        "".join(
            json.dumps({"anchor": a, "positive": p, "negative": n}) + "\n"
            for a, p, n in zip(sentences[:21], sentences[21:42], sentences[42:63], strict=True)
        )
    )
    run(
        "ibkd-finetuning", "--config", RECIPES / "ibkd_sts_finetuning.yaml", "--model_name_or_path", first,
        "--train_files", folder / "negatives.jsonl", "--output_dir", second, "--projection_dim", 16, *LOCALLY,
        "--max_steps", 2, "--logging_steps", 1,
    )  # fmt: skip
    assert {"contrastive_2x16", "hsic_2x16"} <= log_of(second)[0].keys()
    from sentence_transformers import SentenceTransformer

    assert SentenceTransformer(str(second), trust_remote_code=True).encode(["a text"]).shape == (1, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--student_layers", "9"], "student_layers=9 must be within 1..6"),
        ([], "Name a model|needs --tokenizer_name"),
    ],
)
def test_a_student_that_cannot_be(folder, minilm, options, message):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        run(
            "ibkd", "--teacher_name_or_path", minilm, "--train_files", folder / "sentences.txt", "--output_dir",
            folder / "out", "--use_cpu", *options,
        )  # fmt: skip


def test_a_cut_needs_a_model_that_is_not_new(folder):  # noqa: F811
    with pytest.raises(ValueError, match="--student_layers cuts a model: pass --model_name_or_path"):
        run(
            "contrastive", "--tokenizer_name", folder / "model", "--student_layers", 2, "--train_files",
            folder / "rows.jsonl", "--output_dir", folder / "out", "--use_cpu",
        )  # fmt: skip
    model = M3BertModel.from_pretrained(folder / "model")
    M3BertForMaskedLM(model.config).save_pretrained(folder / "mlm")
    run(
        "contrastive", "--model_name_or_path", folder / "model", "--student_layers", 2, "--grid", "1,2x8",
        "--text_columns", "query", "positive", "--train_files", folder / "rows.jsonl", "--output_dir", folder / "cut",
        *LOCALLY, "--max_steps", 1,
    )  # fmt: skip
    assert len(M3BertModel.from_pretrained(folder / "cut").layers) == 2


def test_matryoshka_distillation_goes_on_from_a_trained_model(folder):  # noqa: F811
    encoder = M3BertModel.from_pretrained(folder / "model")
    model = M3BertForMaskedLM(encoder.config)
    with torch.no_grad():  # in place of pretraining: it knows which words there are
        model.get_output_embeddings().weight.mul_(0.01)
        words = AutoTokenizer.from_pretrained(folder / "model")((folder / "sentences.txt").read_text())["input_ids"]
        model.get_output_embeddings().bias.fill_(-8)
        model.get_output_embeddings().bias[torch.tensor(words)] = 0
    model.save_pretrained(folder / "pretrained")
    arguments = [
        "matryoshka-distillation", "--config", RECIPES / "m3bert_matryoshka_distillation.yaml", "--model_name_or_path",
        folder / "pretrained", "--tokenizer_name", folder / "model", "--train_files", folder / "sentences.txt",
        "--output_dir", folder / "out", *LOCALLY, "--grid", "2,6x8,32", "--pairs", "6x32>2x8", "--max_steps", 2,
        "--logging_steps", 1,
    ]  # fmt: skip
    run(*arguments)
    assert "mlm_kl_6x32>2x8" in log_of(folder / "out")[0]
    new = [value for value in arguments if value not in ("--model_name_or_path", folder / "pretrained")]
    config = '{"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 6, "num_attention_heads": 4}'
    with pytest.raises(ValueError, match="Distillation from an untrained teacher is unstable"):
        run(*new, "--model_config", config)


def test_the_papers_pairs_are_the_recipe(tmp_path):
    path = RECIPES / "m3bert_matryoshka_distillation.yaml"
    arguments = ["--config", str(path), "--output_dir", str(tmp_path), "--use_cpu", "--bf16", "false"]
    _, args = parse(OBJECTIVES["matryoshka-distillation"][0], [*arguments, "--train_files", "x.txt"])
    assert (args.pairs, args.distillation_weight, args.distillation_temperature) == ("12x768>4x64", 1.0, 1.0)
    assert (args.distillation_direction, args.max_steps, args.mlm_probability) == ("reverse", 50_000, 0.15)
    assert args.grid == "4,8,12 x 32,64,128,768"
