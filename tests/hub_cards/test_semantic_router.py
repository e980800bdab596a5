"""The layout of vLLM's semantic router: what the router does with a graph gives the embeddings of that depth."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import CanineTokenizer

from m3bert.commands.export import main
from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.onnx_export import PACKAGES, open_session
from m3bert.hub_cards.onnx_graphs import write_semantic_router
from m3bert.trainers import Projection
from tests.conftest import WORDS, word_tokenizer
from tests.elastic_repositories import WIDTH, save_elastic


# The longest is truncated to 40 tokens.
TEXTS = [" ".join(WORDS[:length]) for length in (1, 7, 60, 3)]


@pytest.fixture(autouse=True)
def own_modules(monkeypatch, tmp_path):
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))


def as_the_router(folder: Path, layer: int, texts: list[str]) -> np.ndarray:
    """The router's steps: each token of the tokenizer is real, and the mean of their vectors has unit length."""
    rows = [encoding.ids for encoding in Tokenizer.from_file(str(folder / "tokenizer.json")).encode_batch(texts)]
    ids = np.full((len(rows), max(map(len, rows))), json.loads((folder / "config.json").read_text())["pad_token_id"])
    mask = np.zeros_like(ids)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = tokens, 1
    session = open_session(folder / "onnx" / f"layer-{layer}" / "model.onnx")
    (states,) = session.run(["last_hidden_state"], {"input_ids": ids, "attention_mask": mask})
    means = (states * mask[..., None]).sum(axis=1) / mask.sum(axis=1, keepdims=True)
    return means / np.linalg.norm(means, axis=1, keepdims=True)


@pytest.mark.parametrize(
    ("options", "projected", "layers"), [([], None, [2, 4, 6]), (["--granularity", "4x12"], 12, [4, 6])]
)
def test_the_router_embeds_as_the_encoder_does_at_each_depth(options, projected, layers, tmp_path):
    """Depth 4 is a path whose exit reads the static table, and the tokenizer was published with padding."""
    library = pytest.importorskip("sentence_transformers")
    for package in PACKAGES:
        pytest.importorskip(package, reason="needs the extra onnx")
    tokenizer, source, folder = word_tokenizer(), str(tmp_path / "model"), tmp_path / "router"
    tokenizer.backend_tokenizer.enable_padding(pad_id=1, pad_token="<pad>", length=48)
    projection = Projection(WIDTH, projected) if projected else None
    save_elastic(tmp_path / "model", tokenizer, projection=projection)
    main(["--layout", "semantic-router", "--model_name_or_path", source, "--output_dir", str(folder), *options])
    listed = json.loads((folder / "onnx" / "model_config.json").read_text())
    assert listed == {"total_layers": 6, "hidden_size": projected or WIDTH, "available_layers": layers}
    assert sorted(file.parent.name for file in folder.rglob("*.onnx")) == [f"layer-{layer}" for layer in layers]
    for layer in layers:
        model = library.SentenceTransformer(
            source, device="cpu", trust_remote_code=True, model_kwargs={"output_layer": layer}
        )
        expected = model.encode(TEXTS, normalize_embeddings=True)
        np.testing.assert_allclose(as_the_router(folder, layer, TEXTS), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--granularity", "0x32"], "0x32: the semantic router reads 1x32 to 6x32, and truncates"),
        (["--granularity", "2x8"], "2x8: the semantic router reads 1x32 to 6x32, and truncates"),
        (["--pooling", "cls"], "pooling='cls': the semantic router takes the mean over the tokens"),
        (["--int8"], "--layout semantic-router cannot be combined with --int8"),
        (["--tasks", "stsb"], "--layout semantic-router cannot be combined with --tasks"),
        (["--normalize", "false"], "--layout semantic-router cannot be combined with --normalize"),
        (["--output_dir", "model"], "cannot be combined with --output_dir model, the encoder"),
    ],
)
def test_what_the_router_does_not_read_is_refused_before_anything_is_written(
    options, message, tmp_path, tiny_tokenizer, monkeypatch
):
    for package in PACKAGES:
        pytest.importorskip(package, reason="needs the extra onnx")
    monkeypatch.chdir(tmp_path)
    save_elastic(tmp_path / "model", tiny_tokenizer)
    before = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("*") if file.is_file()}
    with pytest.raises(ValueError, match=message):
        main(["--layout", "semantic-router", "--model_name_or_path", "model", "--output_dir", "router", *options])
    assert {file: file.stat().st_mtime_ns for file in before} == before and not list(tmp_path.rglob("*.onnx"))
    assert not (tmp_path / "router" / "config.json").exists()


def test_a_tokenizer_without_its_file_is_refused(tmp_path, tiny_tokenizer):
    model = save_elastic(tmp_path / "model", tiny_tokenizer)
    encoder = GridEncoder.from_pretrained(tmp_path / "model", grid="6x32")
    with pytest.raises(ValueError, match="CanineTokenizer has no tokenizer.json"):
        write_semantic_router(GridEncoder(model, CanineTokenizer(), encoder.grid), [], tmp_path / "router", [])
    assert not (tmp_path / "router").exists()
