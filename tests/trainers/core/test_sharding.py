"""Sharded training: losses, gradients, weights and checkpoints are those of one process with whole parameters."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import DataCollatorForTokenClassification

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import quiet, tiny_config
from tests.trainers.core.test_distributed import OBJECTIVES, ROWS, triplets
from tests.trainers.tiny_run import masked_dataset, quiet_model, run_two
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    Grid,
    MultigranularMLM,
    NestedTrainer,
    NestedTrainingArguments,
)
from trainers.core.chunks import merged
from trainers.core.model import NestedModel
from trainers.core.sharding import check_sharding, full_tensor, transformer_layers


WORDS = 12


def batch_of(objective, rows: slice) -> dict[str, dict[str, torch.Tensor]]:
    """Some rows of a batch of three columns with texts of different lengths, and embeddings of a teacher."""
    generator = torch.Generator().manual_seed(9)
    width = getattr(objective, "teacher_dim", 6)
    columns = {}
    for name in ("anchor", "positive", "negative"):
        ids = torch.randint(5, 90, (ROWS, WORDS), generator=generator)
        lengths = torch.randint(2, WORDS + 1, (ROWS, 1), generator=generator)
        mask = (torch.arange(WORDS) < lengths).long()
        columns[name] = {
            "input_ids": torch.where(mask.bool(), ids, 1)[rows],
            "attention_mask": mask[rows],
            "text_ids": torch.arange(ROWS)[rows] % 13,
            "teacher": torch.randn(ROWS, width, generator=generator)[rows],
        }
    return columns


def nested_model(name: str) -> NestedModel:
    torch.manual_seed(1)
    changes = {"hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 12}
    changes |= {"embedding_dropout": 0.0, "attention_dropout": 0.0, "matryoshka_layers": [3], "matryoshka_dims": [8]}
    return NestedModel(M3BertModel(tiny_config(**changes)), OBJECTIVES[name]()).float()


def loss_and_gradients(model: NestedModel, name: str, rows: slice) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    loss = model.train()(**batch_of(model.objective, rows))["loss"]
    loss.backward()
    found = {"loss": loss.detach()}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            gradient = full_tensor(parameter.grad)
            if parameter.ndim == 0:  # whole on every rank: the Trainer averages these
                torch.distributed.is_initialized() and torch.distributed.all_reduce(gradient)
                gradient = gradient / (torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1)
            found[key] = gradient
    return found


QUICK = {"pairs", "contrastive", "temperature", "sia", "crd"}
KINDS = ("mlm", "pairs", "lora")
OF_TWO = """
from transformers import AutoTokenizer
from tests.trainers.core import test_sharding as here
from trainers.core.chunks import PassCost
from trainers.core.sharding import shard
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
chosen = [name for name in (*here.KINDS, *here.OBJECTIVES) if (name in here.QUICK) == QUICK]
for kind in here.KINDS:
    for resume in (None, 2) if kind in chosen else ():
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        here.train(kind, folder, tokenizer, sharded=True, resume=resume)
if not torch.distributed.is_initialized():
    torch.distributed.init_process_group("gloo")
PassCost.on = classmethod(lambda cls, device: cls(2, 40))  # each rank would make another number of passes
for name in here.OBJECTIVES:
    if name not in chosen:
        continue
    model = here.nested_model(name)
    torch.manual_seed(rank)
    if rank:  # what other ranks start with does not matter
        [torch.nn.init.normal_(parameter) for parameter in model.parameters()]
    shard(model, model.backbone)
    rows = slice(0, 9) if rank == 0 else slice(9, None)
    torch.save(here.loss_and_gradients(model, name, rows), folder / f"{name}-{rank}.pt")
"""


def train(kind: str, folder: Path, tokenizer, *, sharded: bool, resume: int | None = None, start: Path | None = None):
    """Train for four steps, or continue after `resume` of them, and save the weights, losses and gradient norms."""
    name = "sharded" if sharded else "whole"
    output = folder / f"{kind}-{name}"
    batch = (4 if kind == "mlm" else 8) // (2 if sharded else 1)
    values = {"max_steps": 4, "per_device_train_batch_size": batch, "logging_steps": 1, "learning_rate": 1e-3}
    values |= {"lr_scheduler_type": "linear", "save_strategy": "steps", "save_steps": 2, "fully_shard": sharded}
    values |= {
        "train_sampling_strategy": "sequential",
        "adam_epsilon": 1e-3,
        "ddp_backend": "gloo" if sharded else None,
    }
    values = quiet(output if resume is None else output / "again", **values)
    if kind == "mlm":
        trainer = NestedTrainer(
            model=quiet_model(num_hidden_layers=2, matryoshka_layers=[1, 2]),
            objective=MultigranularMLM(Grid.parse("1,2x8,32")),
            args=NestedTrainingArguments(**values, gradient_accumulation_steps=2),
            data_collator=DataCollatorForTokenClassification(tokenizer),
            train_dataset=masked_dataset(),
            processing_class=tokenizer,
            columns=("input_ids", "labels"),
        )
    else:
        model = quiet_model(num_hidden_layers=2, matryoshka_layers=[1, 2]).model
        if kind == "lora":
            model = get_peft_model(model, LoraConfig(target_modules=["q_proj", "v_proj"], r=2, lora_alpha=4))
            grid = {"grid": "1,2x8,32"}
        else:
            grid = {"projection_dim": 6, "learn_temperature": True}
        trainer = ContrastiveTrainer(model, ContrastiveConfig(**values, **grid), tokenizer, triplets())
    trainer.train(resume_from_checkpoint=None if resume is None else str((start or output) / f"checkpoint-{resume}"))
    label = f"{kind}-{name}" if resume is None else f"{kind}-{name}-again"
    trainer.save_model(str(folder / label / "saved"))
    if trainer.is_world_process_zero():
        history = [entry for entry in trainer.state.log_history if "loss" in entry]
        torch.save([(entry["loss"], entry["grad_norm"]) for entry in history], folder / f"{label}.pt")


def run_sharded(folder: Path, tokenizer, *, quick: bool) -> Path:
    """Train what is quick, or the rest, in two processes, and the same in one."""
    tokenizer.save_pretrained(folder / "tokenizer")
    run_two(folder, OF_TWO.replace("QUICK]", f"{quick}]"))
    for kind in KINDS:
        if (kind in QUICK) == quick:
            train(kind, folder, tokenizer, sharded=False)
            train(kind, folder, tokenizer, sharded=False, resume=2, start=folder / f"{kind}-sharded")
    return folder


@pytest.fixture(scope="module")
def quick_run(tmp_path_factory, tiny_tokenizer) -> Path:
    return run_sharded(tmp_path_factory.mktemp("sharded"), tiny_tokenizer, quick=True)


@pytest.fixture(scope="module")
def slow_run(tmp_path_factory, tiny_tokenizer) -> Path:
    return run_sharded(tmp_path_factory.mktemp("sharded"), tiny_tokenizer, quick=False)


def marked(names):
    """Parameters of a test: those that are not quick are slow tests."""
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", marked(OBJECTIVES))
def test_gradients_of_every_objective_are_those_of_one_process(request, name):
    folder = request.getfixturevalue("quick_run" if name in QUICK else "slow_run")
    expected = loss_and_gradients(nested_model(name), name, slice(None))
    first, second = (torch.load(folder / f"{name}-{rank}.pt") for rank in (0, 1))
    assert first.keys() == second.keys() == expected.keys()
    torch.testing.assert_close((first.pop("loss") + second["loss"]) / 2, expected.pop("loss"), atol=1e-4, rtol=1e-4)
    assert expected
    for key, value in expected.items():
        scale = max(1.0, value.abs().max().item())
        torch.testing.assert_close(first[key] / scale, value / scale, atol=1e-4, rtol=1e-4, msg=f"{name}: {key}")


def saved_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a saved model, its modules included."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return {f"{file.relative_to(folder)} {key}": value for file in files for key, value in load_file(file).items()}


@pytest.mark.parametrize("kind", marked(KINDS))
def test_a_sharded_run_ends_with_the_weights_of_one_process(request, kind):
    """With AdamW, clipping, a schedule and accumulation. The checkpoints are exchangeable: a run without sharding
    continues from that of a sharded run, and ends with the same weights."""
    folder = request.getfixturevalue("quick_run" if kind in QUICK else "slow_run")
    losses = torch.tensor(torch.load(folder / f"{kind}-whole.pt"))
    assert len(losses) == 4
    torch.testing.assert_close(torch.tensor(torch.load(folder / f"{kind}-sharded.pt")), losses, atol=1e-4, rtol=1e-4)
    expected = saved_tensors(folder / f"{kind}-whole" / "saved")
    for label in (f"{kind}-sharded", f"{kind}-sharded-again", f"{kind}-whole-again"):
        actual = saved_tensors(folder / label / "saved")
        assert actual.keys() == expected.keys(), label
        for key, value in expected.items():
            torch.testing.assert_close(actual[key], value, atol=1e-4, rtol=1e-4, msg=f"{label}: {key}")
    for label in (f"{kind}-sharded-again", f"{kind}-whole-again"):
        rest = torch.tensor(torch.load(folder / f"{label}.pt"))
        torch.testing.assert_close(rest[-2:], losses[2:], atol=1e-4, rtol=1e-4, msg=label)


def test_a_sharded_run_saves_the_files_of_one_process(quick_run):
    """They load at a cut size too."""
    sharded, whole = (quick_run / f"pairs-{name}" / "saved" for name in ("sharded", "whole"))
    names = [sorted(str(file.relative_to(folder)) for file in folder.rglob("*")) for folder in (sharded, whole)]
    assert names[0] == names[1]
    ours, theirs = (M3BertModel.from_pretrained(folder, num_hidden_layers=1).eval() for folder in (sharded, whole))
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(ours(ids).last_hidden_state, theirs(ids).last_hidden_state, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("count", [1, 2, 3, 9])
def test_merged_chunks_have_the_same_texts(count):
    chunks = [[4, 2], [0], [1, 3], [5, 6, 7, 8]]
    found = merged(chunks, count)
    assert len(found) == min(count, 4)
    assert sorted(text for chunk in found for text in chunk) == list(range(9))


def test_the_layers_of_a_model_are_found():
    model = M3BertForMaskedLM(tiny_config())
    assert transformer_layers(model) == list(model.model.layers)


@pytest.mark.parametrize(
    ("changes", "mini_batch_size", "message"),
    [
        ({"world_size": 1}, None, "fully_shard needs two processes or more"),
        ({}, 8, "fully_shard does not work with mini_batch_size: cached gradients"),
        ({"fsdp": True}, None, "fully_shard and fsdp exclude each other"),
        ({"deepspeed": "config.json"}, None, "fully_shard and deepspeed exclude"),
        ({"torch_compile": True}, None, "fully_shard and torch_compile exclude"),
        ({"auto_find_batch_size": True}, None, "fully_shard and auto_find_batch_size exclude"),
        ({"bf16_full_eval": True}, None, "fully_shard and bf16_full_eval exclude"),
        ({"fp16_full_eval": True}, None, "fully_shard and fp16_full_eval exclude"),
    ],
)
def test_what_excludes_sharding_is_named(changes, mini_batch_size, message):
    options = {"world_size": 2, "fsdp": None, "deepspeed": None, "auto_find_batch_size": False, "torch_compile": False}
    options |= {"fp16_full_eval": False, "bf16_full_eval": False}
    check_sharding(SimpleNamespace(**options), None)
    with pytest.raises(ValueError, match=message):
        check_sharding(SimpleNamespace(**options | changes), mini_batch_size)
    with pytest.raises(ValueError, match="which an optimizer that was made before does not train"):
        check_sharding(SimpleNamespace(**options), None, torch.optim.SGD([torch.zeros(1)]))


def test_one_process_is_not_sharded(tiny_tokenizer, tmp_path):
    args = ContrastiveConfig(
        **quiet(tmp_path, fully_shard=True, grid="2,6x8,32", max_steps=1, per_device_train_batch_size=8)
    )
    with pytest.raises(ValueError, match="start the run with torchrun or accelerate launch"):
        ContrastiveTrainer(quiet_model().model, args, tiny_tokenizer, triplets())
