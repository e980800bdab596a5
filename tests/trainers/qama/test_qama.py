"""QAMA: what a quantizer learns, what is saved with an encoder that is frozen or trained, and resuming."""

import shutil

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModel

from m3bert import trainers
from m3bert.encode.quantizer import find_quantizer
from m3bert.hub_cards.training_record import RECORD_FILE, TrainingRecord
from m3bert.modeling import M3BertModel, M3BertQuantizer
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.models.settings import EmbeddingSettings
from m3bert.trainers.qama.trainer import sample_of
from tests.conftest import assert_close, quiet, refused, save, tiny_config, write_modules
from tests.exits.test_fit import pooled, random_texts
from tests.trainers.tiny_run import assert_same_weights


pytest.importorskip("sentence_transformers")
from sentence_transformers import SentenceTransformer


TEXTS = random_texts(200)
CODES = ("qama-2", "qama-1.5", "qama-hybrid", "qama-1", "qama-0.5")


@pytest.fixture(scope="module")
def published(tiny_tokenizer, tmp_path_factory):
    """A checkpoint with exits at layers 0 and 4, as `m3bert fit_exits` writes it."""
    folder = tmp_path_factory.mktemp("published") / "model"
    torch.manual_seed(5)
    model = M3BertModel(tiny_config(embedding_dropout=0.0, attention_dropout=0.0)).eval()
    trainers.fit_exits(model, tiny_tokenizer, TEXTS, layers=[4])
    return save(folder, model, tiny_tokenizer, max_length=48)


def quantizing(folder, output, tokenizer, columns=None, **changes) -> trainers.QAMATrainer:
    values = {
        "teacher_cache_dir": str(output.parent / "cache"),  # of all tests: most have the same texts and teacher
        "grid": "6x8,16,32",
        "per_device_train_batch_size": 16,
        "max_length": 48,
        "max_steps": 3,
        "logging_steps": 1,
    }
    args = trainers.QAMAConfig(**quiet(output / "run", **{**values, **changes}))
    return trainers.QAMATrainer(
        AutoModel.from_pretrained(folder), args, tokenizer, Dataset.from_dict(columns or {"text": TEXTS})
    )


def disagreement(quantizer: M3BertQuantizer, vectors: torch.Tensor, dim: int) -> float:
    """1 minus the correlation of 2-bit similarities and those of the embeddings."""
    signs = quantizer.signs(quantizer.encode(vectors, "qama-2", dim))
    unit = torch.nn.functional.normalize(vectors, dim=1)
    found, wanted = ((side @ side.T).flatten() for side in (signs, unit))
    return 1 - torch.corrcoef(torch.stack([found, wanted]))[0, 1].item()


def structured(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Embeddings of 32 dims around 12 topics, with few strong directions."""
    topics = torch.randn(12, 32, generator=torch.Generator().manual_seed(9)) * torch.logspace(0.5, -1, 32)
    which = torch.randint(12, (rows,), generator=generator)
    return topics[which] + 0.5 * torch.logspace(0.5, -1, 32) * torch.randn(rows, 32, generator=generator)


@pytest.mark.parametrize(
    ("skip", "quantized_gradient", "left"),
    [
        pytest.param("identity", False, {16: 1.0, 32: 0.6}, marks=pytest.mark.slow),
        pytest.param("none", False, {16: 0.7, 32: 0.7}, marks=pytest.mark.slow),
        ("principal", True, {16: 0.5, 32: 0.5}),
    ],
)
def test_codes_agree_better_with_embeddings_after_training(tiny_tokenizer, tmp_path, skip, quantized_gradient, left):
    """Those of embeddings that were not trained on, at half and full width."""
    generator, texts = torch.Generator().manual_seed(3), list(dict.fromkeys(random_texts(1200)))
    teacher = trainers.TeacherEmbeddings.write(texts, structured(len(texts), generator), tmp_path / "teacher.npy")
    args = trainers.QAMAConfig(**quiet(
        tmp_path, grid="6x8,16,32", max_steps=50, per_device_train_batch_size=64, learning_rate=3e-3,
        quantizer_config={"skip": skip, "intermediate_size": 64}, quantized_gradient=quantized_gradient,
        logging_steps=1,
    ))  # fmt: skip
    dataset = Dataset.from_dict({"text": texts})
    trainer = trainers.QAMATrainer(M3BertModel(tiny_config()), args, tiny_tokenizer, dataset, teacher=teacher)
    held_out = structured(300, generator)
    before = {dim: disagreement(trainer.quantizer, held_out, dim) for dim in (16, 32)}
    trainer.train()
    for dim, value in before.items():
        assert disagreement(trainer.quantizer, held_out, dim) < left[dim] * value
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    coded = ("qama_sim_6x16@qama-2", "qama_kl_6x32@qama-2", "qama_sim_6x32@qama-hybrid")
    for name in coded if quantized_gradient else ():
        values = [entry[name] for entry in steps]
        assert sum(values[-10:]) < sum(values[:10]), name


def test_thresholds_at_the_end_are_quantiles_of_the_training_texts(published, tiny_tokenizer, tmp_path):
    trainer = quantizing(published, tmp_path, tiny_tokenizer)
    trainer.train()
    with torch.no_grad():
        transformed = trainer.quantizer(sample_of(trainer.teacher))
    expected = np.quantile(transformed.numpy(), [0.25, 0.5, 0.75], axis=0)
    assert_close(trainer.quantizer.thresholds("2").numpy(), expected)


def test_a_frozen_encoder_stays_what_it_was(published, tiny_tokenizer, tmp_path):
    """Weights, exits, config and what sentence-transformers reads; and no text passes through it."""
    trainer = quantizing(published, tmp_path, tiny_tokenizer, max_steps=6)
    calls = []
    trainer.backbone.register_forward_hook(lambda *inputs: calls.append(inputs))
    trainer.train()
    assert not calls
    trainer.save_model(str(tmp_path / "saved"))
    before, after = (AutoModel.from_pretrained(folder) for folder in (published, tmp_path / "saved"))
    assert_same_weights(before, after, atol=0)
    assert before.config.elastic == after.config.elastic and Elasticity.of(after.config).exits == [0, 4]
    assert before.config.matryoshka_dims == after.config.matryoshka_dims
    assert before.config.matryoshka_layers == after.config.matryoshka_layers
    theirs = [SentenceTransformer(str(folder)).encode(TEXTS[:5]) for folder in (published, tmp_path / "saved")]
    np.testing.assert_array_equal(*theirs)
    assert find_quantizer(str(tmp_path / "saved")).config.layers == [0, 4, 6]


def test_what_is_saved_gives_the_same_codes(published, tiny_tokenizer, tmp_path):
    trainer = quantizing(published, tmp_path, tiny_tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    files = {file.name for file in (tmp_path / "saved" / "quantizer").iterdir()}
    assert files == {"config.json", "model.safetensors", RECORD_FILE}
    assert (tmp_path / "saved" / "quantization_m3bert.py").is_file()
    assert not (tmp_path / "saved" / "objective.safetensors").exists()
    saved = find_quantizer(str(tmp_path / "saved"))
    vectors = pooled(AutoModel.from_pretrained(tmp_path / "saved"), tiny_tokenizer, TEXTS, [6])[6]
    assert saved.fingerprint == trainer.quantizer.fingerprint
    for code in CODES:
        found = saved.encode(vectors, code, 16)
        assert torch.equal(found.packed, trainer.quantizer.encode(vectors, code, 16).packed)
        assert len(found.packed.unique(dim=0)) > 100


@pytest.mark.parametrize("frozen", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_run_resumes_with_the_same_thresholds_and_codes(published, tiny_tokenizer, tmp_path, frozen):
    changes = {"save_strategy": "steps", "save_steps": 2, "max_steps": 3, "frozen": frozen, "learning_rate": 1e-3}
    whole = quantizing(published, tmp_path / "whole", tiny_tokenizer, **changes)
    whole.train()
    resumed = quantizing(published, tmp_path / "resumed", tiny_tokenizer, **changes)
    shutil.rmtree(tmp_path / "resumed" / "run", ignore_errors=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "run" / "checkpoint-2"))
    assert resumed.state.global_step == 3
    for name, tensor in whole.quantizer.state_dict().items():
        assert torch.equal(resumed.quantizer.state_dict()[name], tensor), name
    assert resumed.quantizer.fingerprint == whole.quantizer.fingerprint
    vectors = sample_of(whole.teacher)
    for code in CODES:
        assert torch.equal(*(each.quantizer.encode(vectors, code).packed for each in (resumed, whole)))
    middle = find_quantizer(str(tmp_path / "whole" / "run" / "checkpoint-2"))
    assert not torch.equal(middle.thresholds("2"), whole.quantizer.thresholds("2"))
    assert_same_weights(resumed.backbone, whole.backbone, atol=0)


@pytest.mark.parametrize("earlier", [False, True])
def test_a_frozen_encoder_keeps_its_record(published, tiny_tokenizer, tmp_path, earlier):
    folder = tmp_path / "start"
    shutil.copytree(published, folder)
    if earlier:
        record = quantizing(published, tmp_path, tiny_tokenizer).record()
        record.objective, record.steps = trainers.Contrastive.title, 70
        record.save(folder)
    trainer = quantizing(folder, tmp_path, tiny_tokenizer)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    found = TrainingRecord.find(tmp_path / "saved")
    assert (found is not None) == earlier
    if earlier:
        assert (folder / RECORD_FILE).read_text() == (tmp_path / "saved" / RECORD_FILE).read_text()
        for _ in range(2):
            trainer.save_model(str(folder))
            assert TrainingRecord.find(folder).objective == trainers.Contrastive.title, (
                "also over the folder of the model"
            )
    own = TrainingRecord.find(tmp_path / "saved" / "quantizer")
    assert (own.objective, own.trainer, own.steps, own.grid) == ("QAMA", "QAMATrainer", 3, "6x8,16,32")
    (part,) = own.parts
    assert part["papers"][0]["title"].startswith("Quantization Aware Matryoshka Adaptation")


def test_end_to_end_trains_the_encoder_with_the_quantizer(published, tiny_tokenizer, tmp_path):
    trainer = quantizing(
        published, tmp_path, tiny_tokenizer, frozen=False, grid="4,6x16,32", max_steps=12, learning_rate=1e-3,
        quantized_gradient=True,
    )  # fmt: skip
    quantizer = {name: value.clone() for name, value in trainer.quantizer.named_parameters()}
    encoder = {name: value.clone() for name, value in trainer.backbone.named_parameters()}
    trainer.train()
    assert all(not torch.equal(value, quantizer[name]) for name, value in trainer.quantizer.named_parameters())
    moved = {name for name, value in trainer.backbone.named_parameters() if not torch.equal(value, encoder[name])}
    assert {"layers.0.attention.query.weight", "embed_tokens.weight"} & moved and len(moved) > 0.9 * len(encoder)
    names = {"qama_sim_4x16", "qama_kl_6x32@qama-2", "qama_rank_4x32@qama-hybrid", "qama_variance_6x32"}
    assert names <= trainer.state.log_history[0].keys()
    trainer.save_model(str(tmp_path / "saved"))
    assert TrainingRecord.find(tmp_path / "saved").objective == "QAMA"
    assert not (tmp_path / "saved" / "quantizer" / RECORD_FILE).exists()
    saved, model = find_quantizer(str(tmp_path / "saved")), AutoModel.from_pretrained(tmp_path / "saved")
    assert saved.config.layers == [4, 6] and model.config.matryoshka_dims == [16, 32]
    states = pooled(model, tiny_tokenizer, TEXTS, [4, 6])
    with torch.no_grad():
        transformed = saved(torch.cat([states[4], states[6]]))
    shares = (transformed > saved.thresholds("1")).double().mean(dim=0)
    torch.testing.assert_close(shares, torch.full((32,), 0.5, dtype=torch.float64), atol=0.1, rtol=0)


def test_pairs_are_contrasted(published, tiny_tokenizer, tmp_path):
    columns = {"query": TEXTS[:100], "document": TEXTS[100:]}
    trainer = quantizing(published, tmp_path, tiny_tokenizer, columns, quantized_gradient=True)
    trainer.train()
    assert {"qama_contrast_6x8", "qama_contrast_6x32@qama-2"} <= trainer.state.log_history[0].keys()
    alone = quantizing(published, tmp_path, tiny_tokenizer)
    alone.train()
    assert not any("contrast" in name for name in alone.state.log_history[0])


def test_the_default_grid_halves_the_width_and_the_default_teacher_is_the_model(published, tiny_tokenizer, tmp_path):
    grids = {32: "6x32", 96: "6x48,96", 384: "6x48,96,192,384", 100: "6x50,100"}
    for width, grid in grids.items():
        config = tiny_config(hidden_size=width, matryoshka_dims=[])
        assert str(trainers.QAMAConfig(**quiet(tmp_path)).grid_for(config)) == grid
    trainer = quantizing(published, tmp_path, tiny_tokenizer)
    expected = pooled(AutoModel.from_pretrained(published), tiny_tokenizer, TEXTS[:5], [6])[6]
    torch.testing.assert_close(trainer.teacher.of(TEXTS[:5]), expected.float(), atol=1e-5, rtol=1e-5)
    assert isinstance(
        trainer.nested.objective, trainers.QAMA
    ) and trainer.nested.objective.grid == trainers.Grid.parse("6x8,16,32")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grid": "6x8,16"}, "The grid 6x8,16 must have the same dims at every layer, up to 32"),
        ({"grid": "4,6x8,32"}, "A frozen encoder is quantised at its last layer, 6; the grid is 4,6x8,32"),
        ({"pooling": "cls"}, "pooling='mean'"),
        ({"projection_dim": 8}, "QAMAConfig trains no projection"),
    ],
)
def test_what_does_not_fit_is_refused(published, tiny_tokenizer, tmp_path, changes, message):
    refused(message, quantizing, published, tmp_path, tiny_tokenizer, **changes)


def test_a_teacher_of_another_width_is_refused(published, encoder_folder, tiny_tokenizer, tmp_path):
    with pytest.raises(ValueError, match="embeddings have 20 dims, the model's 32: a quantizer starts from"):
        quantizing(published, tmp_path, tiny_tokenizer, teacher_name_or_path=str(encoder_folder))


def test_a_frozen_encoder_must_be_what_its_folder_has(published, tiny_tokenizer, tmp_path):
    """Its embeddings are computed from the folder."""
    dataset, changes = Dataset.from_dict({"text": TEXTS}), {"grid": "4x8,32", "max_length": 48, "max_steps": 1}
    changes |= {"per_device_train_batch_size": 16}
    arguments = quiet(tmp_path, teacher_cache_dir=str(tmp_path / "cache"), **changes)
    cut = AutoModel.from_pretrained(published, output_layer=4)
    with pytest.raises(ValueError, match="The frozen encoder has the size 4x32, but .* was saved with 6x32: save"):
        trainers.QAMATrainer(cut, trainers.QAMAConfig(**arguments), tiny_tokenizer, dataset)
    save(tmp_path / "cut", cut, tiny_tokenizer)
    model = AutoModel.from_pretrained(tmp_path / "cut")
    trainer = trainers.QAMATrainer(model, trainers.QAMAConfig(**arguments), tiny_tokenizer, dataset)
    trainer.train()
    assert trainer.quantizer.config.layers == [4]


def test_a_frozen_encoder_keeps_its_published_settings(tiny_tokenizer, tmp_path):
    """Pooling, prompts and length, also after training."""
    folder = tmp_path / "model"
    save(folder, M3BertModel(tiny_config()), tiny_tokenizer, max_length=9, pooling="cls", prompts={"query": "ask: "})
    trainer = quantizing(folder, tmp_path, tiny_tokenizer, max_length=None)
    expected = SentenceTransformer(str(folder)).encode(TEXTS[:5])
    np.testing.assert_allclose(trainer.teacher.of(TEXTS[:5]).numpy(), expected, rtol=1e-5, atol=1e-5)
    trainer.train()
    trainer.save_model()
    saved = EmbeddingSettings.read(trainer.args.output_dir)
    assert (saved.pooling, saved.max_length, saved.prompts) == ("cls", 9, {"query": "ask: "})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pooling": "cls"}, "pooling='cls', which a frozen encoder keeps"),
        ({"max_length": 9}, "max_length=9, which a frozen encoder keeps"),
        ({"projection": trainers.Projection(32, 32)}, "QAMAConfig trains no projection"),
    ],
)
def test_settings_that_a_frozen_encoder_cannot_take_are_refused(
    published, tiny_tokenizer, tmp_path, settings, message
):
    folder = shutil.copytree(published, tmp_path / "model")
    write_modules(folder, **{"width": 32, "max_length": 48, **settings})
    refused(message, quantizing, folder, tmp_path, tiny_tokenizer, pooling="mean", max_length=48)


def test_the_default_teacher_has_the_pooling_of_the_run(tiny_tokenizer, tmp_path):
    """A folder without modules would be read with the mean."""
    model = M3BertModel(tiny_config())
    save(tmp_path / "plain", model, tiny_tokenizer)
    trainer = quantizing(tmp_path / "plain", tmp_path, tiny_tokenizer, pooling="cls")
    expected = trainers.Teacher(str(tmp_path / "plain"), pooling="cls", max_length=48).embed(TEXTS, tmp_path / "other")
    torch.testing.assert_close(trainer.teacher.of(TEXTS[:5]), expected.of(TEXTS[:5]))


def test_the_loss_of_an_evaluation_is_that_of_the_training(published, tiny_tokenizer, tmp_path):
    """Similarities of codes without a gradient are reported, and not counted."""
    trainer = quantizing(published, tmp_path, tiny_tokenizer, max_steps=1, learning_rate=0.0)
    objective, inputs = trainer.nested.objective, trainer.data_collator([{"text": text} for text in TEXTS[:16]])
    losses = [trainer.nested.train(mode)(**inputs) for mode in (True, False)]
    assert len(losses[1]["terms"]) > len(losses[0]["terms"]) and not objective.quantized_gradient
    torch.testing.assert_close(losses[0]["loss"], losses[1]["loss"])


def test_other_training_says_that_the_quantizer_is_left_out(published, tiny_tokenizer, tmp_path, caplog):
    quantized = quantizing(published, tmp_path, tiny_tokenizer, max_steps=1)
    quantized.train()
    quantized.save_model(str(tmp_path / "quantized"))
    pairs = Dataset.from_dict({"anchor": TEXTS[:8], "positive": TEXTS[8:16]})
    args = trainers.ContrastiveConfig(**quiet(tmp_path / "out", grid="6x32", per_device_train_batch_size=8))
    for folder, said in ((published, False), (tmp_path / "quantized", True)):
        caplog.clear()
        trainers.ContrastiveTrainer(folder, args, train_dataset=pairs)
        assert ("has a quantizer that fits its embeddings" in caplog.text) == said
