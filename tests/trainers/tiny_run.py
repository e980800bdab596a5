"""What tests of the trainers share: a tiny run whose data, labels and start are always the same, two processes, and
counters."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import nn
from torch.distributed import TCPStore
from transformers import BertConfig, DataCollatorForTokenClassification

from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers import (
    Grid,
    MultigranularMLM,
    NestedBatch,
    NestedTrainer,
    NestedTrainingArguments,
    Objective,
    truncate,
)
from m3bert.trainers.core.objective import Terms
from tests import warm_processes
from tests.conftest import quiet, tiny_config


GRID = Grid.parse("2,6x8,32")


def masked_dataset(rows: int = 16) -> Dataset:
    """Texts of different lengths with labels already made, so that every run sees the same ones."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for row in range(rows):
        length = 4 + row % 7
        ids = torch.randint(5, 99, (length,), generator=generator)
        labelled = torch.rand(length, generator=generator) < 0.1 + 0.05 * (row % 9)
        data.append({"input_ids": ids.tolist(), "labels": torch.where(labelled, ids, -100).tolist()})
    return Dataset.from_list(data)


def quiet_model(**changes: object) -> M3BertForMaskedLM:
    """A model without dropout: its runs can be compared."""
    torch.manual_seed(5)
    return M3BertForMaskedLM(tiny_config(embedding_dropout=0.0, attention_dropout=0.0, **changes))


def bert_config(**changes: object) -> BertConfig:
    """Of a BERT as small as [`quiet_model`]."""
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_attention_heads": 4}
    return BertConfig(**{**sizes, "num_hidden_layers": 6, **changes})


# Of plain gradient descent on the rows in their order, which two processes and accumulated batches can repeat.
PLAIN_STEP = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.0}
PLAIN_STEP |= {"lr_scheduler_type": "constant", "train_sampling_strategy": "sequential"}


def arguments(folder: Path, **changes: object) -> NestedTrainingArguments:
    values = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 4, "learning_rate": 1e-2,
        "logging_steps": 1, "lr_scheduler_type": "constant",
    }  # fmt: skip
    return NestedTrainingArguments(**quiet(folder, **{**values, **changes}))


def mlm_trainer(
    tiny_tokenizer, folder, model=None, objective=None, trainer_class=NestedTrainer, **changes
) -> NestedTrainer:
    return trainer_class(
        model=model if model is not None else quiet_model(),
        objective=objective if objective is not None else MultigranularMLM(GRID), args=arguments(folder, **changes),
        data_collator=DataCollatorForTokenClassification(tiny_tokenizer), train_dataset=masked_dataset(),
        eval_dataset=masked_dataset(6), processing_class=tiny_tokenizer, columns=("input_ids", "labels"),
    )  # fmt: skip


def pair_config(config_class, folder, **changes):
    """A config of a few steps on labelled pairs, of any trainer of embeddings."""
    values = {"max_steps": 4, "per_device_train_batch_size": 8, "logging_steps": 1, "unsupervised": False}
    return config_class(**quiet(folder, **{**values, **changes}))


def pair_trainer(trainer_class, args, tokenizer, sentences, model=None) -> NestedTrainer:
    """A trainer of embeddings on pairs of the sentences."""
    dataset = Dataset.from_dict({"query": sentences, "answer": sentences[::-1]})
    return trainer_class(model if model is not None else quiet_model().model, args, tokenizer, dataset)


def named(terms: Terms) -> dict[str, torch.Tensor]:
    """Terms by the names under which they are logged."""
    return {str(term): value for term, value in terms.items()}


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(first: nn.Module, second: nn.Module, atol: float = 1e-6) -> None:
    """Weights are equal but for rounding, which grows with the largest weight of the model beyond 1."""
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    scale = max(1.0, *(tensor.abs().max().item() for tensor in theirs.values() if tensor.is_floating_point()))
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, atol=scale * atol, rtol=1e-5, msg=f"{name} differs")


def assert_terms_sum_to_the_loss(trainer: NestedTrainer) -> None:
    """In the one entry that is logged of a step."""
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(value for name, value in log.items() if name.startswith("mlm_")) == pytest.approx(log["loss"], rel=1e-4)


class WithProjector(Objective):
    """An objective with a parameter of its own."""

    name = "projected"

    def __init__(self, grid: Grid):
        super().__init__(grid)
        self.projector = nn.Linear(32, 32)

    def forward(self, batch: NestedBatch) -> Terms:
        (text,) = batch.texts.values()
        return {self.term(g): truncate(self.projector(text.pooled(g.layer)), g.dim).square().mean() for g in self.grid}


ROOT = Path(__file__).resolve().parents[2]


FINISH = """
torch.distributed.barrier()
torch.distributed.destroy_process_group()
# The interpreter's own teardown races with gloo's threads and now and then ends in SIGABRT.
sys.stdout.flush()
os._exit(0)
"""


def start_two(code: str, *arguments: object, timeout: int = 300) -> list[Any]:
    """Run code in two processes that find each other, as `torchrun` would start them, for at most `timeout` seconds;
    returns both when they are completed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    shared |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RESTART_COUNT": "0"}
    ranks = [{**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in (0, 1)]
    words = [str(argument) for argument in arguments]
    done = warm_processes.server().run(code, ROOT, ranks, path=[str(ROOT)], arguments=words, timeout=timeout)
    assert [each.returncode for each in done] == [0, 0], "".join(each.stderr[-3000:] for each in done)
    return done


def run_two(folder: Path, code: str, timeout: int = 300) -> None:
    """Run code in two processes that speak to each other with gloo; it finds the folder in `sys.argv[1]`."""
    code = "import os\nimport sys\nfrom pathlib import Path\nimport torch\n" + code + FINISH
    start_two(code, folder, timeout=timeout)


def count_forwards(model: torch.nn.Module) -> list[int]:
    """A list that grows by the number of texts with every forward."""
    seen: list[int] = []
    model.register_forward_hook(
        lambda module, args, kwargs, output: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    return seen
