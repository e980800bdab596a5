"""A Router of sentence-transformers embeds documents at full depth and queries at an exit, as this project does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer

from modeling_m3bert import M3BertModel
from tests.conftest import write_modules
from tests.ecosystem.conftest import LONGEST
from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder


pytestmark = pytest.mark.slow
pytest.importorskip("sentence_transformers")

TEXTS = ["One text.", "", "Remove a whole directory tree.", "Seven words are in this short sentence."]
PROMPTS = {"query": "query: ", "document": "passage: "}
BARE = """
import glob, json, shutil
import torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Router

expected = load_file("expected.safetensors")
texts = json.loads(open("texts.json").read())

def check(model, layer, dim):
    options = {{"normalize_embeddings": True, "convert_to_tensor": True, "truncate_dim": dim}}
    queries, documents = model.encode_query(texts, **options), model.encode_document(texts, **options)
    torch.testing.assert_close(queries, expected[f"query {{layer}}x{{dim}}"], atol=1e-6, rtol=0)
    torch.testing.assert_close(documents, expected[f"document 6x{{dim}}"], atol=1e-6, rtol=0)
    similarity = expected[f"query {{layer}}x{{dim}}"] @ expected[f"document 6x{{dim}}"].T
    torch.testing.assert_close(model.similarity(queries, documents), similarity, atol=1e-6, rtol=0)

for layer in {layers}:
    for_documents = SentenceTransformer("model", trust_remote_code=True, device="cpu")
    options = {{"model_kwargs": {{"output_layer": layer}}}}
    for_queries = SentenceTransformer("model", trust_remote_code=True, device="cpu", **options)
    assert len(for_queries[0].auto_model.layers) == layer
    router = Router.for_query_document(list(for_queries), list(for_documents))
    model = SentenceTransformer(modules=[router], prompts=for_documents.prompts, device="cpu")
    for dim in (64, 384):
        check(model, layer, dim)
    model.save_pretrained(f"router-{{layer}}")
    for file in glob.glob("model/*.py"):  # the library looks for code beside the modules, but saves it inside
        shutil.copy(file, f"router-{{layer}}")
    again = SentenceTransformer(f"router-{{layer}}", trust_remote_code=True, device="cpu")
    check(again, layer, 384)
    print("PASSED", layer)
"""


@pytest.fixture
def with_exits(published, tmp_path) -> Path:
    """The real encoder with a made-up table and a made-up exit at layer 2, and with prompts."""
    model, folder = M3BertModel.from_pretrained(published), tmp_path / "model"
    table = torch.randn(model.config.vocab_size, 384).half().float()
    model.set_depths(exits={2: (torch.randn(384, 384) / 20, torch.randn(384) / 20)}, table=table)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(published).save_pretrained(folder)
    write_modules(folder, width=384, max_length=LONGEST, prompts=PROMPTS)
    return folder


def test_a_router_gives_the_vectors_of_each_depth_in_one_space(with_exits, tmp_path, run_bare):
    model, tokenizer = M3BertModel.from_pretrained(with_exits), AutoTokenizer.from_pretrained(with_exits)
    grid = Grid.parse("0,2,6x64,384")
    encoder = GridEncoder(model, tokenizer, grid, max_length=LONGEST, prompts=PROMPTS)
    expected = {}
    for role in PROMPTS:
        found = encoder.encode(TEXTS, role=role)
        expected |= {f"{role} {g}": found.at(g, normalize=True).contiguous() for g in grid}
    save_file(expected, tmp_path / "expected.safetensors")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    plain = M3BertModel.from_pretrained(with_exits)
    plain.set_depths()
    without = GridEncoder(plain, tokenizer, Grid.parse("2x64"), max_length=LONGEST, prompts=PROMPTS)
    raw = without.encode(TEXTS).at(Granularity(2, 64), normalize=True)
    assert (raw - expected["query 2x64"]).abs().max() > 0.1, "the exit is read"
    assert run_bare(BARE.format(layers=[0, 2])).count("PASSED") == 2
