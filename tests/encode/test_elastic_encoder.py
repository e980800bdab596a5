"""A `GridEncoder` of an elastic repository embeds as sentence-transformers does at each size, without remote code."""

from __future__ import annotations

import pytest
import torch

from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.onnx_export import export_onnx
from m3bert.trainers import Granularity, Grid, Projection
from tests.elastic_repositories import WIDTH, save_elastic


SIZES = Grid.parse("0,2,4,6x8,32")


@pytest.mark.parametrize(
    ("kind", "pooling", "normalize"),
    [("bert", "mean", False), ("mpnet", "cls", True), ("modernbert", "mean", True), ("gemma3_text", "mean", False)],
)
def test_every_size_is_that_of_sentence_transformers(kind, pooling, normalize, tmp_path, tiny_tokenizer, sentences):
    library = pytest.importorskip("sentence_transformers")
    save_elastic(tmp_path / "model", tiny_tokenizer, kind, pooling=pooling, normalize=normalize)
    encoder = GridEncoder.from_pretrained(tmp_path / "model", grid=SIZES)
    actual = encoder.encode(sentences[:9])
    for size in SIZES:
        sizes = {"output_layer": size.layer, "output_dim": size.dim}
        model = library.SentenceTransformer(
            str(tmp_path / "model"), device="cpu", trust_remote_code=True, model_kwargs=sizes
        )
        expected = model.encode(sentences[:9], prompt_name="query", convert_to_tensor=True)
        torch.testing.assert_close(actual.at(size), expected, atol=1e-5, rtol=0)


def test_a_projection_follows_the_exits(tmp_path, tiny_tokenizer, sentences):
    """Exits lead to the space before it, so one projection serves all depths with an exit, the table too."""
    save_elastic(tmp_path / "plain", tiny_tokenizer)
    projection = Projection(WIDTH, 12)
    plain = GridEncoder.from_pretrained(tmp_path / "plain", grid="0,2,4,6x32").encode(sentences[:5])
    save_elastic(tmp_path / "model", tiny_tokenizer, projection=projection)
    encoder = GridEncoder.from_pretrained(tmp_path / "plain", projection=projection, grid="0,2,4,6x8,12")
    actual = encoder.encode(sentences[:5])
    alone = GridEncoder.from_pretrained(tmp_path / "plain", projection=projection, grid="0x8").encode(sentences[:5])
    for depth in (0, 2, 4, 6):
        expected = projection(plain.at(Granularity(depth, 32))).detach()
        torch.testing.assert_close(actual.at(Granularity(depth, 12)), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(alone.at(Granularity(0, 8)), actual.at(Granularity(0, 8)), atol=1e-5, rtol=0)
    assert GridEncoder.from_pretrained(tmp_path / "model").grid == Grid.parse("0,2,4,6x12")
    with pytest.raises(ValueError, match=r"The model projects layer 0, 2, 4, 6 to 12 dims; outside of it: 3x12\."):
        GridEncoder.from_pretrained(tmp_path / "model", grid="3x12")


@pytest.mark.parametrize("size", ["0x8", "4x8"])
def test_a_size_is_exported_to_onnx(size, tmp_path, tiny_tokenizer):
    """The export compares the graph with torch."""
    pytest.importorskip("onnxscript", reason="needs the extra onnx")
    save_elastic(tmp_path / "model", tiny_tokenizer, normalize=True)
    encoder = GridEncoder.from_pretrained(tmp_path / "model", grid=size)
    file = export_onnx(encoder, Granularity.parse(size), tmp_path / "model.onnx")
    assert (file.stat().st_size < 40_000) == (size == "0x8"), "a table has no layers"
