"""LangChain, through sentence-transformers: the few lines that the documentation shows, run without this project."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from modeling_m3bert import M3BertModel
from tests.conftest import write_modules
from tests.ecosystem.conftest import LONGEST, linked
from tests.snippets import read, snippets
from trainers import Granularity, Grid
from trainers.evaluation import GridEncoder


pytestmark = pytest.mark.slow
pytest.importorskip("langchain_core")
pytest.importorskip("sentence_transformers")

SNIPPET = next(snippet.code for snippet in snippets(read("docs/publish.md")) if "langchain_core" in snippet.code)
USE = """
import torch
from langchain_core.vectorstores import InMemoryVectorStore
from safetensors.torch import save_file

documents, query = {documents!r}, {query!r}
found = InMemoryVectorStore.from_texts(documents, embeddings).similarity_search(query, k=1)
print("FOUND", found[0].page_content)
save_file(
    {{
        "documents": torch.tensor(embeddings.embed_documents(documents)),
        "query": torch.tensor([embeddings.embed_query(query)]),
    }},
    "vectors.safetensors",
)
"""
DOCUMENTS = ["A man plays the guitar.", "The stock market fell again.", "Two dogs run over the grass."]
QUERY = "Somebody makes music."


def test_documents_and_queries(published, tmp_path, run_bare):
    prompts = {"query": "question: ", "document": "answer: "}
    (tmp_path / "user").mkdir()
    write_modules(linked(published, tmp_path / "user" / "model-small"), width=384, max_length=LONGEST, prompts=prompts)
    printed = run_bare(SNIPPET + USE.format(documents=DOCUMENTS, query=QUERY))
    assert f"FOUND {DOCUMENTS[0]}" in printed
    vectors = load_file(tmp_path / "vectors.safetensors")
    encoder = GridEncoder(
        M3BertModel.from_pretrained(published), AutoTokenizer.from_pretrained(published), Grid.parse("4x64"),
        max_length=LONGEST, prompts=prompts,
    )  # fmt: skip
    for role, texts in (("document", DOCUMENTS), ("query", [QUERY])):
        ours = encoder.encode(texts, role=role).at(Granularity(4, 64), normalize=True)
        name = "query" if role == "query" else "documents"
        torch.testing.assert_close(vectors[name], ours, atol=1e-6, rtol=0)
