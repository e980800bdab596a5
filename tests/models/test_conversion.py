"""Conversion of BERT-family encoders is exact, and what cannot be exact is refused."""

import pytest
import torch
import transformers
from transformers import AutoModel, AutoTokenizer

from m3bert.commands.convert import convert
from m3bert.modeling import M3BertModel
from m3bert.models import anatomy
from m3bert.models.conversion import convert_to_m3bert, take_layers
from tests.conftest import padded_batch, refused
from tests.elastic_repositories import save_elastic


SIZES = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4,
    "max_position_embeddings": 40, "initializer_range": 0.2,
}  # fmt: skip
BACKBONES = [
    ("Bert", {"pad_token_id": 1}),
    ("Bert", {"pad_token_id": 0, "hidden_act": "relu", "layer_norm_eps": 1e-6, "type_vocab_size": 3}),
    ("Roberta", {"pad_token_id": 1}),
    ("XLMRoberta", {"pad_token_id": 1, "type_vocab_size": 1}),
    ("Camembert", {"pad_token_id": 1, "type_vocab_size": 1}),
    ("Data2VecText", {"pad_token_id": 1}),
    ("Electra", {"pad_token_id": 1, "embedding_size": 32}),
    ("DistilBert", {"pad_token_id": 1, "dim": 32, "hidden_dim": 37, "n_layers": 3, "n_heads": 4, "hidden_size": 32}),
]
every_backbone = pytest.mark.parametrize(
    ("family", "changes"), BACKBONES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BACKBONES)]
)


def random_encoder(family: str, changes: dict) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    model = getattr(transformers, f"{family}Model")(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name.lower() or "bias" in name:
            torch.nn.init.normal_(parameter, mean=float("weight" in name), std=0.1)
    return model


def all_states(model, batch):
    with torch.no_grad():
        return model(**batch, output_hidden_states=True).hidden_states


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@every_backbone
def test_states_are_equal_at_every_layer(family, changes, attention):
    source = random_encoder(family, changes)
    converted = convert_to_m3bert(source)
    assert not converted.training
    for model in (source, converted):
        model.set_attn_implementation(attention)
    batch = padded_batch()
    batch["input_ids"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], changes["pad_token_id"])
    real = batch["attention_mask"].bool()
    states, expected = all_states(converted, batch), all_states(source, batch)
    assert len(states) == len(expected) == 4
    for state, reference in zip(states, expected, strict=True):
        torch.testing.assert_close(state[real], reference[real], atol=1e-5, rtol=0)


def test_a_student_of_chosen_layers_has_the_states_of_these_layers_alone(tmp_path):
    source = random_encoder("Bert", {"pad_token_id": 1, "num_hidden_layers": 6})
    student = convert_to_m3bert(source, layers=[1, 4, 6])
    batch = padded_batch()
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        state = source.embeddings(batch["input_ids"])
        expected = [state]
        for layer in (1, 4, 6):
            masked = torch.where(real, 0.0, torch.finfo(torch.float32).min)[:, None, None]
            state = source.encoder.layer[layer - 1](state, masked)
            expected.append(state)
    assert student.config.num_hidden_layers == 3 and student.config.legal_layers == [1, 2, 3]
    student.save_pretrained(tmp_path)
    for model in (student, M3BertModel.from_pretrained(tmp_path)):
        for results, reference in zip(all_states(model, batch), expected, strict=True):
            torch.testing.assert_close(results[real], reference[real], atol=1e-5, rtol=0)
    assert M3BertModel.from_pretrained(tmp_path, output_layer=2).config.source_layers == [1, 4]
    take_layers(student, [2, 3])
    assert student.config.source_layers == [4, 6] and len(student.layers) == 2


@pytest.mark.parametrize("layers", [[], [1, 4], [2, 1]])
def test_layers_that_a_model_lacks_are_refused(layers):
    with pytest.raises(ValueError, match=r"layers=\[.*\] must be ascending and within 1\.\.3"):
        convert_to_m3bert(random_encoder("Bert", {"pad_token_id": 1}), layers=layers)


def test_the_longest_text_still_fits():
    source = random_encoder("XLMRoberta", {"pad_token_id": 1})
    converted = convert_to_m3bert(source)
    ids = torch.randint(5, 99, (2, 38))
    assert converted.config.max_position_embeddings == 38
    torch.testing.assert_close(converted(ids).last_hidden_state, source(ids).last_hidden_state, atol=1e-5, rtol=0)
    refused("38 positions", converted, torch.randint(5, 99, (2, 39)))


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        (
            "ModernBert",
            {"pad_token_id": 0, "cls_token_id": 0, "sep_token_id": 0},
            "model type 'modernbert' is no BERT",
        ),
        ("MPNet", {"pad_token_id": 1}, "model type 'mpnet' is no BERT"),
        ("Albert", {"pad_token_id": 0}, "model type 'albert' is no BERT"),
        ("Bert", {"is_decoder": True}, "it is a decoder"),
        ("Bert", {"position_embedding_type": "relative_key"}, "its positions are 'relative_key', not absolute"),
        ("Electra", {"embedding_size": 16}, "projected to the hidden size"),
        ("Qwen3", {"head_dim": 8, "num_key_value_heads": 4}, "model type 'qwen3' is no BERT"),
        ("NomicBert", {}, "model type 'nomic_bert' is no BERT"),
        ("Ernie", {}, "model type 'ernie' is no BERT"),
    ],
)
def test_what_is_not_exact_is_refused_with_the_reason(family, changes, reason):
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
    with torch.device("meta"):
        model = getattr(transformers, f"{family}Model")(config)
    refused(f"{family}Config cannot .*exactly: .*{reason}.*`m3bert fit` makes any", convert_to_m3bert, model)


TEXTS = ["A short one.", "", "A man is playing a guitar on the stage while many people listen to him.", "word " * 600]


def test_sentence_embeddings_survive_the_command_line(minilm, tmp_path):
    sentence_transformers = pytest.importorskip("sentence_transformers")
    expected = sentence_transformers.SentenceTransformer(minilm).encode(TEXTS[:3])
    convert(minilm, str(tmp_path))
    modules = sentence_transformers.sentence_transformer.modules
    transformer = modules.Transformer(str(tmp_path))
    pooling = modules.Pooling(transformer.get_embedding_dimension(), "mean")
    actual = sentence_transformers.SentenceTransformer(modules=[transformer, pooling]).encode(
        TEXTS[:3], normalize_embeddings=True
    )
    torch.testing.assert_close(torch.from_numpy(actual), torch.from_numpy(expected), atol=1e-5, rtol=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert set(tokenizer("a text")) == {"input_ids", "attention_mask"}
    assert len(tokenizer("word " * 600, truncation=True)["input_ids"]) == 512


@pytest.mark.parametrize("kind", ["bert", "modernbert", "qwen3"])
def test_a_stored_anatomy_is_read_at_every_size_and_not_probed(kind, tiny_tokenizer, tmp_path, monkeypatch):
    model = save_elastic(tmp_path / "elastic", tiny_tokenizer, kind)
    sizes = [{}, {"output_layer": 2}, {"output_layer": 4}]
    probed = [
        anatomy.anatomy_of(AutoModel.from_pretrained(tmp_path / "elastic", trust_remote_code=True, **size))
        for size in sizes
    ]
    anatomy.store_anatomy(model)
    model.save_pretrained(tmp_path / "stored")
    monkeypatch.delattr(anatomy, "_probe")
    for size, expected in zip(sizes, probed, strict=True):
        loaded = AutoModel.from_pretrained(tmp_path / "stored", trust_remote_code=True, **size)
        assert anatomy.anatomy_of(loaded) == expected
