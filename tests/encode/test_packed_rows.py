"""Documents in a packed row are encoded and trained as if each were alone."""

import pytest
import torch
import transformers

from m3bert.encode.packed_rows import PACKABLE, REFUSED, Flattened
from m3bert.modeling import M3BertForMaskedLM
from m3bert.trainers import Contrastive, Grid, MultigranularMLM, NestedModel, nested_states
from m3bert.trainers.core import column_states
from tests.conftest import assert_close, refused, tiny_config
from tests.encode.test_states import EXTRA, SIZES, backbone


# Two rows: three documents, of which one has a single token, and two documents and padding.
LENGTHS = [[7, 1, 5], [6, 4]]
WIDTH = 13
GRID = Grid.parse("2,4x8,32")
MASKED_LMS = [name for name in PACKABLE if name != "qwen3"]  # qwen3 has no masked-LM head
ATTENTION = ["eager", "sdpa"]


def packed_batch() -> dict[str, torch.Tensor]:
    batch = {name: torch.zeros(len(LENGTHS), WIDTH, dtype=torch.long) for name in ("input_ids", "document_ids")}
    batch["input_ids"] += 1
    for row, lengths in enumerate(LENGTHS):
        place = 0
        for number, length in enumerate(lengths, start=1):
            batch["input_ids"][row, place : place + length] = torch.randint(5, 99, (length,))
            batch["document_ids"][row, place : place + length] = number
            place += length
    return batch


def documents(batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The places of each document in the batch, `(rows, tokens)` each."""
    ids = batch["document_ids"]
    rows = torch.arange(len(ids))[:, None]
    return [
        (rows == row) & (ids == number) for row, lengths in enumerate(LENGTHS) for number in range(1, len(lengths) + 1)
    ]


def masked_lm(model_type: str, attention: str) -> transformers.PreTrainedModel:
    """A tiny model in float64, without dropout."""
    if model_type == "m3bert":
        config = tiny_config(num_hidden_layers=4, matryoshka_layers=[2, 4])
        model = M3BertForMaskedLM._from_config(config, attn_implementation=attention)
        model.model.set_depths(exits={2: (torch.randn(32, 32) * 0.2, torch.zeros(32))})
        return model.double().eval()
    values = {**SIZES, **EXTRA.get(model_type, {})}
    if model_type == "modernbert":  # a window that is shorter than the documents
        values |= {"layer_types": ["full_attention", "sliding_attention"] * 2, "local_attention": 4}
    config = transformers.AutoConfig.for_model(model_type, **values)
    model = transformers.AutoModelForMaskedLM.from_config(config, attn_implementation=attention)
    return model.double().eval()


WAYS = [(name, attention, False) for name in MASKED_LMS for attention in ATTENTION]
WAYS += [(name, "sdpa", True) for name in ("bert", "m3bert", "modernbert", "roberta")]
WAYS.remove(("mpnet", "sdpa", False))  # it adds a bias to its scores, which transformers has no sdpa for


@pytest.mark.parametrize(("model_type", "attention", "own_rows"), WAYS)
def test_loss_and_gradients_of_a_document_are_those_of_the_document_alone(
    model_type, attention, own_rows, monkeypatch
):
    """With one pass over the packed rows, and with documents in rows of their own, as on a CPU."""
    monkeypatch.setattr("m3bert.trainers.core.column_states.encodes_own_rows", lambda encoder: own_rows)
    model = NestedModel(masked_lm(model_type, attention), MultigranularMLM(GRID))
    batch = packed_batch()
    labelled = torch.where(torch.rand(batch["input_ids"].shape) < 0.5, batch["input_ids"], -100)
    labelled[:, 0] = 5
    # EuroBERT's eager attention takes the softmax in float32, whatever the type of the weights.
    tolerance = 1e-5 if (model_type, attention) == ("eurobert", "eager") else 1e-6
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}

    def loss_and_gradients(labels: torch.Tensor, **inputs: torch.Tensor) -> list[torch.Tensor]:
        loss = model(labels=labels, num_items_in_batch=2, **inputs)["loss"]
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        return [loss, *(torch.zeros(()) if gradient is None else gradient for gradient in gradients)]

    for places in documents(batch):
        alone = batch["input_ids"][places][None]
        expected = loss_and_gradients(labelled[places][None], input_ids=alone, attention_mask=torch.ones_like(alone))
        found = loss_and_gradients(torch.where(places, labelled, -100), **batch)
        for name, one, other in zip(["loss", *parameters], found, expected, strict=True):
            torch.testing.assert_close(
                one, other, atol=tolerance, rtol=tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )
        assert any(gradient.abs().max() > 1e-3 for gradient in found) or (labelled[places] == -100).all()


@pytest.mark.parametrize("model_type", PACKABLE)
def test_states_at_every_layer_are_those_of_the_document_alone(model_type):
    model, batch = backbone(model_type).double(), packed_batch()
    with torch.no_grad():
        states = nested_states(model, batch, [0, 2, 4])
        for places in documents(batch):
            alone = nested_states(model, {"input_ids": batch["input_ids"][places][None]}, [0, 2, 4])
            for layer, state in states.layers.items():
                assert_close(state[places], alone.layers[layer][0])
    assert torch.equal(states.attention_mask, (batch["document_ids"] > 0).long())


def test_flash_attention_gets_all_documents_in_one_row():
    """With the arguments that flash attention reads, which m3BERT understands with any attention."""
    model, batch = backbone("m3bert").double(), packed_batch()
    flat = Flattened.of(batch, 0)
    assert flat.inputs["cu_seq_lens_q"].tolist() == [0, 7, 8, 13, 19, 23]
    assert flat.inputs["cu_seq_lens_q"].dtype == torch.int32
    assert flat.inputs["max_length_q"] == 7
    assert Flattened.of(batch, 2).inputs["position_ids"][0, :9].tolist() == [2, 3, 4, 5, 6, 7, 8, 2, 2]
    with torch.no_grad():
        expected = nested_states(model, batch, [4]).layers[4]
        found = flat.padded(model(**flat.inputs).last_hidden_state)
    real = batch["document_ids"] > 0
    assert_close(found[real], expected[real])


def test_a_cpu_encodes_documents_in_rows_of_their_own():
    assert column_states.encodes_own_rows(backbone("bert"))
    assert not column_states.encodes_own_rows(backbone("bert").to("meta"))


@pytest.mark.parametrize("model_type", sorted(REFUSED))
def test_refused_by_name(model_type):
    for states in (nested_states, column_states.states_of_rows):
        with pytest.raises(ValueError, match=f"model_type='{model_type}' cannot read packed rows"):
            states(backbone(model_type), packed_batch(), [4])


def test_packed_rows_are_not_pooled():
    batch = packed_batch()
    refused("A packed row holds several texts", nested_states(backbone("bert"), batch, [4]).pooled, 4)
    with pytest.raises(ValueError, match="A packed row holds several texts"):
        NestedModel(backbone("bert"), Contrastive(GRID))(anchor=batch, positive=batch)
