"""`m3bert join`: a plain model that searches an index of another one, the map back, and what is refused."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from torch.nn.functional import cosine_similarity, normalize
from transformers import BertModel

import m3bert
from m3bert.commands.fit import main as fit
from m3bert.commands.join import main as join
from m3bert.data.teacher import TeacherEmbeddings
from m3bert.exits.space_map import SpaceMap
from tests.conftest import refused, save, write_modules
from tests.exits.test_fit import random_texts


TEXTS = sorted({*random_texts(150)})


def write_rows(file, texts, vectors):
    rows = ({"text": text, "vector": vector} for text, vector in zip(texts, vectors, strict=True))
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def index_of(source, width, texts=TEXTS):
    """Vectors `(texts, width)` of another model: those of the source in another space."""
    draw = torch.randn(20, width, generator=torch.Generator().manual_seed(1))
    return normalize(torch.from_numpy(SentenceTransformer(source).encode(texts)) @ draw)


@pytest.fixture
def source(encoder_folder):
    return str(encoder_folder)


@pytest.mark.parametrize("width", [12, 20, 28])
def test_a_plain_model_searches_the_index(source, width, tmp_path, capsys):
    index, out = index_of(source, width), tmp_path / "out"
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS, index.tolist())
    join([source, str(out), "--vectors", rows])
    model = SentenceTransformer(str(out))  # without remote code
    assert [type(part).__name__ for part in model] == ["Transformer", "Pooling", "Dense", "Normalize"]
    queries = torch.from_numpy(model.encode_query(TEXTS))
    assert queries.shape == index.shape and cosine_similarity(queries, index).mean() > 0.99
    assert (out / "model.safetensors").read_bytes() == Path(source, "model.safetensors").read_bytes()
    assert not [*out.glob("*.py")] and not (tmp_path / "out.join").exists()
    back = torch.from_numpy(np.load(out / "from_index.npy"))
    of_source = torch.from_numpy(SentenceTransformer(source).encode(TEXTS))
    assert cosine_similarity(index @ back[1:] + back[0], of_source).mean() > (0.7 if width == 12 else 0.95)
    assert f"Read {len(TEXTS)} rows; their vectors have {width} dims." in capsys.readouterr().out


def test_a_joined_model_can_join_again(source, tmp_path):
    """A Dense that the model was published with gives its documents; the map replaces it."""
    index = index_of(source, 12)
    m3bert.join(source, TEXTS, TeacherEmbeddings(TEXTS, index.numpy())).save(tmp_path / "first")
    first = str(tmp_path / "first")
    other = index_of(source, 20)
    joined = m3bert.join(first, TEXTS, TeacherEmbeddings(TEXTS, other.numpy()))
    joined.save(tmp_path / "second")
    queries = torch.from_numpy(SentenceTransformer(str(tmp_path / "second")).encode(TEXTS))
    assert cosine_similarity(queries, other).mean() > 0.99
    documents = torch.from_numpy(SentenceTransformer(first).encode(TEXTS))
    expected = SpaceMap.fit(other, documents, maps_documents=True)
    torch.testing.assert_close(joined.from_index.affine, expected.affine, atol=1e-3, rtol=1e-3)
    refused("first' holds a model: pass overwrite=True, or name another folder", joined.save, first)


def test_queries_and_documents_have_their_prompts(source, tmp_path):
    SentenceTransformer(source).save(str(tmp_path / "prompted"))
    prompts = {"query": "name: ", "document": "text: "}
    write_modules(tmp_path / "prompted", width=20, max_length=32, prompts=prompts, normalize=True)
    model, index = SentenceTransformer(str(tmp_path / "prompted")), index_of(source, 12)
    joined = m3bert.join(tmp_path / "prompted", TEXTS, TeacherEmbeddings(TEXTS, index.numpy()))
    queries = joined.encoder.encode(TEXTS, role="query").at(joined.encoder.grid.granularities[0])
    assert cosine_similarity(queries, torch.from_numpy(model.encode_query(TEXTS))).min() > 1 - 1e-5
    documents = torch.from_numpy(model.encode_document(TEXTS))
    torch.testing.assert_close(joined.to_index.affine, SpaceMap.fit(queries, index).affine)
    back = SpaceMap.fit(index, documents, maps_documents=True)
    torch.testing.assert_close(joined.from_index.affine, back.affine, atol=1e-3, rtol=1e-3)
    joined.save(tmp_path / "out")
    assert SentenceTransformer(str(tmp_path / "out")).prompts == prompts


def test_a_dry_run_says_what_is_kept_and_writes_no_model(source, tmp_path, tiny_tokenizer, capsys):
    save(tmp_path / "bare", BertModel.from_pretrained(source, add_pooling_layer=False), tiny_tokenizer)
    source = str(tmp_path / "bare")  # whose pooler is random each time that it is loaded
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS, (2 * index_of(source, 12)).tolist())
    line = [source, str(tmp_path / "out"), "--vectors", rows]
    join([*line, "--dry_run"])
    said = capsys.readouterr().out
    assert "keep" in said and "Twice as many rows may add" in said and not (tmp_path / "out").exists()
    assert "Warning: the vectors of the index do not have unit length" in said and "32 tokens" not in said
    join(line)  # from the embeddings that the first call has made
    assert [type(part).__name__ for part in SentenceTransformer(str(tmp_path / "out"))][-1] == "Dense"
    refused("out holds config.json: pass --overwrite to replace it", join, line)
    join([*line, "--overwrite"])


def test_rows_that_are_longer_than_queries_are_a_warning(source, tmp_path, capsys):
    texts = [f"{text} {' a list' * 16}" for text in TEXTS]
    rows = write_rows(tmp_path / "rows.jsonl", texts, index_of(source, 12, texts).tolist())
    join([source, str(tmp_path / "out"), "--vectors", rows, "--dry_run"])
    assert "Warning: 0.0% of the rows have fewer than 32 tokens, as queries have." in capsys.readouterr().out


GOOD = [[float(row + 1), 1.0] for row in range(60)]


@pytest.mark.parametrize(
    ("texts", "vectors", "message"),
    [
        (TEXTS[:60], [*GOOD[:59], [1.0, 2.0, 3.0]], "row 60: the vector has 3 dims, and the first one 2"),
        (TEXTS[:60], [*GOOD[:59], [1.0, float("nan")]], "row 60: 'vector' has numbers that are not finite"),
        (TEXTS[:60], [*GOOD[:59], [0.0, 0.0]], "row 60: 'vector' is zero"),
        ([*TEXTS[:59], TEXTS[0]], GOOD, r"row 60: the text has another vector than in .*rows.jsonl, row 1"),
        (TEXTS[:49], GOOD[:49], "49 texts are too few to join an index: 50 are the minimum"),
    ],
)
def test_rows_that_cannot_be_joined_are_refused(texts, vectors, message, source, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", texts, vectors)
    refused(message, join, [source, str(tmp_path / "out"), "--vectors", rows])
    assert [file.name for file in tmp_path.iterdir()] == ["rows.jsonl"]


def test_what_else_cannot_be_joined_is_refused(source, tmp_path):
    rows = write_rows(tmp_path / "rows.jsonl", TEXTS, index_of(source, 12).tolist())
    line = [source, str(tmp_path / "out"), "--vectors", rows]
    refused(r"rows.jsonl lacks the column\(s\) body; it has text, vector", join, [*line, "--text_column", "body"])
    refused("is the source: name another folder for the result", join, [source, *line[:1], *line[2:]])
    fit([source, str(tmp_path / "elastic"), "--target_vectors", rows, "--depths", "1-1", "--no_static"])
    refused("elastic is elastic: join a plain model of it", join, [str(tmp_path / "elastic"), *line[1:]])
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.join").exists()
