"""Encoding a grid once, and metrics of retrieval and similarity."""

from __future__ import annotations

import pytest
import torch

from modeling_m3bert import M3BertModel
from trainers.evaluation import encode_layers, retrieval_metrics, similarity_spearman


def test_one_encode_equals_loading_every_granularity_alone(tiny_model, tiny_tokenizer, sentences, tmp_path):
    texts = [*sentences[:9], "", "read " * 100]
    tiny_model.train()
    embeddings = encode_layers(tiny_model, tiny_tokenizer, texts, [6, 2], batch_size=4)
    assert tiny_model.training
    tiny_model.save_pretrained(tmp_path)
    for layer in (2, 6):
        for dim in (8, 32):
            alone = M3BertModel.from_pretrained(tmp_path, output_layer=layer, output_dim=dim).eval()
            for row, text in enumerate(texts):
                inputs = tiny_tokenizer(text, truncation=True, return_tensors="pt")
                with torch.no_grad():
                    expected = alone(**inputs).last_hidden_state[0].mean(0)
                torch.testing.assert_close(embeddings[layer][row, :dim], expected, atol=1e-5, rtol=1e-5)


def test_nothing_to_encode_is_refused(tiny_model, tiny_tokenizer):
    with pytest.raises(ValueError, match="no text to encode"):
        encode_layers(tiny_model, tiny_tokenizer, [], [2])


def naive_retrieval(queries, documents, k):
    hits, reciprocal = 0.0, 0.0
    for i, query in enumerate(queries):
        scores = [torch.cosine_similarity(query, document, dim=0).item() for document in documents]
        ranking = sorted(range(len(documents)), key=lambda j, scores=scores: (-scores[j], j))
        rank = ranking.index(i) + 1
        hits += rank <= k
        reciprocal += (1 / rank) * (rank <= k)
    return {f"recall@{k}": hits / len(queries), f"mrr@{k}": reciprocal / len(queries)}


@pytest.mark.parametrize("k", [1, 3, 10])
def test_retrieval_equals_sorting(k):
    queries = torch.randn(20, 6, dtype=torch.float64)
    documents = torch.cat([queries + torch.randn(20, 6, dtype=torch.float64), torch.randn(7, 6, dtype=torch.float64)])
    assert retrieval_metrics(queries, documents, k) == pytest.approx(naive_retrieval(queries, documents, k))


def test_equal_documents_do_not_all_rank_first():
    same = torch.ones(4, 3)
    assert retrieval_metrics(same, same, k=2) == {"recall@2": 0.5, "mrr@2": (1 + 1 / 2) / 4}


def test_bad_embeddings_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        retrieval_metrics(torch.full((1, 2), torch.nan), torch.ones(2, 2))
    with pytest.raises(ValueError, match="3 queries need as many documents; there are 2"):
        retrieval_metrics(torch.ones(3, 2), torch.ones(2, 2))


def test_spearman_of_cosines_is_a_correlation_of_ranks():
    first, second = torch.randn(20, 5), torch.randn(20, 5)
    scores = [round(float(score), 1) for score in torch.rand(20) * 5]  # with ties

    def ranks(values):
        return torch.tensor([sum(v < x for v in values) + (sum(v == x for v in values) + 1) / 2 for x in values])

    cosines = [float(torch.cosine_similarity(a, b, dim=0)) for a, b in zip(first, second, strict=True)]
    expected = torch.corrcoef(torch.stack([ranks(cosines), ranks(scores)]))[0, 1]
    assert similarity_spearman(first, second, scores) == pytest.approx(expected.item(), abs=1e-6)
    assert similarity_spearman(3 * first, second, scores) == pytest.approx(expected.item(), abs=1e-6)
    with pytest.raises(ValueError, match="not finite"):
        similarity_spearman(first / 0, second, scores)
