"""sentence-transformers reads a published checkpoint at any granularity, as this project does."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from m3bert.evaluation import GridEncoder
from m3bert.modeling import M3BertModel
from m3bert.trainers import Granularity, Grid, Projection
from tests.conftest import assert_close, write_modules
from tests.ecosystem.conftest import LONGEST, linked


pytest.importorskip("sentence_transformers")

TEXTS = [
    "One text.",
    "",
    "Remove a whole directory tree; path must point to a directory, and not to a symbolic link to one.",
    "wörds that no vocabulary has, ½ of them",
    "A text that is too long, " + "and longer, " * 200,
    "Seven words are in this short sentence.",
]
SIZES = [Granularity(2, 128), Granularity(4, 64), Granularity(6, 384)]
# Folder, what SentenceTransformer is told, and the name of the vectors that it must give.
READINGS = [
    ("mean", {}, "mean 6x384"),
    *(("mean", {"truncate_dim": g.dim, "model_kwargs": {"output_layer": g.layer}}, f"mean {g}") for g in SIZES),
    ("mean", {"model_kwargs": {"output_layer": 4, "output_dim": 64}}, "mean 4x64"),
    ("mean", {"truncate_dim": 64, "model_kwargs": {"output_dim": 64, "output_layer": 4}}, "mean 4x64"),
    ("cls", {}, "cls 6x384"),
    ("cls", {"truncate_dim": 128, "model_kwargs": {"output_layer": 2}}, "cls 2x128"),
    ("projected", {}, "projected 6x48"),
    ("projected", {"truncate_dim": 16}, "projected 6x16"),
]
BARE = """
import json, logging
logging.basicConfig(level=logging.INFO)
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

expected = load_file("expected.safetensors")
texts = json.loads(open("texts.json").read())
for folder, options, name in {readings}:
    model = SentenceTransformer(folder, trust_remote_code=True, device="cpu", **options)
    vectors = model.encode(texts, normalize_embeddings=True, convert_to_tensor=True)
    torch.testing.assert_close(vectors, expected[name], atol=1e-6, rtol=0)
    assert vectors.norm(dim=1).allclose(torch.ones(len(texts)))
    layer, dim = name.split()[1].split("x")
    assert len(model[0].auto_model.layers) == int(layer)
    if options.keys() != {{"model_kwargs"}}:  # the library reports the published width, less truncate_dim
        assert model.get_embedding_dimension() == int(dim)
    print("PASSED", name)
"""


def test_any_granularity_is_encoded_alike(published, tmp_path, run_bare):
    projection = Projection(384, 48)
    shutil.copytree(published, tmp_path / "mean", copy_function=os.link)
    options = {"width": 384, "max_length": LONGEST}
    write_modules(linked(published, tmp_path / "cls"), pooling="cls", **options)
    write_modules(linked(published, tmp_path / "projected"), projection=projection, **options)
    model, tokenizer = M3BertModel.from_pretrained(published), AutoTokenizer.from_pretrained(published)
    expected = {}
    for name, grid, settings in (
        ("mean", "2,4,6x64,128,384", {}),
        ("cls", "2,6x128,384", {"pooling": "cls"}),
        ("projected", "6x16,48", {"projection": projection}),
    ):
        encoder = GridEncoder(model, tokenizer, Grid.parse(grid), max_length=LONGEST, batch_size=4, **settings)
        found = encoder.encode(TEXTS)
        expected |= {f"{name} {g}": found.at(g, normalize=True).contiguous() for g in encoder.grid}
    save_file(expected, tmp_path / "expected.safetensors")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))

    whole = GridEncoder(model, tokenizer, Grid.parse("6x384")).encode(TEXTS[4:5]).at(SIZES[-1], normalize=True)
    assert (whole - expected["mean 6x384"][4:5]).abs().max() > 1e-3, "the longest text is cut"
    assert (expected["mean 6x384"] - expected["cls 6x384"]).abs().max() > 1e-2

    printed = run_bare(BARE.format(readings=READINGS))
    assert printed.count("PASSED") == len(READINGS)
    assert printed.count("Loading SentenceTransformer model from") == len(READINGS)
    for complaint in ("No modules.json", "mean pooling", "WARNING:sentence_transformers", "WARNING:transformers"):
        assert complaint not in printed


def test_similarity_is_the_cosine_and_prefixes_need_no_normalising(published, tmp_path):
    """Cut vectors are not of unit length; their cosines are those of ours all the same."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(published), trust_remote_code=True, truncate_dim=64, device="cpu")
    vectors = model.encode(TEXTS, convert_to_tensor=True)
    assert model.similarity_fn_name == "cosine" and not vectors.norm(dim=1).allclose(torch.ones(len(TEXTS)))
    unit = torch.nn.functional.normalize(vectors)
    assert_close(model.similarity(vectors, vectors), unit @ unit.T)
