"""Sharded training: losses, gradients, weights and checkpoints are those of one process with whole parameters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import BertConfig, BertModel, DataCollatorForTokenClassification

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import WORDS, quiet, tiny_config
from tests.trainers.core.parallel.test_ranks import OBJECTIVES, ROWS, triplets
from tests.trainers.tiny_run import ROOT, assert_same_weights, masked_dataset, mlm_trainer, quiet_model, run_two
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    Grid,
    MultigranularMLM,
    NestedTrainer,
    NestedTrainingArguments,
    QAMAConfig,
    QAMATrainer,
)
from trainers.core.encoding.batch import PassCost, merged
from trainers.core.model import NestedModel
from trainers.core.parallel.fsdp import check_checkpoint, check_fsdp, precision_policy
from trainers.core.parallel.ranks import rank, wait_for_all_ranks, world_size
from trainers.hub.quantizer import find_quantizer


TOKENS = 12
MLM = "masked lm"
QUICK = (MLM, "contrastive", "temperature")


def nested_model(name: str) -> NestedModel:
    torch.manual_seed(1)
    changes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
    changes |= {"embedding_dropout": 0.0, "attention_dropout": 0.0, "matryoshka_layers": [3], "matryoshka_dims": [8]}
    config = tiny_config(**changes)
    if name == MLM:
        return NestedModel(M3BertForMaskedLM(config), MultigranularMLM(Grid.parse("2,3x4,8"))).float()
    return NestedModel(M3BertModel(config), OBJECTIVES[name]()).float()


def shard(model: NestedModel, **options: object) -> None:
    """Shard a model as accelerate does, with the policy that the model declares."""
    for module in model.modules():
        if type(module).__name__ in model._no_split_modules:
            fully_shard(module, **options)
    fully_shard(model, **options)


def batch_of(name: str, rows: slice) -> dict[str, object]:
    """Some rows of a batch of three columns with texts of different lengths, and embeddings of a teacher, or of one
    column with labels."""
    generator = torch.Generator().manual_seed(9)
    width = getattr(OBJECTIVES[name](), "teacher_dim", 6) if name != MLM else 1
    columns = {}
    for column in ("anchor", "positive", "negative"):
        ids = torch.randint(5, 90, (ROWS, TOKENS), generator=generator)
        lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(TOKENS) < lengths).long()
        columns[column] = {
            "input_ids": torch.where(mask.bool(), ids, 1)[rows],
            "attention_mask": mask[rows],
            "text_ids": torch.arange(ROWS)[rows] % 13,
            "teacher": torch.randn(ROWS, width, generator=generator)[rows],
        }
    if name != MLM:
        return columns
    text = columns["anchor"]
    labels = torch.where(text["attention_mask"].bool(), text["input_ids"], -100)
    # The Trainer passes the number of labels of all ranks, and multiplies the loss by the number of ranks.
    return {"input_ids": text["input_ids"], "attention_mask": text["attention_mask"], "labels": labels}


def loss_and_gradients(model: NestedModel, name: str, rows: slice, half: bool = False) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    inputs = batch_of(name, rows)
    if name == MLM:
        inputs["num_items_in_batch"] = batch_of(name, slice(None))["labels"].ne(-100).sum() / world_size()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = model.train()(**inputs)["loss"]
    loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach()} | {
        key: gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        for key, gradient in gradients.items()
    }


def gradients_of_rank(folder: Path, names: tuple[str, ...]) -> None:
    """Losses and gradients of sharded models, in float32 and with the precision of `--bf16`."""
    PassCost.on = classmethod(lambda cls, device: cls(2, 40))  # each rank would make another number of passes
    rows = slice(0, 9) if rank() == 0 else slice(9, None)
    for name in names:
        model = nested_model(name)
        shard(model)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        torch.save(loss_and_gradients(model, name, rows), folder / f"{name}-{rank()}.pt")
        model = nested_model(name)
        shard(model, mp_policy=precision_policy("bf16"))
        torch.save(loss_and_gradients(model, name, rows, half=True), folder / f"{name}-half-{rank()}.pt")


def train(kind: str, folder: Path, tokenizer, *, sharded: bool, resume: int | None = None) -> NestedTrainer:
    """Train for four steps, or continue after two of them, and save the weights, losses and gradient norms."""
    label = f"{kind}-{'sharded' if sharded else 'whole'}"
    output = folder / label
    values = {"max_steps": 4, "per_device_train_batch_size": (4 if kind == "mlm" else 8) // (2 if sharded else 1)}
    values |= {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2, "learning_rate": 1e-3}
    values |= {"train_sampling_strategy": "sequential", "adam_epsilon": 1e-3, "logging_steps": 1}
    values |= {"fsdp": True, "ddp_backend": "gloo"} if sharded else {}
    values = quiet(output if resume is None else output / "again", **values)
    if kind == "mlm":
        trainer = NestedTrainer(
            model=quiet_model(num_hidden_layers=2, matryoshka_layers=[1, 2]),
            objective=MultigranularMLM(Grid.parse("1,2x8,32")),
            args=NestedTrainingArguments(
                **values, gradient_accumulation_steps=2, activation_checkpointing=sharded or None
            ),
            data_collator=DataCollatorForTokenClassification(tokenizer),
            train_dataset=masked_dataset(),
            processing_class=tokenizer,
            columns=("input_ids", "labels"),
        )
    else:
        model = quiet_model(num_hidden_layers=2, matryoshka_layers=[1, 2]).model
        options = {"projection_dim": 6, "learn_temperature": True}
        if kind == "lora":
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=4))
            options = {"grid": "1,2x8,32"}
        trainer = ContrastiveTrainer(model, ContrastiveConfig(**values, **options), tokenizer, triplets())
    trainer.train(resume_from_checkpoint=None if resume is None else str(output / f"checkpoint-{resume}"))
    label += "" if resume is None else "-again"
    trainer.save_model(str(folder / label / "saved"))
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        (folder / f"{label}.json").write_text(json.dumps([(entry["loss"], entry["grad_norm"]) for entry in history]))
    return trainer


def best_run(folder: Path, tokenizer, **changes: object) -> None:
    """A run whose loss gets worse, and which ends with its best checkpoint, of a model with a projection and a learned
    temperature."""
    values = {"learning_rate": 0.5, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_steps": 1}
    values |= {"eval_strategy": "steps", "load_best_model_at_end": True, "projection_dim": 6}
    values |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learn_temperature": True}
    args = ContrastiveConfig(**quiet(folder, **values, **changes))
    trainer = ContrastiveTrainer(quiet_model().model, args, tokenizer, triplets(), triplets())
    trainer.train()
    trainer.save_model()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert min(losses) < losses[-1], "the run must get worse for this test to say anything"
    assert trainer.evaluate()["eval_loss"] == pytest.approx(min(losses), rel=1e-4)
    best = Path(trainer.state.best_model_checkpoint)
    for file in ("model.safetensors", "2_Dense/model.safetensors"):
        saved = load_file(folder / file)
        assert all(torch.equal(tensor, saved[name]) for name, tensor in load_file(best / file).items())


def quantizing(folder: Path, tokenizer, **changes: object) -> QAMATrainer:
    """A quantizer that is trained with its encoder, whose embeddings after training calibrate it."""
    if rank() == 0:
        quiet_model().model.save_pretrained(folder / "teacher")
        tokenizer.save_pretrained(folder / "teacher")
    wait_for_all_ranks()
    texts = [f"{one} {other}" for one in WORDS[:6] for other in WORDS[6:14]]
    options = {"grid": "6x8,32", "frozen": False, "max_steps": 2, "max_length": 48, "text_columns": ["text"]}
    options |= {"teacher_name_or_path": str(folder / "teacher"), "teacher_cache_dir": str(folder / "cache")}
    options |= {"dataloader_drop_last": True, "train_sampling_strategy": "sequential", "optim": "sgd"}
    # A batch of one process has more texts than a batch of two: the rank loss must read all of them.
    options |= {"learning_rate": 0.1, "rank_texts": len(texts), **changes}
    torch.manual_seed(2)  # the start of the quantizer
    model = M3BertModel.from_pretrained(folder / "teacher")
    trainer = QAMATrainer(model, QAMAConfig(**quiet(folder, **options)), tokenizer, Dataset.from_dict({"text": texts}))
    trainer.train()
    trainer.save_model()
    return trainer


def train_rank(folder: Path) -> None:
    """Everything that one of two processes trains, and the rest of the gradients."""
    from tests.conftest import tiny_tokenizer

    tokenizer, sharded = tiny_tokenizer.__wrapped__(), {"fsdp": True, "ddp_backend": "gloo"}
    for kind in ("pairs", "mlm", "lora"):
        for resume in (None, 2):
            trainer = train(kind, folder, tokenizer, sharded=True, resume=resume)
            assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
    quantizing(folder / "qama", tokenizer, per_device_train_batch_size=8, **sharded)
    best_run(folder / "best", tokenizer, **sharded)
    gradients_of_rank(folder, tuple(name for name in OBJECTIVES if name not in QUICK))


GRADIENTS = """
from tests.trainers.core.parallel.test_fsdp import QUICK, gradients_of_rank
torch.distributed.init_process_group("gloo")
gradients_of_rank(Path(sys.argv[1]), QUICK)
"""
TRAINING = """
import tests.trainers.fsdp_on_cpu
from tests.trainers.core.parallel.test_fsdp import train_rank
train_rank(Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("quick")
    run_two(folder, GRADIENTS)
    return folder


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("slow")
    run_two(folder, TRAINING, timeout=1200)
    return folder


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in OBJECTIVES if name not in QUICK)]
)
def test_loss_and_gradients_are_those_of_one_process(request, name):
    folder = request.getfixturevalue("quick_run" if name in QUICK else "slow_run")
    expected = loss_and_gradients(nested_model(name), name, slice(None))
    for precision, tolerance in (("", 1e-4), ("-half", 0.2)):
        first, second = (torch.load(folder / f"{name}{precision}-{rank}.pt") for rank in (0, 1))
        assert first.keys() == second.keys() == expected.keys()
        found = first | {"loss": (first["loss"] + second["loss"]) / 2}
        for key, value in expected.items():
            assert found[key].dtype == torch.float32
            scale = max(1.0, value.abs().max().item())
            torch.testing.assert_close(
                found[key] / scale,
                value / scale,
                atol=tolerance,
                rtol=tolerance,
                msg=lambda text, k=key: f"{k}: {text}",
            )


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model, its modules included."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return {f"{file.relative_to(folder)} {key}": value for file in files for key, value in load_file(file).items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mlm", "pairs", "lora"])
def test_a_run_and_its_continuation_end_with_the_model_of_one_process(slow_run, tiny_tokenizer, tmp_path, name):
    """With AdamW, clipping, a schedule, and, for the masked LM, accumulation and activation checkpointing."""
    folder = slow_run
    whole = train(name, tmp_path, tiny_tokenizer, sharded=False)
    expected, losses = saved_tensors(tmp_path / f"{name}-whole" / "saved"), tmp_path / f"{name}-whole.json"
    losses = torch.tensor(json.loads(losses.read_text()))
    assert len(losses) == 4
    for label in (f"{name}-sharded", f"{name}-sharded-again"):
        found = torch.tensor(json.loads((folder / f"{label}.json").read_text()))
        torch.testing.assert_close(found, losses, atol=1e-4, rtol=1e-4)
        actual = saved_tensors(folder / label / "saved")
        assert actual.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, atol=1e-4, rtol=1e-4, msg=f"{label}: {key}")
    saved, of_one = folder / f"{name}-sharded" / "saved", tmp_path / f"{name}-whole" / "saved"
    files = [sorted(str(file.relative_to(root)) for file in root.rglob("*")) for root in (saved, of_one)]
    assert files[0] == files[1]
    if name != "lora":
        loaded = type(whole.backbone).from_pretrained(saved)
        assert_same_weights(loaded, whole.backbone, atol=1e-4)
        cut = M3BertModel.from_pretrained(saved, output_layer=1, output_dim=8).eval()
        assert cut(torch.tensor([[5, 6, 7]])).last_hidden_state.shape == (1, 3, 8)


@pytest.mark.slow
def test_no_state_of_a_checkpoint_is_unpickled(slow_run):
    for file in ("pytorch_model_fsdp.bin", "optimizer.bin", "scheduler.pt"):
        assert torch.load(slow_run / "pairs-sharded" / "checkpoint-2" / file, weights_only=True)


def test_a_checkpoint_is_resumed_as_it_was_trained(tmp_path):
    """What one way writes, the other would read only in part."""
    with pytest.raises(ValueError, match="was written without fsdp and cannot be resumed with it"):
        check_checkpoint(str(tmp_path), True)
    check_checkpoint(str(tmp_path), False)
    (tmp_path / "pytorch_model_fsdp.bin").touch()
    with pytest.raises(ValueError, match="was written with fsdp and cannot be resumed without it"):
        check_checkpoint(str(tmp_path), False)


@pytest.mark.slow
def test_a_quantizer_that_is_trained_in_shards_is_that_of_one_process(slow_run, tiny_tokenizer, tmp_path):
    trainer = quantizing(tmp_path, tiny_tokenizer, per_device_train_batch_size=16)
    assert_same_weights(find_quantizer(str(slow_run / "qama")), trainer.quantizer, atol=1e-4)
    trained, start = (M3BertModel.from_pretrained(slow_run / "qama" / name) for name in ("", "teacher"))
    assert_same_weights(trained, trainer.backbone, atol=1e-4)
    assert not torch.allclose(trained.layers[0].mlp.down_proj.weight, start.layers[0].mlp.down_proj.weight, atol=1e-4)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_merged_chunks_have_the_same_texts(count):
    chunks = [[4, 2], [0], [1, 3], [5, 6, 7, 8]]
    found = merged(chunks, count)
    assert len(found) == min(count, 4)
    assert sorted(text for chunk in found for text in chunk) == list(range(9))


def test_layers_are_wrapped_and_embeddings_are_not():
    """A step looks embeddings up outside of their module."""
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    bert = BertModel(BertConfig(vocab_size=20, **sizes))
    objective = OBJECTIVES["contrastive"]()
    assert "BertEmbeddings" in bert._no_split_modules
    assert NestedModel(bert, objective)._no_split_modules == ["BertLayer"]
    adapted = get_peft_model(M3BertForMaskedLM(tiny_config()), LoraConfig(target_modules=["q_proj"]))
    assert NestedModel(adapted, objective)._no_split_modules == ["M3BertLayer"]


def test_every_parameter_has_dims():
    """FSDP refuses parameters without dims."""
    assert all(parameter.ndim for make in OBJECTIVES.values() for parameter in make().parameters())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mini_batch_size": 8}, "fsdp and mini_batch_size exclude each other: cached gradients"),
        ({"torch_compile": True}, "fsdp and torch_compile exclude"),
        ({"auto_find_batch_size": True}, "fsdp and auto_find_batch_size exclude"),
        ({"bf16_full_eval": True}, "fsdp and bf16_full_eval exclude"),
        ({"fp16_full_eval": True}, "fsdp and fp16_full_eval exclude"),
        ({"fsdp_version": 1}, "only FSDP2 is supported"),
        ({"state_dict_type": SimpleNamespace(name="SHARDED_STATE_DICT")}, "use FULL_STATE_DICT"),
    ],
)
def test_what_excludes_sharding_is_named(changes, message):
    options = dict.fromkeys(("torch_compile", "auto_find_batch_size", "fp16_full_eval", "bf16_full_eval"), False)
    options |= {"fsdp_version": 2, "state_dict_type": SimpleNamespace(name="FULL_STATE_DICT"), "mini_batch_size": None}
    as_passed = SimpleNamespace(**options)
    check_fsdp(as_passed, as_passed, None)
    changed = SimpleNamespace(**options | changes)
    with pytest.raises(ValueError, match=message):
        check_fsdp(changed, changed, changed.mini_batch_size)


@pytest.mark.parametrize("value", [True, "true", "full_shard"])
def test_a_cpu_is_not_sharded(tmp_path, value):
    with pytest.raises(ValueError, match="fsdp needs GPUs: on a CPU, accelerate trains the whole model"):
        NestedTrainingArguments(**quiet(tmp_path, fsdp=value))
    assert not NestedTrainingArguments(**quiet(tmp_path, fsdp="false")).fsdp


ON_TWO_GPUS = """
import sys
from tests.conftest import tiny_tokenizer
from tests.trainers.tiny_run import mlm_trainer
trainer = mlm_trainer(tiny_tokenizer.__wrapped__(), sys.argv[1], fsdp=True, use_cpu=False, OPTIONS)
trainer.train()
trainer.save_model()
"""
STEPS = {"max_steps": 2, "optim": "sgd", "train_sampling_strategy": "sequential"}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two processes")
@pytest.mark.parametrize("bf16", [False, True])
def test_two_gpus_are_one_process(tiny_tokenizer, tmp_path, bf16):
    """As accelerate shards GPUs."""
    script = tmp_path / "on_two_gpus.py"
    options = {**STEPS, "per_device_train_batch_size": 4, "bf16": bf16}
    script.write_text(ON_TWO_GPUS.replace("OPTIONS", f"**{options}"))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command.append(str(tmp_path / "two"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    trainer = mlm_trainer(tiny_tokenizer, tmp_path / "one", per_device_train_batch_size=8, **STEPS)
    trainer.train()
    loaded = M3BertForMaskedLM.from_pretrained(tmp_path / "two")
    assert_same_weights(loaded, trainer.backbone, atol=1e-2 if bf16 else 1e-4)
