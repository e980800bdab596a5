"""NestedTrainer: what it logs, saves, resumes and refuses, and that the Trainer's features work unchanged."""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModelForMaskedLM, DataCollatorForTokenClassification

from modeling_m3bert import M3BertForMaskedLM, M3BertModel
from tests.conftest import tiny_config
from trainers import (
    Contrastive,
    Grid,
    MultigranularMLM,
    NestedBatch,
    NestedTrainer,
    NestedTrainingArguments,
    Objective,
    prefix,
)


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


def arguments(folder: Path, **changes: object) -> NestedTrainingArguments:
    values = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    return NestedTrainingArguments(output_dir=str(folder), **{**values, **changes})


def mlm_trainer(tiny_tokenizer, folder, model=None, objective=None, **changes) -> NestedTrainer:
    return NestedTrainer(
        model=model if model is not None else quiet_model(),
        objective=objective if objective is not None else MultigranularMLM(GRID),
        args=arguments(folder, **changes),
        data_collator=DataCollatorForTokenClassification(tiny_tokenizer),
        train_dataset=masked_dataset(),
        eval_dataset=masked_dataset(6),
        processing_class=tiny_tokenizer,
        columns=("input_ids", "labels"),
    )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def assert_same_weights(first: nn.Module, second: nn.Module, atol: float = 1e-6) -> None:
    ours, theirs = weights(first), weights(second)
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], atol=atol, rtol=1e-5, msg=f"{name} differs")


class WithProjector(Objective):
    """An objective with a parameter of its own."""

    name = "projected"

    def __init__(self, grid: Grid):
        super().__init__(grid)
        self.projector = nn.Linear(32, 32)

    def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
        (text,) = batch.texts.values()
        return {self.term(g): prefix(self.projector(text.pooled(g.layer)), g.dim).square().mean() for g in self.grid}


def test_every_term_is_logged_and_makes_up_the_loss(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=4, logging_steps=2)
    before = weights(trainer.backbone)
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in logs] == [2, 4]
    for entry in logs:
        terms = {name: value for name, value in entry.items() if name.startswith("mlm_")}
        assert set(terms) == {"mlm_2x8", "mlm_2x32", "mlm_6x8", "mlm_6x32"}
        assert sum(terms.values()) == pytest.approx(entry["loss"], rel=1e-4)
    after = weights(trainer.backbone)
    unmoved = [name for name in before if torch.equal(before[name], after[name])]
    assert unmoved == []


def naive_step(batches: list[list[int]], learning_rate: float) -> M3BertForMaskedLM:
    """One SGD step on the sum over the grid of the mean over all labelled tokens, with a product a granularity."""
    model, data = quiet_model(), masked_dataset()
    totals: dict[str, torch.Tensor] = {}
    count = 0
    for row in (data[index] for rows in batches for index in rows):
        labels = torch.tensor([row["labels"]])
        hidden = model.model(torch.tensor([row["input_ids"]]), output_hidden_states=True).hidden_states
        states = {2: model.model.norm(hidden[2]), 6: hidden[6]}
        count += int((labels != -100).sum())
        for g in GRID:
            logits = states[g.layer][..., : g.dim] @ model.lm_head.weight[:, : g.dim].T + model.lm_head.bias
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            totals[str(g)] = totals.get(str(g), 0) + loss
    (sum(totals.values()) / count).backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= learning_rate * parameter.grad
    return model


@pytest.mark.parametrize(("batch", "accumulation"), [(16, 1), (4, 4), (2, 8), (5, 4)])
def test_accumulation_equals_the_big_batch(tiny_tokenizer, tmp_path, batch, accumulation):
    trainer = mlm_trainer(
        tiny_tokenizer,
        tmp_path,
        max_steps=1,
        optim="sgd",
        learning_rate=0.1,
        max_grad_norm=0.0,
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=accumulation,
    )
    trainer.train()
    expected = naive_step([list(range(16))], learning_rate=0.1)
    assert_same_weights(trainer.backbone, expected, atol=2e-6)
    (log,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert sum(value for name, value in log.items() if name.startswith("mlm_")) == pytest.approx(log["loss"], rel=1e-4)


RUN_TWO = """
import os
import sys
from pathlib import Path
from tests.conftest import *
from tests.trainers.test_trainer import mlm_trainer
from tests.conftest import tiny_tokenizer
tokenizer = tiny_tokenizer.__wrapped__()
trainer = mlm_trainer(
    tokenizer, Path(sys.argv[1]), max_steps=1, optim="sgd", learning_rate=0.1, max_grad_norm=0.0,
    per_device_train_batch_size=4, gradient_accumulation_steps=2, ddp_backend="gloo",
)
assert trainer.accelerator.num_processes == 2
trainer.train()
trainer.save_model()
if trainer.is_world_process_zero():
    trainer.state.save_to_json(str(Path(sys.argv[1]) / "state.json"))
torch.distributed.barrier()
torch.distributed.destroy_process_group()
# The interpreter's own teardown races with gloo's threads and now and then ends in SIGABRT.
sys.stdout.flush()
os._exit(0)
"""


def test_two_processes_equal_the_big_batch(tmp_path):
    script = tmp_path / "run_two.py"
    script.write_text(RUN_TWO)
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--master_port=0"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", str(script), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    expected = naive_step([list(range(16))], learning_rate=0.1)
    assert_same_weights(M3BertForMaskedLM.from_pretrained(tmp_path), expected, atol=2e-6)
    (log,) = [entry for entry in json.loads((tmp_path / "state.json").read_text())["log_history"] if "loss" in entry]
    assert sum(value for name, value in log.items() if name.startswith("mlm_")) == pytest.approx(log["loss"], rel=1e-4)


def test_a_resumed_run_ends_where_the_straight_one_does(tiny_tokenizer, tmp_path):
    straight = mlm_trainer(tiny_tokenizer, tmp_path / "a", objective=WithProjector(GRID), max_steps=4)
    objective_start = copy.deepcopy(straight.model.objective)
    straight.train()

    def resumable(**changes):
        return mlm_trainer(
            tiny_tokenizer,
            tmp_path / "b",
            objective=copy.deepcopy(objective_start),
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            **changes,
        )

    first = resumable()
    first.train()
    assert not torch.equal(first.model.objective.projector.weight, objective_start.projector.weight)
    second = resumable()
    second.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert_same_weights(second.model, straight.model)
    assert_same_weights(first.model, straight.model)
    straight_logs, resumed_logs = (
        [{key: entry[key] for key in entry if key.startswith(("loss", "projected", "step"))} for entry in history]
        for history in (straight.state.log_history, second.state.log_history)
    )
    for one, other in zip(straight_logs, resumed_logs, strict=False):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_objectives_parameters_stay_in_checkpoints_and_out_of_what_is_saved(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, objective=WithProjector(GRID), max_steps=1, save_strategy="steps", save_steps=1
    )
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    checkpoint, final = (
        {file.name for file in folder.iterdir()} for folder in (tmp_path / "checkpoint-1", tmp_path / "final")
    )
    assert {"model.safetensors", "config.json", "modeling_m3bert.py", "objective.safetensors"} <= checkpoint
    assert "objective.safetensors" not in final
    assert {"model.safetensors", "modeling_m3bert.py", "configuration_m3bert.py", "tokenizer.json"} <= final
    # The optimizer's files of the Trainer are torch's; what we write is JSON and safetensors.
    assert not any(name.endswith((".bin", ".pt", ".pkl")) for name in final)
    loaded = M3BertForMaskedLM.from_pretrained(tmp_path / "final")
    assert_same_weights(loaded, trainer.backbone)


def test_what_a_trainer_saved_loads_without_the_project(tiny_tokenizer, tmp_path, run_bare):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=1)
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    printed = run_bare(
        """
        from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained("model")
        inputs = tokenizer(["open the file", ""], padding=True, return_tensors="pt")
        model = AutoModelForMaskedLM.from_pretrained("model", trust_remote_code=True, output_layer=2, output_dim=8)
        print(tuple(model(**inputs).logits.shape), model.config.matryoshka_layers)
        model = AutoModel.from_pretrained("model", trust_remote_code=True, output_dim=8)
        print(tuple(model(**inputs).last_hidden_state.shape), model.config.matryoshka_dimensions)
        """
    )
    assert "(2, 5, 99) [2]" in printed
    assert "(2, 5, 8) [8, 32]" in printed


def test_a_default_outside_the_trained_grid_is_refused(tiny_tokenizer, tmp_path):
    """Else the saved checkpoint would not open."""
    with pytest.raises(ValueError, match="output_dim=16 is not available here; legal values: 8, 32"):
        mlm_trainer(tiny_tokenizer, tmp_path, model=quiet_model(output_dim=16))


def test_the_trained_grid_is_written_into_the_config(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, model=quiet_model(matryoshka_layers=[], matryoshka_dims=[]))
    assert (trainer.backbone.config.matryoshka_layers, trainer.backbone.config.matryoshka_dims) == ([2, 6], [8, 32])
    assert trainer.backbone.config.is_matryoshka


def test_evaluation_reports_every_granularity(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=2, eval_strategy="steps", eval_steps=1)
    trainer.train()
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert len(evaluations) == 2
    assert {"eval_mlm_2x8", "eval_mlm_2x32", "eval_mlm_6x8", "eval_mlm_6x32"} <= set(evaluations[0])
    metrics = trainer.evaluate()
    assert metrics["eval_loss"] == evaluations[1]["eval_loss"]
    data = masked_dataset(6)
    batches = [data.select(range(4)), data.select(range(4, 6))]
    collator = DataCollatorForTokenClassification(tiny_tokenizer)
    means = []
    with torch.no_grad():
        for batch in batches:
            inputs = collator([batch[row] for row in range(len(batch))])
            labels = inputs.pop("labels")
            logits = trainer.backbone.eval()(**inputs, output_layer=2, output_dim=8).logits
            means.append(nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).item())
    assert metrics["eval_mlm_2x8"] == pytest.approx(sum(means) / 2, rel=1e-4)
    train_logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(
        sum(value for name, value in entry.items() if name.startswith("mlm_"))
        == pytest.approx(entry["loss"], rel=1e-4)
        for entry in train_logs
    )


def test_several_evaluation_sets_are_kept_apart(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(tiny_tokenizer, tmp_path)
    metrics = trainer.evaluate({"one": masked_dataset(4), "two": masked_dataset(8)})
    assert {"eval_one_mlm_2x8", "eval_two_mlm_2x8"} <= set(metrics)
    assert metrics["eval_one_mlm_2x8"] != metrics["eval_two_mlm_2x8"]


def test_the_best_checkpoint_comes_back(tiny_tokenizer, tmp_path):
    trainer = mlm_trainer(
        tiny_tokenizer,
        tmp_path,
        objective=WithProjector(GRID),
        max_steps=3,
        learning_rate=0.5,  # so high that it gets worse
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="projected_6x32",
        greater_is_better=False,
    )
    trainer.train()
    losses = [entry["eval_projected_6x32"] for entry in trainer.state.log_history if "eval_projected_6x32" in entry]
    assert min(losses) < losses[-1], "the run must get worse for this test to say anything"
    assert trainer.evaluate()["eval_projected_6x32"] == pytest.approx(min(losses), rel=1e-4)


def test_bfloat16_trains_close_to_float32(tiny_tokenizer, tmp_path):
    losses = []
    for bf16 in (False, True):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path, bf16=bf16, max_steps=4)
        trainer.train()
        losses.append([entry["loss"] for entry in trainer.state.log_history if "loss" in entry])
        assert trainer.backbone.dtype == torch.float32
    assert losses[0] != losses[1]
    assert losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.parametrize("option", ["activation_checkpointing", "torch_compile"])
def test_checkpointing_and_compiling_change_no_number(tiny_tokenizer, tmp_path, option):
    runs = []
    for changes in ({}, {option: True}):
        trainer = mlm_trainer(tiny_tokenizer, tmp_path, max_steps=2, **changes)
        trainer.train()
        runs.append(trainer)
    assert_same_weights(runs[0].backbone, runs[1].backbone, atol=2e-4)
    runs[1].save_model(str(tmp_path / "saved"))
    assert_same_weights(M3BertForMaskedLM.from_pretrained(tmp_path / "saved"), runs[1].backbone)
    if option == "activation_checkpointing":
        assert runs[1].backbone.is_activation_checkpointing


def test_an_adapter_trains_alone_and_is_saved_as_one(tiny_tokenizer, tmp_path):
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(quiet_model(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, model=model, **changes)
    before = weights(trainer.backbone)
    trainer.train()
    moved = {name for name, tensor in weights(trainer.backbone).items() if not torch.equal(tensor, before[name])}
    assert moved
    assert all("lora_" in name for name in moved)
    trainer.save_model(str(tmp_path / "adapter"))
    again = peft.PeftModel.from_pretrained(quiet_model(), str(tmp_path / "adapter"))
    for name, tensor in weights(trainer.backbone).items():
        if "lora_" in name:
            assert torch.equal(weights(again)[name], tensor)
    fresh = peft.get_peft_model(quiet_model(), peft.LoraConfig(target_modules=["q_proj", "v_proj"]))
    resumed = mlm_trainer(tiny_tokenizer, tmp_path, model=fresh, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert_same_weights(resumed.backbone, trainer.backbone)


def test_a_loss_that_is_not_finite_stops_the_run(tiny_tokenizer, tmp_path):
    class Poisoned(MultigranularMLM):
        def forward(self, batch: NestedBatch) -> dict[str, torch.Tensor]:
            terms = super().forward(batch)
            self.calls = getattr(self, "calls", 0) + 1
            return {**terms, "mlm_6x8": terms["mlm_6x8"] * math.nan} if self.calls == 3 else terms

    trainer = mlm_trainer(
        tiny_tokenizer, tmp_path, objective=Poisoned(GRID), max_steps=4, save_strategy="steps", save_steps=1
    )
    with pytest.raises(ValueError, match=r"not finite at step 3 \(terms: mlm_6x8\)"):
        trainer.train()
    good = M3BertForMaskedLM.from_pretrained(tmp_path / "checkpoint-2")
    assert all(torch.isfinite(tensor).all() for tensor in good.state_dict().values())
    assert_same_weights(good, trainer.backbone)
    assert not (tmp_path / "checkpoint-3").exists()


def test_resuming_from_a_broken_checkpoint_is_refused(tiny_tokenizer, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    mlm_trainer(tiny_tokenizer, tmp_path, **changes).train()
    checkpoint = tmp_path / "checkpoint-1"
    M3BertForMaskedLM(tiny_config(num_hidden_layers=4, matryoshka_layers=[4])).save_pretrained(checkpoint)
    with pytest.raises(ValueError, match="cut short or of another architecture"):
        mlm_trainer(tiny_tokenizer, tmp_path, **changes).train(resume_from_checkpoint=str(checkpoint))


def test_a_checkpoint_without_the_objective_is_refused(tiny_tokenizer, tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1, "max_steps": 1}
    mlm_trainer(tiny_tokenizer, tmp_path, **changes).train()
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, objective=WithProjector(GRID), **changes)
    with pytest.raises(ValueError, match="has no parameters of WithProjector"):
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_bad_data_is_refused_before_any_work(tiny_tokenizer, tmp_path):
    def build(dataset):
        return NestedTrainer(
            quiet_model(),
            MultigranularMLM(GRID),
            arguments(tmp_path),
            lambda rows: rows,
            dataset,
            columns=("input_ids",),
        )

    with pytest.raises(ValueError, match="The dataset is empty"):
        build(masked_dataset().select([]))
    with pytest.raises(ValueError, match=r"lacks the column\(s\) input_ids; it has text, id"):
        build(Dataset.from_dict({"text": ["a"], "id": [1]}))


def test_a_grid_outside_the_model_is_refused(tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match=r"layers 1\.\.6 and dims 1\.\.32; outside of it: 9x8"):
        mlm_trainer(tiny_tokenizer, tmp_path, objective=MultigranularMLM(Grid.parse("2,9x8")))


def test_the_grid_defaults_to_the_models_own(tmp_path):
    args = arguments(tmp_path)
    assert str(args.grid_for(tiny_config())) == "2,4,6x8,16,32"
    assert str(arguments(tmp_path, grid="1x4").grid_for(tiny_config())) == "1x4"
    with pytest.raises(ValueError, match="names no matryoshka_layers"):
        args.grid_for(tiny_config(matryoshka_layers=[]))
    with pytest.raises(ValueError, match="is not a grid"):
        arguments(tmp_path, grid="4,8")


def test_objectives_train_other_backbones_too(tiny_tokenizer, tmp_path):
    import transformers

    config = transformers.BertConfig(
        vocab_size=99, hidden_size=32, intermediate_size=37, num_hidden_layers=6, num_attention_heads=4
    )
    trainer = mlm_trainer(tiny_tokenizer, tmp_path, model=AutoModelForMaskedLM.from_config(config), max_steps=2)
    trainer.train()
    trainer.save_model()
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["model_type"] == "bert"
    assert (stored["is_matryoshka"], stored["matryoshka_dimensions"], stored["matryoshka_layers"]) == (
        True,
        [8, 32],
        [2, 6],
    )


def test_objectives_can_be_made_of_others():
    """What MIPIC will be: one forward, two objectives, one weighted total."""

    class Both(Objective):
        def __init__(self, grid: Grid):
            super().__init__(grid)
            self.first, self.second = Contrastive(grid), WithProjector(grid)

        def forward(self, batch):
            return {**self.first(batch), **self.second(NestedBatch({"text": batch.texts["a"]}))}

        def total(self, terms):
            return sum(0.5 * value for value in terms.values())

    from trainers import NestedModel

    ids = torch.randint(5, 99, (3, 6))
    model = NestedModel(M3BertModel(tiny_config()), Both(GRID))
    outputs = model(a={"input_ids": ids}, b={"input_ids": ids})
    assert len(outputs["terms"]) == 8
    torch.testing.assert_close(outputs["loss"], sum(outputs["terms"].values()) / 2)
