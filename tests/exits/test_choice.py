"""The choice of a depth's layers: its measure against a naive one, and what a fit chooses."""

from itertools import chain

import numpy as np
import pytest
import torch

from m3bert.exits import layer_lists, queries
from m3bert.exits.queries import span_of
from m3bert.exits.raw_states import RawStates
from m3bert.modeling.configuration_elastic import Elasticity
from m3bert.trainers import TeacherEmbeddings, fit_exits
from tests.exits.test_fit import random_texts
from tests.exits.test_paths import tiny


def naive_kept(queries, full_size, passages, relevant=100) -> float:
    unit = [vectors / np.linalg.norm(vectors, axis=1, keepdims=True) for vectors in (queries, full_size, passages)]
    shares = []
    for query, full in zip(*unit[:2], strict=True):
        similar = unit[2] @ full
        order = np.sort(similar)[::-1]
        least = order[min(relevant, len(order)) - 1]
        discounts = 1 / np.log2(np.arange(2, 2 + min(10, len(order))))
        gains = np.maximum(similar[np.argsort(-(unit[2] @ query))[:10]] - least, 0)
        shares.append((gains * discounts).sum() / ((order[:10] - least) * discounts).sum())
    return float(np.mean(shares))


@pytest.mark.parametrize("passages", [12, 150])
def test_the_retrieval_that_is_kept_is_an_ndcg_with_the_similarities_of_the_whole_model(passages):
    small, full, texts = vectors_of(passages)
    share = queries.retrieval_kept(*(cosines(side, texts) for side in (small, full)))
    assert share == pytest.approx(naive_kept(small.numpy(), full.numpy(), texts.numpy()), abs=1e-5)
    assert 0.3 < share < 1 and queries.retrieval_kept(*[cosines(full, texts)] * 2) == pytest.approx(1)


def cosines(vectors: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
    return torch.cosine_similarity(vectors[:, None], texts[None], dim=2)


def vectors_of(passages: int) -> list[torch.Tensor]:
    """Vectors of queries at a smaller size and at full depth, and of passages."""
    draw = torch.Generator().manual_seed(0)
    full, texts = (torch.randn(count, 8, generator=draw, dtype=torch.float64) for count in (20, passages))
    return [full + 0.5 * torch.randn(20, 8, generator=draw, dtype=torch.float64), full, texts]


def test_the_divergence_compares_the_softmax_of_similarities_in_units_of_their_deviation():
    small, full, texts = vectors_of(50)
    at_full, at_small = (cosines(side, texts) for side in (full, small))
    p, q = ((side / (1.5 * at_full.std(dim=1).mean())).softmax(dim=1) for side in (at_full, at_small))
    naive = float((p * (p / q).log()).sum(dim=1).mean())
    assert queries.divergence(at_small, at_full) == pytest.approx(naive, rel=1e-4)
    assert queries.divergence(at_full, at_full) == pytest.approx(0, abs=1e-6)


def test_a_span_is_a_part_of_its_text_and_always_the_same():
    text = " ".join(map(str, range(40)))
    assert span_of(text) == span_of(text) and span_of(text) in text
    assert 3 <= len(span_of(text).split()) <= 16
    assert span_of("two words") == "two words"


@pytest.mark.parametrize(("last", "depths"), [(1, []), (6, [1, 2, 3, 4]), (12, [2, 4, 6, 8])])
def test_candidates_are_legal_lists_of_layers(last, depths):
    assert layer_lists.default_depths(last) == depths
    for depth in depths:
        lists = layer_lists.candidates_of(depth, last)
        assert len(lists) == depth - 1
        for layers in [*lists, *chain(*map(layer_lists.neighbours_of, lists))]:
            assert len(layers) == depth and list(layers) == sorted({*layers})
            assert layers[0] == 1 and layers[-1] == last and {*layers} <= {*range(1, last + 1)}
    assert layer_lists.neighbours_of([1, 2, 6]) == [(1, 3, 6), (1, 4, 6), (1, 5, 6)]


def test_a_fit_takes_the_list_that_comes_closest(tiny_tokenizer):
    model, texts = tiny("bert", tiny_tokenizer), random_texts(200)
    fit = fit_exits(model, tiny_tokenizer, texts, depths=[1, 3], paths={4: [1, 2, 5, 6]}, static=False)
    assert [*fit.candidates] == [3] and {"1,2,6", "1,5,6"} < {*fit.candidates[3]}
    assert ",".join(map(str, fit.paths[3].layers)) == next(iter(fit.candidates[3]))
    assert [*fit.paths] == [3, 4] and Elasticity.of(model.config).exits == [1], "depth 1 is a prefix"
    measured = {}
    for layers in fit.candidates[3]:
        named = [*map(int, layers.split(","))]
        other = tiny("bert", tiny_tokenizer)
        measured[layers] = fit_exits(other, tiny_tokenizer, texts, paths={3: named}, static=False).retrieval[3]
    assert measured[next(iter(fit.candidates[3]))] > sorted(measured.values())[1], "better than most"


def test_an_interrupted_fit_continues_with_its_finished_parts(tiny_tokenizer, tmp_path, monkeypatch):
    texts, seen, pooled = random_texts(120), [], RawStates.pooled

    def counted(raw, ids, layers, **options):
        seen.append(len(ids))
        return pooled(raw, ids, layers, **options)

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    whole = tiny("bert", tiny_tokenizer)
    expected = fit_exits(whole, tiny_tokenizer, texts, depths=[2])
    model = tiny("bert", tiny_tokenizer)
    with monkeypatch.context() as patch:
        patch.setattr("m3bert.exits.install.ExitFit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit_exits(model, tiny_tokenizer, texts, depths=[2], cache_dir=tmp_path)
    model.pooler.dense.weight.data.normal_()  # which many checkpoints leave to chance
    monkeypatch.setattr(RawStates, "pooled", counted)
    monkeypatch.setattr("m3bert.exits.layer_rows.LayerReader.read", interrupted)
    assert fit_exits(model, tiny_tokenizer, texts, depths=[2], cache_dir=tmp_path).record() == expected.record()
    assert 120 not in seen, "the texts are not encoded again"
    for name, tensor in whole.elastic.state_dict().items():
        assert torch.equal(model.elastic.state_dict()[name], tensor)


def test_parts_of_another_teacher_are_not_taken(tiny_tokenizer, tmp_path):
    texts, draw = [*dict.fromkeys(random_texts(150))], np.random.default_rng(0)
    fits = []
    for _ in range(2):
        teacher = TeacherEmbeddings(texts, draw.normal(size=(len(texts), 12)).astype(np.float32))
        options = {"teacher": teacher, "layers": [2], "static": False, "cache_dir": tmp_path}
        fits.append(fit_exits(tiny("bert", tiny_tokenizer), tiny_tokenizer, texts, **options))
    assert fits[0].layers != fits[1].layers
