"""The native encoder equals the m3BERT that it came from, converts back to it, and loads as any BERT does."""

import pytest
import torch
from transformers import AutoModel, PreTrainedModel

from m3bert.modeling import M3BertConfig, M3BertForMaskedLM, M3BertForTokenClassification, M3BertModel
from m3bert.models.conversion import convert_to_m3bert
from m3bert.models.native import convert_to_native, output_map
from tests.conftest import padded_batch, refused, tiny_config
from tests.models.test_conversion import all_states, every_backbone, random_encoder


POST_NORM = {"norm_position": "post", "norm_type": "layernorm", "mlp_gated": False, "hidden_act": "gelu"}
BIASES = {"attention_bias": True, "mlp_bias": True}


def random_m3bert(model_class: type = M3BertModel, exits: tuple[int, ...] = (), **changes) -> PreTrainedModel:
    """A post-norm m3BERT with random norms, biases and exits."""
    model = model_class(tiny_config(**{**POST_NORM, **BIASES, **changes})).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name or "bias" in name:
            torch.nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.1)
    width = model.config.hidden_size
    model.base_model.set_depths(exits={value: (torch.randn(width, width) / 6, torch.randn(width)) for value in exits})
    return model


def text_batch(pad_token_id: int) -> dict[str, torch.Tensor]:
    batch = padded_batch()
    batch["input_ids"] = torch.where(batch["attention_mask"].bool(), batch["input_ids"], pad_token_id)
    return batch


def assert_bits_equal(model: PreTrainedModel, native: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    """Equal states at every layer, on all tokens that are not padding."""
    real = batch["attention_mask"].bool()
    states, expected = all_states(native, batch), all_states(model, batch)
    assert len(states) == len(expected) == model.config.num_hidden_layers + 1
    assert all(torch.equal(state[real], reference[real]) for state, reference in zip(states, expected, strict=True))


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@every_backbone
def test_there_and_back_is_exact_to_the_last_bit(family, changes, attention):
    source = random_encoder(family, changes)
    model = convert_to_m3bert(source)
    native = convert_to_native(model)
    assert type(native) is type(source)
    for encoder in (model, native):
        encoder.set_attn_implementation(attention)
    assert_bits_equal(model, native, text_batch(changes["pad_token_id"]))
    assert native.config.max_position_embeddings == source.config.max_position_embeddings
    again = convert_to_m3bert(native)
    torch.testing.assert_close(dict(again.state_dict()), dict(model.state_dict()), atol=0, rtol=0)
    assert again.config.to_dict() == model.config.to_dict()


@pytest.mark.parametrize("family", ["Bert", "Roberta", "XLMRoberta"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_cut_model_is_exact_too(family, depth, tmp_path):
    """As the elastic checkpoint loaded at this depth, and as the whole native one loaded at this depth."""
    whole = convert_to_m3bert(random_encoder(family, {"pad_token_id": 1}))
    whole.save_pretrained(tmp_path / "elastic")
    cut = M3BertModel.from_pretrained(tmp_path / "elastic", output_layer=depth)
    native, batch = convert_to_native(cut), text_batch(1)
    assert native.config.num_hidden_layers == len(native.encoder.layer) == depth
    assert_bits_equal(cut, native, batch)
    convert_to_native(whole).save_pretrained(tmp_path / "native")
    shallow, info = AutoModel.from_pretrained(tmp_path / "native", num_hidden_layers=depth, output_loading_info=True)
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert_bits_equal(cut, shallow, batch)


def test_an_encoder_that_was_never_native_becomes_a_bert():
    """One without biases gets biases of 0."""
    model, batch = random_m3bert(attention_bias=False, mlp_bias=False), text_batch(1)
    native = convert_to_native(model)
    assert native.config.model_type == "bert"
    real = batch["attention_mask"].bool()
    for state, reference in zip(all_states(native, batch), all_states(model, batch), strict=True):
        torch.testing.assert_close(state[real], reference[real], atol=1e-5, rtol=0)
    assert convert_to_native(model, "xlm-roberta").config.model_type == "xlm-roberta"


@pytest.mark.parametrize("layer", [2, 6])
@pytest.mark.parametrize("dim", [8, 32])
def test_the_output_map_is_all_that_a_native_encoder_lacks(layer, dim, tmp_path):
    """On pooled states, since a mean over tokens commutes with it."""
    random_m3bert(exits=(2, 4)).save_pretrained(tmp_path)
    model = M3BertModel.from_pretrained(tmp_path, output_layer=layer, output_dim=dim)
    batch = text_batch(1)
    real = batch["attention_mask"].bool()
    actual = output_map(model)
    assert (actual is None) == (layer == 6 and dim == 32)
    with torch.no_grad():
        expected = model(**batch).last_hidden_state
        state = convert_to_native(model)(**batch).last_hidden_state
    for token in (lambda text, mask: text[0], lambda text, mask: text[mask].mean(dim=0)):  # pooling "cls" and "mean"
        pooled, target = (torch.stack(list(map(token, states, real))) for states in (state, expected))
        if actual is not None:
            pooled = torch.nn.functional.linear(pooled, *actual)
        torch.testing.assert_close(pooled, target, atol=1e-5, rtol=0)


@pytest.mark.parametrize("exits", [(), (2,)])
@pytest.mark.parametrize("size", [{}, {"output_layer": 2}, {"output_layer": 2, "output_dim": 8}])
def test_a_head_on_tokens_gives_the_same_logits(exits, size, tmp_path):
    random_m3bert(M3BertForTokenClassification, exits, num_labels=3).save_pretrained(tmp_path)
    model, batch = M3BertForTokenClassification.from_pretrained(tmp_path, **size), text_batch(1)
    native = convert_to_native(model)
    assert type(native).__name__ == "BertForTokenClassification"
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        expected, actual = model(**batch).logits, native(**batch).logits
    torch.testing.assert_close(actual[real], expected[real], atol=1e-5, rtol=0)
    assert native.config.num_labels == model.config.num_labels


@pytest.mark.parametrize(
    ("model_class", "changes", "reason"),
    [
        (M3BertModel, {"norm_position": "pre"}, "it is pre-norm, and BERT is post-norm. Export it to ONNX instead"),
        (M3BertModel, {"norm_type": "rmsnorm"}, "its norm is RMSNorm"),
        (M3BertModel, {"mlp_gated": True}, "its feed-forward layers are gated"),
        (M3BertModel, {"position_embedding_type": "rope"}, "its positions are rotary"),
        (M3BertModel, {"native_model_type": "distilbert", "norm_eps": 1e-5}, "DistilBERT's norm_eps is 1e-12"),
        (M3BertModel, {"native_model_type": "roberta", "pad_token_id": None}, "its config has no pad_token_id"),
        (M3BertForMaskedLM, {}, "M3BertForMaskedLM has no native equivalent: native heads of its kind"),
        (M3BertModel, {"native_model_type": "gpt2"}, "model_type='gpt2' is unknown; legal values: bert, roberta"),
    ],
)
def test_what_no_native_class_equals_is_refused(model_class, changes, reason):
    with torch.device("meta"):
        model = model_class(tiny_config(**{**POST_NORM, **BIASES, **changes}))
    refused(reason, convert_to_native, model)


def test_served_dims_are_in_the_config():
    trained = random_m3bert(matryoshka_layers=[2, 6], matryoshka_dims=[8, 32])
    config = convert_to_native(trained).config
    assert config.is_matryoshka and config.matryoshka_dimensions == [8, 32]
    untrained = convert_to_native(random_m3bert(matryoshka_layers=[], matryoshka_dims=[])).config
    assert not hasattr(untrained, "is_matryoshka")
    assert M3BertConfig().native_model_type is None
