"""A static folder and a router give this project's vectors in processes that cannot import it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.router_export import export_router
from m3bert.hub_cards.static_export import export_static
from m3bert.trainers import Granularity, Grid
from tests.conftest import save
from tests.static_checkpoints import in_8_bits, plain_tokenizer, save_static, sentencepiece_tokenizer, state_only_model


pytest.importorskip("sentence_transformers")

# Words, unknown words, special tokens in the text, no token at all, more tokens than the limit, and the last id.
TEXTS = ["read the list", "zebra in a zebra", "a <pad> is </s> not", "", "a be " * 30, "open one last file"]
KINDS = {"words": "cls", "sentencepiece": "lasttoken", "plain": "mean"}
COMPARE = """
import json
import torch
from safetensors.torch import load_file

expected, texts = load_file("expected.safetensors"), json.loads(open("texts.json").read())

def compare(name, vectors, rows=slice(None)):
    vectors = torch.as_tensor(vectors).float()
    tolerance = 1e-3 if "float16" in name else 1e-5
    unit = torch.nn.functional.normalize(vectors, dim=1)
    assert torch.allclose(vectors, unit, atol=0.01) == name.startswith("words"), name  # the normalised checkpoint
    vectors = unit
    torch.testing.assert_close(vectors, expected[name][rows], atol=tolerance, rtol=0, msg=lambda m: f"{name}: {m}")
    print("PASSED", name)
"""


@pytest.fixture
def tokenizers(tiny_tokenizer):
    return {"words": tiny_tokenizer, "sentencepiece": sentencepiece_tokenizer(), "plain": plain_tokenizer()}


def vectors_of(encoder: GridEncoder, size: Granularity, role: str | None = None):
    """Normalised vectors of the texts at a size; without a role, without a prompt."""
    alone = GridEncoder(
        encoder.model, encoder.tokenizer, Grid((size,)), pooling=encoder.pooling, max_length=encoder.max_length,
        prompts=encoder.prompts if role else {},
    )  # fmt: skip
    return alone.encode(TEXTS, role=role or "query").at(size, normalize=True).contiguous()


def leave(folder: Path, expected: dict) -> None:
    save_file(expected, folder / "expected.safetensors")
    (folder / "texts.json").write_text(json.dumps(TEXTS))


def test_a_static_folder_gives_the_vectors_of_layer_0(tokenizers, tmp_path, run_bare):
    pytest.importorskip("model2vec")
    expected = {}
    for kind, pooling in KINDS.items():
        save_static(tmp_path / kind, tokenizers[kind], pooling, normalize=kind == "words")
        checkpoint = Checkpoint(tmp_path / kind)
        sizes = {}
        for dim, dtype in ((32, "float32"), (8, "float16"), (32, "int8")):
            name = f"{kind} {dim} {dtype}"
            assert export_static(checkpoint, tmp_path / name, dim, dtype=dtype) == Granularity(0, dim)
            sizes[dtype] = (tmp_path / name / "model.safetensors").stat().st_size
            encoder = checkpoint.encoder(Grid.parse("0,6x8,32"))
            if dtype == "int8":
                table = encoder.model.elastic.table
                table.weight.data = in_8_bits(table.weight)
            expected[name] = vectors_of(encoder, Granularity(0, dim))
            expected[f"{name} query"] = vectors_of(encoder, Granularity(0, dim), "query")
        assert sizes["int8"] < 0.4 * sizes["float32"]
    leave(tmp_path, expected)
    printed = run_bare(
        COMPARE
        + """
from model2vec import StaticModel
from sentence_transformers import SentenceTransformer

for name in [name for name in expected if "query" not in name]:
    model = SentenceTransformer(name, device="cpu")
    # In float16, sentence-transformers normalises an empty text to NaN.
    rows = [row for row, text in enumerate(texts) if text or "float16" not in name]
    compare(name, model.encode([texts[row] for row in rows]), rows)
    compare(name + " query", model.encode_query(texts))
    compare(name, model.float().encode(texts))
    compare(name, StaticModel.from_pretrained(name).encode(texts))
"""
    )
    assert printed.count("PASSED") == 36, printed


def test_what_model2vec_cannot_reproduce(tokenizers, tmp_path):
    """A table that counts unknown tokens, and long texts of long tokens, which it cuts by characters first."""
    model2vec = pytest.importorskip("model2vec")
    from sentence_transformers import SentenceTransformer

    tokenizer, folder = tokenizers["words"], tmp_path / "static"
    save_static(tmp_path / "model", tokenizer, ignored=[0, 1, 2])
    export_static(Checkpoint(tmp_path / "model"), folder)
    texts = [
        "read the list", "zebra in a zebra", "<unk> list", f"{'the ' * 20}{'remove ' * 10}" + "read from text " * 9,
    ]  # fmt: skip
    encoder = Checkpoint(tmp_path / "model").encoder(Grid.parse("0x32"))
    bare = GridEncoder(encoder.model, encoder.tokenizer, encoder.grid, max_length=encoder.max_length)
    expected = bare.encode(texts).at(Granularity(0, 32), normalize=True).numpy()
    theirs = SentenceTransformer(str(folder), device="cpu").encode(texts, normalize_embeddings=True)
    assert abs(theirs - expected).max() < 1e-5
    found = model2vec.StaticModel.from_pretrained(str(folder), normalize=True).encode(texts)
    assert (abs(found - expected).max(axis=1) < 1e-5).tolist() == [True, False, False, False]
    card = (folder / "README.md").read_text()
    assert "unknown tokens, which this table counts" in card and "to 114 characters (38 times" in card


def test_a_router_gives_the_vectors_of_both_sides(tokenizers, tmp_path, run_bare):
    expected = {}
    for kind, pooling in KINDS.items():
        save_static(tmp_path / kind, tokenizers[kind], pooling, normalize=kind == "words")
        checkpoint = Checkpoint(tmp_path / kind)
        encoder, plain = checkpoint.encoder(), state_only_model(tmp_path / kind)
        for size, dtype in ((Granularity(0, 32), "float32"), (Granularity(0, 8), "float16"), (Granularity(4, 16), "")):
            if size.layer and kind == "plain":
                continue  # BERT reads its mask, and an empty text has no token to read
            name = f"{kind} {size} {dtype}"
            export_router(checkpoint, tmp_path / name, size, **({"dtype": dtype} if dtype else {}))
            own = encoder if size.layer == 0 else GridEncoder(
                plain, encoder.tokenizer, Grid((size,)), pooling=pooling, max_length=encoder.max_length,
                prompts=encoder.prompts,
            )  # fmt: skip
            expected[f"{name} query"] = vectors_of(own, size, "query")
            expected[f"{name} document"] = vectors_of(encoder, Granularity(6, size.dim), "document")
    leave(tmp_path, expected)
    printed = run_bare(
        COMPARE
        + """
from sentence_transformers import SentenceTransformer

for name in [name.removesuffix(" query") for name in expected if name.endswith("query")]:
    model = SentenceTransformer(name, device="cpu")
    queries, documents = model.encode_query(texts), model.encode_document(texts)
    compare(name + " query", queries)
    compare(name + " document", documents)
    compare(name + " document", model.encode(texts, prompt_name="document"))
    if "float16" not in name:
        assert model.similarity(queries, documents).shape == (6, 6)
"""
    )
    assert printed.count("PASSED") == 3 * len(expected) / 2, printed


def test_a_router_of_a_real_encoder_holds_what_its_readme_says(published, tmp_path):
    """Files, licence and README; the documents keep the limit of the encoder."""
    from sentence_transformers import SentenceTransformer

    model = Checkpoint(published).load()
    model.set_depths(table=torch.randn(model.config.vocab_size, 384), ignored_ids=[0, 100, 101, 102])
    source = tmp_path / "model"
    save(source, model, Checkpoint(published).tokenizer)
    (source / "LICENSE").write_text("free")
    queries, documents = export_router(Checkpoint(source), tmp_path / "router")
    assert (str(queries), str(documents)) == ("0x384", "6x384")
    names = {file.name for file in (tmp_path / "router").iterdir()}
    assert names == {
        "LICENSE", "README.md", "config_sentence_transformers.json", "document_0_Transformer", "document_1_Pooling",
        "modules.json", "query_0_StaticEmbedding", "router_config.json",
    }  # fmt: skip
    text = (tmp_path / "router" / "README.md").read_text()
    code = text.split("```python\n")[1].split("```")[0].replace("user/name", str(tmp_path / "router"))
    exec(code, {})
    assert SentenceTransformer(str(tmp_path / "router"), device="cpu").encode("one text").shape == (384,)
