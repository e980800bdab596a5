"""What sharded runs load and calibrate after training, with activation checkpointing, and accelerate's own FSDP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import WORDS, quiet
from tests.trainers.core.test_distributed import triplets
from tests.trainers.tiny_run import GRID, ROOT, WithProjector, assert_same_weights, mlm_trainer, quiet_model, run_two
from trainers import ContrastiveConfig, ContrastiveTrainer, NestedTrainer, QAMAConfig, QAMATrainer
from trainers.hub.quantizer import find_quantizer


SHARDED = {"ddp_backend": "gloo", "fully_shard": True}
# A learning rate at which the loss gets worse, so that the best checkpoint is not the last one.
BEST = {"learning_rate": 0.5, "max_steps": 2, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps"}
BEST |= {"eval_steps": 1, "load_best_model_at_end": True}
KINDS = ("objective", "projection", "adapter")


def best_run(kind: str, folder: Path, tokenizer, **changes) -> NestedTrainer:
    """A run that ends with its best checkpoint: of an objective with parameters, with a projection and a learned
    temperature, or of an adapter."""
    changes = {**BEST, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 3, **changes}
    if kind == "objective":
        torch.manual_seed(2)
        return mlm_trainer(tokenizer, folder, objective=WithProjector(GRID), **changes)
    if kind == "adapter":
        model = get_peft_model(quiet_model(), LoraConfig(target_modules=["q_proj", "v_proj"], r=2))
        return mlm_trainer(tokenizer, folder, model=model, **changes)
    changes |= {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4}
    args = ContrastiveConfig(**quiet(folder, **changes, projection_dim=6, learn_temperature=True))
    return ContrastiveTrainer(quiet_model().model, args, tokenizer, triplets(), triplets())


def quantizing(folder: Path, tokenizer, **changes) -> QAMATrainer:
    """A quantizer that is trained with its encoder, whose embeddings after training calibrate it."""
    texts = [f"{one} {other}" for one in WORDS[:6] for other in WORDS[6:14]]
    options = {"grid": "6x8,32", "frozen": False, "max_steps": 2, "max_length": 48, "text_columns": ["text"]}
    options |= {"teacher_name_or_path": str(folder / "teacher"), "teacher_cache_dir": str(folder / "cache")}
    options |= {"dataloader_drop_last": True, "train_sampling_strategy": "sequential", "optim": "sgd"}
    # A batch of one process has more texts than a batch of two: the rank loss must read all of them.
    options |= {"learning_rate": 0.1, "rank_texts": len(texts)}
    torch.manual_seed(2)  # the start of the quantizer
    args = QAMAConfig(**quiet(folder, **options, **changes))
    return QAMATrainer(
        M3BertModel.from_pretrained(folder / "teacher"), args, tokenizer, Dataset.from_dict({"text": texts})
    )


def masked_run(folder: Path, tokenizer, processes: int, **changes) -> NestedTrainer:
    """Two steps of a masked language model, evaluated before where `fully_shard` has yet to divide it."""
    trainer = mlm_trainer(
        tokenizer,
        folder,
        per_device_train_batch_size=8 // processes,
        per_device_eval_batch_size=6 // processes,
        max_steps=2,
        optim="sgd",
        train_sampling_strategy="sequential",
        **changes,
    )
    if trainer.args.fully_shard:
        trainer.evaluate()
    trainer.train()
    trainer.save_model()
    return trainer


TRAIN_TWO = """
from tests.conftest import tiny_tokenizer
from tests.trainers.core.test_sharding_checkpoints import KINDS, SHARDED, best_run, masked_run, quantizing
folder, tokenizer = Path(sys.argv[1]), tiny_tokenizer.__wrapped__()
for kind in KINDS:
    trainer = best_run(kind, folder / kind, tokenizer, **SHARDED)
    trainer.train()
    trainer.save_model()
    history = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    found = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        best = Path(trainer.state.best_model_checkpoint).name
        (folder / f"{kind}.json").write_text(json.dumps([history, found, best]))
masked_run(folder / "checkpointing", tokenizer, 2, gradient_checkpointing=True, **SHARDED)
trainer = quantizing(folder / "qama", tokenizer, per_device_train_batch_size=8, **SHARDED)
trainer.train()
trainer.save_model()
"""


def make_teacher(folder: Path, tokenizer) -> None:
    quiet_model().model.save_pretrained(folder / "teacher")
    tokenizer.save_pretrained(folder / "teacher")


@pytest.fixture(scope="module")
def of_two(tmp_path_factory, tiny_tokenizer) -> Path:
    folder = tmp_path_factory.mktemp("two")
    make_teacher(folder / "qama", tiny_tokenizer)
    run_two(folder, "import json\n" + TRAIN_TWO)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_the_best_checkpoint_comes_back_into_the_shards(of_two, kind):
    losses, found, best = json.loads((of_two / f"{kind}.json").read_text())
    assert min(losses) < losses[-1], "the run must get worse for this test to say anything"
    assert found == pytest.approx(min(losses), rel=1e-4)
    files = [file for file in (of_two / kind / best).rglob("*.safetensors") if file.name != "objective.safetensors"]
    assert files
    for file in files:
        saved = load_file(of_two / kind / file.relative_to(of_two / kind / best))
        assert all(torch.equal(tensor, saved[name]) for name, tensor in load_file(file).items())


def test_activation_checkpointing_of_shards_equals_one_process_without(of_two, tiny_tokenizer, tmp_path):
    trainer = masked_run(tmp_path, tiny_tokenizer, 1)
    loaded = M3BertForMaskedLM.from_pretrained(of_two / "checkpointing")
    assert_same_weights(loaded, trainer.backbone, atol=1e-4)
    assert not torch.allclose(loaded.model.embed_tokens.weight, quiet_model().model.embed_tokens.weight, atol=1e-4)


def test_a_quantizer_that_is_trained_in_shards_is_that_of_one_process(of_two, tiny_tokenizer, tmp_path):
    make_teacher(tmp_path, tiny_tokenizer)
    trainer = quantizing(tmp_path, tiny_tokenizer, per_device_train_batch_size=16)
    trainer.train()
    quantizer = find_quantizer(str(of_two / "qama"))
    assert_same_weights(quantizer, trainer.quantizer, atol=1e-4)
    trained, start = (M3BertModel.from_pretrained(of_two / "qama" / name) for name in ("", "teacher"))
    assert_same_weights(trained, trainer.backbone, atol=1e-4)
    assert not torch.allclose(trained.layers[0].mlp.down_proj.weight, start.layers[0].mlp.down_proj.weight, atol=1e-4)


ON_TWO_GPUS = """
import sys
from pathlib import Path
from tests.conftest import tiny_tokenizer
from tests.trainers.core.test_sharding_checkpoints import WAYS, masked_run
masked_run(Path(sys.argv[1]), tiny_tokenizer.__wrapped__(), 2, use_cpu=False, **WAYS[sys.argv[2]])
"""
# The module that accelerate shards has no list of its own of the layers to wrap.
WAYS = {
    "fsdp": {"fsdp": True, "fsdp_config": {"transformer_layer_cls_to_wrap": ["M3BertLayer"]}},
    "fully_shard": {"fully_shard": True},
}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each of two processes")
@pytest.mark.parametrize("way", list(WAYS))
def test_two_gpus_are_one_process(tiny_tokenizer, tmp_path, way):
    """With accelerate's own FSDP, which it turns on for accelerators only, and with `fully_shard`."""
    script = tmp_path / "on_two_gpus.py"
    script.write_text(ON_TWO_GPUS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", str(script)]
    command += [str(tmp_path / way), way]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    trainer = masked_run(tmp_path / "one", tiny_tokenizer, 1)
    assert_same_weights(M3BertForMaskedLM.from_pretrained(tmp_path / way), trainer.backbone, atol=1e-4)
