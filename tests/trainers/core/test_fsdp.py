"""Training with accelerate's FSDP ends with the model of one process, and saves it whole."""

from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import BertModel

from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, NestedModel
from tests.conftest import quiet, tiny_config
from tests.encode.test_ranks import OBJECTIVES, triplets
from tests.trainers.tiny_run import bert_config, quiet_model, run_two


def train(folder: Path, tokenizer, *, sharded: bool, resume: int | None = None) -> ContrastiveTrainer:
    """Train a model with a projection and a learned temperature for four steps, or continue after two of them."""
    output = folder / ("sharded" if sharded else "whole")
    values = {"max_steps": 4, "per_device_train_batch_size": 4 if sharded else 8, "learning_rate": 1e-3}
    values |= {"train_sampling_strategy": "sequential", "adam_epsilon": 1e-3, "save_strategy": "steps"}
    values |= {"save_steps": 2, "projection_dim": 6, "learn_temperature": True}
    values |= {"fsdp": True, "ddp_backend": "gloo"} if sharded else {}
    args = ContrastiveConfig(**quiet(output if resume is None else output / "again", **values))
    model = quiet_model(num_hidden_layers=2, matryoshka_layers=[1, 2]).model
    trainer = ContrastiveTrainer(model, args, tokenizer, triplets())
    trainer.train(resume_from_checkpoint=None if resume is None else str(output / f"checkpoint-{resume}"))
    trainer.save_model()
    return trainer


# accelerate shards models on accelerators only: shard those of CPU processes, too.
ON_CPU = """
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType
from tests.conftest import tiny_tokenizer
from torch.distributed.tensor import DTensor
from tests.trainers.core.test_fsdp import train
started = AcceleratorState.__init__

def start(state, *args, fsdp_plugin=None, **kwargs):
    started(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None:
        state.fsdp_plugin = fsdp_plugin
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

AcceleratorState.__init__ = start
for resume in (None, 2):
    trainer = train(Path(sys.argv[1]), tiny_tokenizer.__wrapped__(), sharded=True, resume=resume)
    assert all(isinstance(parameter, DTensor) for parameter in trainer.model.parameters())
"""


def saved_tensors(folder: Path) -> dict:
    """All tensors of a saved model, its modules included."""
    files = [*folder.glob("*.safetensors"), *folder.glob("[1-9]_*/*.safetensors")]
    return {f"{file.relative_to(folder)} {key}": value for file in files for key, value in load_file(file).items()}


@pytest.mark.slow
def test_a_run_and_its_continuation_end_with_the_model_of_one_process(tiny_tokenizer, tmp_path):
    train(tmp_path, tiny_tokenizer, sharded=False)
    run_two(tmp_path, ON_CPU, timeout=600)
    expected = saved_tensors(tmp_path / "whole")
    assert "2_Dense" in " ".join(expected)
    for folder in (tmp_path / "sharded", tmp_path / "sharded" / "again"):
        found = saved_tensors(folder)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_close(found[key], value, atol=1e-4, rtol=1e-4, msg=f"{folder}: {key}")
    (tmp_path / "sharded" / "checkpoint-2").rename(tmp_path / "whole" / "checkpoint-9")
    with pytest.raises(ValueError, match="checkpoint-9 was written with fsdp: resume it with fsdp"):
        train(tmp_path, tiny_tokenizer, sharded=False, resume=9)


def test_layers_are_wrapped_and_embeddings_are_not():
    """A step looks embeddings up outside of their module."""
    objective = OBJECTIVES["contrastive"]()
    assert NestedModel(BertModel(bert_config()), objective)._no_split_modules == ["BertLayer"]
    adapted = get_peft_model(M3BertForMaskedLM(tiny_config()), LoraConfig(target_modules=["q_proj"]))
    assert NestedModel(adapted, objective)._no_split_modules == ["M3BertLayer"]
