"""Exit distillation: what it learns, that the full depth stays, the default teacher, and pairs."""

import shutil

import pytest
import torch
from datasets import Dataset
from transformers import AutoModel

from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.modeling import M3BertModel
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers import ExitDistillationConfig, ExitDistillationTrainer, Granularity, fit_exits, truncate
from tests.conftest import assert_close, quiet, refused, save, tiny_config
from tests.elastic_repositories import save_elastic
from tests.exits.test_fit import pooled, random_texts
from tests.trainers.tiny_run import PLAIN_STEP, assert_same_weights, run_two


pytest.importorskip("sentence_transformers")

TEXTS = random_texts(200)


@pytest.fixture(scope="module")
def fitted(tiny_tokenizer, tmp_path_factory):
    """A checkpoint with exits, as `m3bert fit_exits` writes it."""
    folder = tmp_path_factory.mktemp("fitted") / "model"
    torch.manual_seed(5)
    model = M3BertModel(tiny_config(embedding_dropout=0.0, attention_dropout=0.0)).eval()
    fit_exits(model, tiny_tokenizer, TEXTS, basis="principal")
    return save(folder, model, tiny_tokenizer, max_length=48)


def distiller(folder, output, tokenizer, columns=None, **changes) -> ExitDistillationTrainer:
    values = {
        "teacher_cache_dir": str(output.parent / "cache"),  # of all tests: they have the same teacher
        "grid": "0,2,4,6x8,16,32",
        "per_device_train_batch_size": 16,
        "max_length": 48,
        "max_steps": 3,
        "logging_steps": 1,
        "candidates": 64,
    }
    args = ExitDistillationConfig(**quiet(output / "run", **{**values, **changes}))
    model = AutoModel.from_pretrained(folder)
    return ExitDistillationTrainer(model, args, tokenizer, Dataset.from_dict(columns or {"text": TEXTS}))


@pytest.mark.parametrize("loss", ["similarity", pytest.param("contrastive", marks=pytest.mark.slow)])
def test_shallow_layers_learn_and_the_full_depth_stays(fitted, tiny_tokenizer, tmp_path, loss):
    trainer = distiller(fitted, tmp_path, tiny_tokenizer, loss=loss, max_steps=30, learning_rate=1e-3)
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "exit_distillation_2x32" in entry]
    for name in ("exit_distillation_0x32", "exit_distillation_2x32", "exit_distillation_4x16"):
        values = [entry[name] for entry in steps]
        assert sum(values[-5:]) < sum(values[:5]), name
    before = pooled(AutoModel.from_pretrained(fitted), tiny_tokenizer, TEXTS, [6])[6]
    after = pooled(trainer.backbone.eval(), tiny_tokenizer, TEXTS, [6])[6]
    assert torch.cosine_similarity(before, after).mean() > 0.98


def test_every_map_and_the_table_learn(fitted, tiny_tokenizer, tmp_path):
    trainer = distiller(fitted, tmp_path, tiny_tokenizer, max_steps=1, learning_rate=1e-3)
    before = {name: value.clone() for name, value in trainer.backbone.named_parameters()}
    trainer.train()
    same = [name for name, value in trainer.backbone.named_parameters() if torch.equal(value, before[name])]
    assert {"elastic.table.weight", "elastic.exits.2.weight", "elastic.exits.2.joint.weight"} <= {*before}
    assert same == []


def test_the_table_has_its_own_learning_rate_and_does_not_decay(fitted, tiny_tokenizer, tmp_path):
    trainer = distiller(
        fitted, tmp_path, tiny_tokenizer, learning_rate=1e-4, table_learning_rate=1e-2, weight_decay=0.1,
        lr_scheduler_type="linear", warmup_steps=0,
    )  # fmt: skip
    trainer.create_optimizer_and_scheduler(10)
    groups, table = trainer.optimizer.param_groups, trainer.backbone.elastic.table.weight
    seen = [id(parameter) for group in groups for parameter in group["params"]]
    assert sorted(seen) == sorted(id(parameter) for parameter in trainer.model.parameters()), "each of them once"
    (own,) = [group for group in groups if any(parameter is table for parameter in group["params"])]
    assert len(own["params"]) == 1
    assert (own["lr"], own["weight_decay"]) == (1e-2, 0.0)
    assert {group["lr"] for group in groups if group is not own} == {1e-4}
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    assert own["lr"] == pytest.approx(0.9e-2), "the schedule is that of all"


def test_a_native_export_of_a_path_learns_from_the_whole_encoder(tiny_tokenizer, tmp_path):
    """It stays a native model whose embedding, exit included, comes closer to the teacher's."""
    from sentence_transformers import SentenceTransformer

    save_elastic(tmp_path / "elastic", tiny_tokenizer, table=False)
    export_native(Checkpoint(tmp_path / "elastic"), tmp_path / "path", Granularity(4, 32))
    trainer = distiller(
        tmp_path / "path", tmp_path, tiny_tokenizer, grid=None, max_steps=30, learning_rate=3e-3, max_length=40,
        teacher_name_or_path=str(tmp_path / "elastic-source"),
    )  # fmt: skip
    assert str(trainer.nested.objective.grid) == "4x32"
    trainer.train()
    trainer.save_model(str(tmp_path / "trained"))
    source, before, after = (SentenceTransformer(str(tmp_path / its)) for its in ("elastic-source", "path", "trained"))
    wanted, start, found = (torch.from_numpy(its.encode(TEXTS)) for its in (source, before, after))
    cosines = [torch.cosine_similarity(its, wanted).mean() for its in (start, found)]
    assert cosines[1] > cosines[0] + 0.1
    assert type(after[0].auto_model).__module__.startswith("transformers.")
    states = pooled(trainer.backbone.eval(), tiny_tokenizer, TEXTS, [4])[4].float()
    with torch.no_grad():
        assert_close(*(truncate(its, 32, normalize=True) for its in (trainer.nested.projection(states), found)))
    exits = [EmbeddingSettings.read(tmp_path / its).projection for its in ("path", "trained")]
    assert not torch.equal(*(its.weight for its in exits)) and not torch.equal(*(its.bias for its in exits))


def test_batches_can_have_texts_of_a_similar_length(fitted, tiny_tokenizer, tmp_path):
    trainer = distiller(fitted, tmp_path, tiny_tokenizer, train_sampling_strategy="group_by_length")
    lengths = torch.tensor([len(text) for text in TEXTS])
    padded, unordered = (
        sum(int((its.max() - its).sum()) for its in lengths[rows].split(16))
        for rows in ([*trainer._get_train_sampler()], [*range(len(TEXTS))])
    )
    assert padded < unordered / 2


STEP = PLAIN_STEP | {"table_learning_rate": 0.5, "candidates": 0}  # nothing is drawn
RUN_TWO = f"""
from tests.conftest import tiny_tokenizer
from tests.trainers.exit_distillation.test_exit_distillation import distiller
trainer = distiller(
    Path(sys.argv[1]) / "fitted", Path(sys.argv[1]) / "two" / "run", tiny_tokenizer.__wrapped__(), ddp_backend="gloo",
    **{STEP | {"per_device_train_batch_size": 8}}
)
assert trainer.accelerator.num_processes == 2
trainer.train()
trainer.save_model(str(Path(sys.argv[1]) / "trained"))
"""


def test_two_processes_equal_the_big_batch(fitted, tiny_tokenizer, tmp_path):
    shutil.copytree(fitted, tmp_path / "fitted")
    run_two(tmp_path, RUN_TWO)
    trainer = distiller(fitted, tmp_path, tiny_tokenizer, **STEP)
    trainer.train()
    trainer.save_model(str(tmp_path / "big"))
    big, two = (AutoModel.from_pretrained(tmp_path / name) for name in ("big", "trained"))
    assert_same_weights(two, big, atol=2e-6)
    assert not torch.equal(big.elastic.table.weight, AutoModel.from_pretrained(fitted).elastic.table.weight)


def test_a_resumed_run_ends_where_the_straight_one_does(fitted, tiny_tokenizer, tmp_path):
    saved = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    straight, resumed = (distiller(fitted, tmp_path, tiny_tokenizer, **saved) for _ in range(2))
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-2"))
    assert_same_weights(resumed.backbone, straight.backbone)


def test_the_full_size_starts_without_loss(fitted, tiny_tokenizer, tmp_path):
    trainer = distiller(fitted, tmp_path, tiny_tokenizer, max_steps=1, learning_rate=1e-9)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert logged["exit_distillation_6x32"] == pytest.approx(0, abs=1e-4)
    assert logged["exit_distillation_2x32"] > 0.01


def test_the_default_teacher_is_the_model_as_it_was_loaded(fitted, tiny_tokenizer, tmp_path):
    trainer = distiller(fitted, tmp_path, tiny_tokenizer)
    expected = pooled(AutoModel.from_pretrained(fitted), tiny_tokenizer, TEXTS[:5], [6])[6]
    found = trainer.teacher.of(TEXTS[:5]).double()
    torch.testing.assert_close(truncate(found, 32, True), truncate(expected, 32, True), atol=1e-5, rtol=1e-5)
    assert trainer.args.teacher_name_or_path == str(fitted) and trainer.args.teacher_max_length == 48


def test_pairs_mix_in_at_any_depth(fitted, tiny_tokenizer, tmp_path):
    columns = {"query": TEXTS[:100], "document": TEXTS[100:]}
    trainer = distiller(fitted, tmp_path, tiny_tokenizer, columns, pair_weight=0.5)
    trainer.train()
    logged = trainer.state.log_history[0]
    assert {"distillation_0x8", "distillation_6x32", "pairs_0x8", "pairs_6x32"} <= logged.keys()
    assert trainer.nested.objective.identity.name == "Exit distillation + CrossDepth"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pair_weight": 1}, "pair_weight needs two text columns or more; found: text"),
        ({"loss": "mse"}, "loss='mse' is unknown; legal values: similarity, contrastive"),
    ],
)
def test_what_does_not_fit_is_refused(fitted, tiny_tokenizer, tmp_path, changes, message):
    refused(message, distiller, fitted, tmp_path, tiny_tokenizer, **changes)


def test_a_model_without_a_folder_needs_a_teacher(tiny_tokenizer, tmp_path):
    args = ExitDistillationConfig(**quiet(tmp_path, grid="2,6x8,32"))
    with pytest.raises(ValueError, match="Distillation needs a teacher: set teacher_name_or_path"):
        ExitDistillationTrainer(M3BertModel(tiny_config()), args, tiny_tokenizer, Dataset.from_dict({"text": TEXTS}))


def test_a_step_of_the_full_grid_costs_one_forward(fitted, tiny_tokenizer, tmp_path):
    trainer = distiller(fitted, tmp_path, tiny_tokenizer, max_steps=1)
    calls = []
    trainer.backbone.register_forward_hook(lambda module, args, output: calls.append(len(output.last_hidden_state)))
    trainer.train()
    # Texts of different lengths may be in different passes, but each is in one, for all layers.
    assert sum(calls) == trainer.args.per_device_train_batch_size
    assert str(trainer.nested.objective.grid) == "0,2,4,6x8,16,32"
