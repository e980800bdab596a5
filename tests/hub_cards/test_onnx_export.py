"""An ONNX file of a granularity: the embeddings of the encoder, in onnxruntime, without its later layers."""

import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, set_seed

from m3bert.evaluation import GridEncoder
from m3bert.hub_cards import onnx_export
from m3bert.hub_cards.onnx_export import INPUTS, embed, export_onnx, halve_onnx, open_session, quantize_onnx
from m3bert.hub_cards.sizes import costs
from m3bert.modeling import M3BertModel
from m3bert.models.conversion import convert_to_m3bert
from m3bert.trainers import Granularity, Grid, Projection, nested_states, truncate
from tests.conftest import WORDS, padded_batch, tiny_config
from tests.modeling_m3bert.static_models import VOCABULARY, give_table


onnx = pytest.importorskip("onnx", reason="needs the extra onnx")
pytest.importorskip("onnxruntime", reason="needs the extra onnx")
pytest.importorskip("onnxscript", reason="needs the extra onnx")

# Tracing takes seconds per layer, so models have three. Layer 2 is not a trained one.
THREE_LAYERS = {"num_hidden_layers": 3, "matryoshka_layers": [1, 3]}
GRID = Grid.parse("1x8,2x20,3x32")
TEXTS = [" ".join(WORDS[:length]) for length in (1, 5, 2, 11, 0, 25, 3)]


@pytest.fixture(scope="module")
def encoder(tiny_tokenizer) -> GridEncoder:
    set_seed(0)
    return GridEncoder(M3BertModel(tiny_config(**THREE_LAYERS)).eval(), tiny_tokenizer, GRID, normalize=True)


@pytest.fixture(scope="module")
def files(encoder, tmp_path_factory) -> dict[Granularity, Path]:
    """The granularities of the tiny encoder."""
    folder = tmp_path_factory.mktemp("onnx") / "new"
    return {g: export_onnx(encoder, g, folder / f"model_{g}.onnx") for g in GRID}


@pytest.fixture(scope="module")
def real(minilm, tmp_path_factory) -> tuple[GridEncoder, Path]:
    """The real encoder as an m3BERT, and its full size as a file."""
    model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)
    grid, file = Grid.parse("6x384"), tmp_path_factory.mktemp("real") / "model.onnx"
    encoder = GridEncoder(convert_to_m3bert(model), tokenizer, grid, max_length=128, normalize=True)
    return encoder, export_onnx(encoder, grid.full, file)


def batches(texts: Sequence[str]) -> list[list[str]]:
    """Batches of one, two and the rest, none of which is of the traced size."""
    return [list(texts[:1]), list(texts[1:3]), list(texts[3:])]


def assert_equal(encoder: GridEncoder, file: Path, texts: Sequence[str], atol: float = 1e-4) -> None:
    """In onnxruntime, in batches, as in torch, all at once; normalised if the encoder normalises."""
    (granularity,) = Grid.parse(metadata(file)["granularity"])
    expected = replace(encoder, grid=Grid((granularity,)), prompts={}, dtype=torch.float32).encode(texts)
    session = open_session(file)
    vectors = np.concatenate([embed(session, encoder, batch) for batch in batches(texts)])
    assert vectors.dtype == np.float32 and vectors.shape == (len(texts), granularity.dim)
    np.testing.assert_allclose(vectors, expected.at(granularity).numpy(), atol=atol, rtol=0)


def run(file: Path, inputs: dict[str, torch.Tensor], output: str = "sentence_embedding") -> np.ndarray:
    return open_session(file).run([output], {name: inputs[name].numpy() for name in INPUTS})[0]


def metadata(file: Path) -> dict[str, str]:
    return {entry.key: entry.value for entry in onnx.load(file).metadata_props}


def weights_in(file: Path) -> int:
    return sum(int(np.prod(tensor.dims)) for tensor in onnx.load(file).graph.initializer)


@pytest.mark.parametrize("granularity", list(GRID), ids=str)
def test_a_file_embeds_as_the_encoder_does(encoder, files, granularity):
    assert_equal(encoder, files[granularity], TEXTS)


@pytest.mark.parametrize("lengths", [(1,), (33, 2, 7), (48,) * 4, (9, 0, 4)], ids=str)
def test_any_batch_and_length_and_rows_of_padding(encoder, files, lengths):
    inputs = padded_batch(lengths=lengths)
    for granularity, file in files.items():
        with torch.no_grad():
            states = nested_states(encoder.model, inputs, [granularity.layer])
        expected = truncate(states.pooled(granularity.layer), granularity.dim, normalize=True)
        np.testing.assert_allclose(run(file, inputs), expected.numpy(), atol=1e-4, rtol=0)
        real = inputs["attention_mask"].bool().numpy()
        tokens = states.layers[granularity.layer].numpy()[..., : granularity.dim]
        vectors = run(file, inputs, "last_hidden_state")
        np.testing.assert_allclose(vectors[real], tokens[real], atol=1e-4, rtol=0)


def test_inputs_and_outputs_are_named_and_dynamic(files):
    for granularity, file in files.items():
        graph = onnx.load(file).graph
        axes = {
            part.name: [axis.dim_param or axis.dim_value for axis in part.type.tensor_type.shape.dim]
            for part in (*graph.input, *graph.output)
        }
        assert axes == {
            "input_ids": ["batch", "tokens"],
            "attention_mask": ["batch", "tokens"],
            "last_hidden_state": ["batch", "tokens", granularity.dim],
            "sentence_embedding": ["batch", granularity.dim],
        }
        assert [part.name for part in graph.output] == ["last_hidden_state", "sentence_embedding"]
        assert {part.type.tensor_type.elem_type for part in graph.input} == {onnx.TensorProto.INT64}


@pytest.mark.slow
def test_rotary_positions_the_first_token_and_a_model_that_is_left_alone(tiny_tokenizer, tmp_path):
    model = M3BertModel(tiny_config(position_embedding_type="rope", **THREE_LAYERS)).train()
    encoder = GridEncoder(model, tiny_tokenizer, GRID, pooling="cls", normalize=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    file = export_onnx(encoder, Granularity(1, 12), tmp_path / "model.onnx", normalize=False)
    assert model.training and model.config._attn_implementation == "sdpa" and not logging.root.manager.disable
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert_equal(replace(encoder, normalize=False), file, TEXTS)
    assert_equal(replace(encoder, normalize=False), file, TEXTS[::-1])
    empty = {"input_ids": torch.ones(3, 4, dtype=torch.long), "attention_mask": torch.zeros(3, 4, dtype=torch.long)}
    assert np.isfinite(run(file, empty)).all()


def test_a_projection_is_inside_and_prompts_are_not(tiny_tokenizer, tmp_path):
    config = tiny_config(
        norm_position="post", norm_type="layernorm", mlp_gated=False, num_hidden_layers=2, matryoshka_layers=[]
    )
    encoder = GridEncoder(
        M3BertModel(config), tiny_tokenizer, Grid.parse("2x12"), projection=Projection(32, 12),
        prompts={"query": "find the text "}, max_length=9, normalize=True, dtype=torch.float16,
    )  # fmt: skip
    file = export_onnx(encoder, Granularity(2, 5), tmp_path / "model.onnx")
    assert_equal(encoder, file, TEXTS)
    # A client that pools applies the whole projection itself.
    inputs = tiny_tokenizer(TEXTS[1:2], return_tensors="pt", truncation=True, max_length=9)
    projected = encoder.projection(torch.from_numpy(run(file, inputs, "last_hidden_state")).mean(dim=1))
    vectors = torch.nn.functional.normalize(projected[:, :5].detach())
    np.testing.assert_allclose(run(file, inputs), vectors.numpy(), atol=1e-4, rtol=0)
    for smaller in (quantize_onnx(file, tmp_path / "small.onnx"), halve_onnx(file, tmp_path / "half.onnx")):
        assert (run(smaller, inputs) * vectors.numpy()).sum() > 0.97
    assert metadata(file) == {
        "granularity": "2x5", "pooling": "mean", "normalized": "true", "max_length": "9",
        "prompts": '{"query": "find the text "}',
    }  # fmt: skip
    with pytest.raises(ValueError, match="projects layer 2 to 12 dims; outside of it: 1x8"):
        export_onnx(encoder, Granularity(1, 8), tmp_path / "other.onnx")


@pytest.mark.slow
def test_another_architecture_with_its_last_token(tiny_tokenizer, tmp_path):
    sizes = {"hidden_size": 32, "intermediate_size": 37, "num_hidden_layers": 3, "num_attention_heads": 4}
    model = BertModel(BertConfig(vocab_size=99, max_position_embeddings=48, **sizes))
    encoder = GridEncoder(model, tiny_tokenizer, Grid.parse("3x32"), pooling="lasttoken")
    file = export_onnx(encoder, Granularity(1, 16), tmp_path / "model.onnx")
    assert_equal(encoder, file, TEXTS)
    unused = sum(weight.numel() for weight in (*model.encoder.layer[1:].parameters(), *model.pooler.parameters()))
    # Texts use only one row of the token types; the other rows are left out as well.
    assert weights_in(file) < model.num_parameters() - unused + 500


def test_nothing_of_this_machine_is_in_a_file(files, tmp_path):
    shallow = files[Granularity(1, 8)]
    small = quantize_onnx(shallow, tmp_path / "small.onnx")
    roots = {os.getcwd(), sys.prefix, str(Path(torch.__file__).parent), str(Path.home()), str(shallow.parent)}
    for file in (*files.values(), small):
        content = file.read_bytes()
        assert not [root for root in roots if root.encode() in content]
        assert not re.search(rb"/[\w.-]+/[\w./-]*\.py", content) and b"stack_trace" not in content
        model = onnx.load(file)
        assert not any(node.doc_string or node.metadata_props for node in model.graph.node)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("smaller", "share", "lowest", "largest"), [(quantize_onnx, 0.3, 0.97, np.inf), (halve_onnx, 0.55, 0.999, 1e-3)]
)
def test_smaller_numbers_make_smaller_files_and_keep_the_direction(real, tmp_path, smaller, share, lowest, largest):
    encoder, file = real
    small = smaller(file, tmp_path / "small.onnx")
    assert small.stat().st_size < share * file.stat().st_size
    assert metadata(small).items() >= metadata(file).items()
    sentences = ["rain", "A man plays the guitar, and a crowd listens.", "What is a tuple?"]
    vectors, expected = (embed(open_session(each), encoder, sentences) for each in (small, file))
    assert ((vectors * expected).sum(1) > lowest).all() and vectors.dtype == np.float32
    assert 0 < np.abs(vectors - expected).max() < largest


def test_a_graph_that_gives_something_else_is_not_written(encoder, files, tmp_path, monkeypatch):
    content = files[Granularity(1, 8)].read_bytes()
    monkeypatch.setattr(onnx_export, "_trace", lambda embedder, metadata: content)
    assert export_onnx(encoder, Granularity(1, 8), tmp_path / "same.onnx").is_file()
    set_seed(1)
    model = M3BertModel(tiny_config(**THREE_LAYERS)).eval()
    for number in (r"\d.*", "nan"):
        with pytest.raises(ValueError, match=rf"The ONNX graph of 1x8 differs from torch by {number}; the limit is"):
            export_onnx(replace(encoder, model=model), Granularity(1, 8), tmp_path / "other.onnx")
        with torch.no_grad():
            model.embed_tokens.weight.fill_(torch.nan)
    assert [vectors.name for vectors in tmp_path.iterdir()] == ["same.onnx"]


@pytest.mark.parametrize(
    "granularity", [pytest.param(Granularity(1, 20), marks=pytest.mark.slow), Granularity(2, 8)], ids=str
)
def test_a_graph_has_the_exit_of_its_layer_and_no_other(tiny_tokenizer, tmp_path, granularity):
    model = M3BertModel(tiny_config(**THREE_LAYERS)).eval()
    model.set_depths(exits={layer: (torch.randn(32, 32) / 6, torch.randn(32) / 6) for layer in (1, 2)})
    encoder = GridEncoder(model, tiny_tokenizer, Grid((granularity,)))
    file = export_onnx(encoder, granularity, tmp_path / "model.onnx")
    assert_equal(encoder, file, TEXTS)
    (cost,) = costs(model.config, [granularity]).values()
    assert weights_in(file) <= cost.parameters + 100


@pytest.mark.parametrize(
    ("granularity", "pooling", "paths"),
    [
        (Granularity(0, 8), "mean", {}), (Granularity(2, 32), "cls", {}), (Granularity(2, 8), "mean", {2: [1, 3]}),
        (Granularity(3, 20), "lasttoken", {}),
    ],
    ids=str,
)  # fmt: skip
def test_a_graph_reads_the_static_table(tiny_tokenizer, tmp_path, granularity, pooling, paths):
    model = M3BertModel(tiny_config(**THREE_LAYERS)).eval()
    give_table(model, layers=(0, 2, 3), paths=paths)
    encoder = GridEncoder(model, tiny_tokenizer, Grid((granularity,)), pooling=pooling)
    file = export_onnx(encoder, granularity, tmp_path / "model.onnx")
    assert_equal(encoder, file, TEXTS)
    if granularity.layer == 0:  # the columns of the table and no other weights
        assert VOCABULARY * granularity.dim <= weights_in(file) <= VOCABULARY * granularity.dim + 50
        small = quantize_onnx(file, tmp_path / "quantized.onnx")
        table = model.elastic.table.weight[:, : granularity.dim]
        step = (table.max() - table.min()).item() / 127  # 7 bits
        assert_equal(encoder, small, TEXTS, atol=step)
        assert file.stat().st_size - small.stat().st_size > 2 * VOCABULARY * granularity.dim
