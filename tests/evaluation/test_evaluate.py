"""Every task at every granularity, from one encode: equal to one granularity at a time."""

from dataclasses import replace
from itertools import permutations
from math import log2

import pytest
import torch
from transformers import AutoModel

from m3bert.encode.coding import PackedIndex
from m3bert.evaluation import (
    evaluate_grid,
    exact_search,
    find_task,
    find_tasks,
    load_task,
    ranking_scores,
    score_grid,
    score_vectors,
)
from m3bert.modeling.quantization_m3bert import M3BertQuantizer, M3BertQuantizerConfig
from m3bert.trainers import Granularity, Grid
from tests.conftest import refused
from tests.trainers.tiny_run import count_forwards


GRID = Grid.parse("2,6x8,32")
NAMES = ["stsb", "mrpc", "tatoeba-deu", "banking77", "cranfield", "stsb-geometry"]
# The last bit of a sum depends on the machine, and on what a product has beside its terms.
LAST_BITS = {"rel": 1e-9, "abs": 1e-9}


def assert_same_scores(actual, expected):
    """Two lists of results are of the same things, in any order, and have the same values."""
    values = [{replace(score, value=0.0): score.value for score in scores} for scores in (actual, expected)]
    assert values[0] == pytest.approx(values[1], **LAST_BITS)


def test_scores_of_a_grid_are_those_of_each_granularity_alone(encoder, data):
    for name in NAMES:
        evaluator = load_task(find_task(name), data)
        scores = score_grid(encoder, evaluator)
        assert list(scores) == list(GRID)
        for g in GRID:
            alone = score_grid(replace(encoder, grid=Grid((g,))), evaluator)[g]
            if g.dim < 32:  # of what is behind a prefix, an encode of the prefix alone knows nothing
                scores[g].pop("prefix_residual_correlation", None)
            assert scores[g] == pytest.approx(alone, **LAST_BITS), (name, g)


def test_vectors_that_one_has_are_scored_like_those_of_an_encoder(encoder, data):
    evaluator = load_task(find_task("cranfield"), data)
    vectors = {name: encoder.encode(texts, role=evaluator.role(name)) for name, texts in evaluator.texts.items()}
    actual, expected = score_vectors(evaluator, vectors), score_grid(encoder, evaluator)
    across = score_vectors(evaluator, vectors, document_layer=6)
    assert list(actual) == list(across) == list(GRID)
    for g in GRID:
        assert actual[g] == pytest.approx(expected[g], **LAST_BITS)
        sides = {"queries": vectors["queries"].at(g), "documents": vectors["documents"].at(Granularity(6, g.dim))}
        assert across[g] == pytest.approx(evaluator.score(sides), **LAST_BITS)
    shifted = {name: part.map(lambda layer, states: states * layer) for name, part in vectors.items()}
    assert shifted["queries"].widest(6).equal(6 * vectors["queries"].widest(6))


def pairs_and_dims(results):
    return {(search.query_layer, search.document_layer, search.dim) for search in results.asymmetric_searches}


@torch.no_grad()
def embedded_by_a_cut(folder, layer, tokenizer, texts):
    """Mean-pooled embeddings of the checkpoint cut at a layer, one text at a time."""
    cut = AutoModel.from_pretrained(folder, output_layer=layer).eval()
    inputs = (tokenizer(text, return_tensors="pt", return_token_type_ids=False) for text in texts)
    return torch.stack([cut(**part).last_hidden_state[0].mean(dim=0) for part in inputs])


def ndcg_at_10(order, grades):
    def gain(its_grades):
        return sum(grade / log2(2 + rank) for rank, grade in enumerate(its_grades[:10]))

    return gain([grades.get(row, 0.0) for row in order]) / gain(sorted(grades.values(), reverse=True))


def test_asymmetric_searches_are_those_of_two_cuts(encoder_with_exits, data, tmp_path):
    tasks, encoder = find_tasks(["cranfield", "stsb"]), encoder_with_exits
    seen = count_forwards(encoder.model)
    plain = evaluate_grid(encoder, tasks, data, asymmetric=False)
    forwards = list(seen)
    seen.clear()
    results = evaluate_grid(encoder, tasks, data)
    assert seen == forwards, "the searches between layers need no other encode"
    assert results.scores == plain.scores and not plain.asymmetric_searches
    # Not layer 4, which is in a space of its own.
    assert pairs_and_dims(results) == {(*pair, dim) for pair in permutations((0, 2, 6), 2) for dim in (8, 32)}

    encoder.model.save_pretrained(tmp_path / "model")
    task = load_task(tasks[0], data)
    texts, count = [*task.texts["queries"], *task.texts["documents"]], len(task.texts["queries"])
    alone = {layer: embedded_by_a_cut(tmp_path / "model", layer, encoder.tokenizer, texts) for layer in (0, 2, 6)}
    for search in results.asymmetric_searches:
        asked, actual = alone[search.query_layer][:count], alone[search.document_layer][count:]
        asked, actual = asked[:, : search.dim], actual[:, : search.dim]
        cosines = torch.nn.functional.cosine_similarity(asked[:, None], actual[None], dim=-1)
        orders = cosines.argsort(dim=1, descending=True).tolist()
        values = [ndcg_at_10(order, grades) for order, grades in zip(orders, task.relevant, strict=True)]
        assert search.value == pytest.approx(sum(values) / len(values), abs=1e-6), search
        assert (search.task, search.documents, search.metric) == ("cranfield", 40, "ndcg@10")


def test_only_layers_that_share_a_space_are_compared_unless_asked_for(encoder, encoder_with_exits, data):
    cranfield = [find_task("cranfield")]
    picked = replace(encoder_with_exits, grid=Grid.parse("0x8,2x8,2x32,6x32"))
    assert pairs_and_dims(evaluate_grid(picked, cranfield, data)) == {(0, 2, 8), (2, 0, 8), (2, 6, 32), (6, 2, 32)}
    encoder.model.set_depths()
    assert not evaluate_grid(encoder, cranfield, data).asymmetric_searches
    forced = evaluate_grid(encoder, cranfield, data, asymmetric=True)
    assert pairs_and_dims(forced) == {(2, 6, 8), (2, 6, 32), (6, 2, 8), (6, 2, 32)}
    assert not evaluate_grid(encoder, [find_task("stsb")], data, asymmetric=True).asymmetric_searches


def test_embeddings_that_are_not_finite_name_task_and_granularities(encoder, data):
    with torch.no_grad():
        encoder.model.layers[3].mlp.down_proj.weight[20] = torch.nan
    refused("Task 'stsb': Embeddings at 6x8, 6x32 are not finite", evaluate_grid, encoder, [find_task("stsb")], data)
    evaluate_grid(replace(encoder, grid=Grid.parse("2x8,32")), [find_task("stsb")], data)


@pytest.fixture
def coded(encoder, sentences):
    """The tiny encoder in six codes, with a quantizer of layer 6."""
    quantizer = M3BertQuantizer(M3BertQuantizerConfig(hidden_size=32, layers=[6]))
    quantizer.initialize(encoder.encode(sentences).at(Granularity(6, 32)))
    grid = Grid.parse("2x8@int8,2x8,6x16@qama-2,6x16@int4,6x16,6x32@binary,6x32@float16,6x32")
    return replace(encoder, grid=grid, quantizer=quantizer)


def test_codes_are_scored_from_the_one_encode(coded, data):
    seen = count_forwards(coded.model)
    results = evaluate_grid(coded, find_tasks(NAMES), data)
    passes = len(seen)
    seen.clear()
    plain = evaluate_grid(replace(coded, grid=coded.grid.sizes, quantizer=None), find_tasks(NAMES), data)
    assert len(seen) == passes, "codes take no pass of their own"
    assert results.grid == str(coded.grid) and results.granularities == coded.grid
    floats = [score for score in results.scores if "@" not in score.granularity]
    assert_same_scores(floats, plain.scores)
    assert_same_scores(results.two_stage_searches, plain.two_stage_searches)
    assert not plain.rescored_searches and "quantizer" not in plain.settings
    assert results.settings["quantizer"] == coded.quantizer.fingerprint
    assert results.weights == plain.weights and set(results.quality(NAMES[:5])) == set(coded.grid)
    changed = [score for score in results.scores if score.main and score.granularity == "6x16@int4"]
    same = {(score.task, score.granularity): score.value for score in plain.scores if score.main}
    assert any(score.value != same[score.task, "6x16"] for score in changed)
    for name in ("cranfield", "mrpc", "stsb-geometry"):
        for g, scores in score_grid(coded, load_task(find_task(name), data)).items():
            recorded = {s.metric: s.value for s in results.scores if (s.task, s.granularity) == (name, str(g))}
            assert scores == pytest.approx(recorded, **LAST_BITS)


def test_retrieval_in_a_code_is_that_of_an_index_and_re_scoring_that_of_its_shortlist(coded, data):
    results, task = evaluate_grid(coded, find_tasks(["cranfield"]), data), find_task("cranfield")
    evaluator = load_task(task, data)
    sides = {name: coded.encode(texts, role=evaluator.role(name)) for name, texts in evaluator.texts.items()}
    values = {(s.granularity, s.metric): s.value for s in results.scores}
    actual = {(s.granularity, s.rescore, s.shortlist): s.value for s in results.rescored_searches}
    by_code = {"int8": {"float32"}, "qama-2": {"codes", "int8", "float32"}, "int4": {"int8", "float32"}}
    by_code["binary"] = by_code["qama-2"]
    assert {(code, by) for g, by, _ in actual for code in [g.code]} == {(c, by) for c in by_code for by in by_code[c]}
    for text in ("2x8@int8", "6x16@int4"):  # of codes whose scores are hardly ever equal
        g = Granularity.parse(text)
        queries, documents = (sides[name].at(g) for name in ("queries", "documents"))
        _, ranked = PackedIndex.pack(documents, g.code).search(queries, 100)
        expected = ranking_scores(ranked, evaluator.relevant)
        assert expected["ndcg@10"] == pytest.approx(values[text, "ndcg@10"], abs=1e-6)
        for size in (10, 20):
            remaining = [rows[exact_search(query[None], documents[rows], size)[0]]
                    for query, rows in zip(queries, torch.from_numpy(ranked[:, :size]), strict=True)]  # fmt: skip
            rescored = ranking_scores(torch.stack(remaining).numpy(), evaluator.relevant)
            assert actual[g, "float32", size] == pytest.approx(rescored["ndcg@10"], abs=1e-6)
    documents = len(evaluator.texts["documents"])
    assert {size for _, _, size in actual} == {size for size in (10, 20, 50, 100) if size <= documents} != set()
    assert not evaluate_grid(coded, [task], data, two_stages=False).rescored_searches


def test_all_codes_can_stand_alone(coded, data):
    """Without float32 at a size, there is nothing to search with float prefixes or between layers."""
    grid = Grid.parse("6x16,32@binary,qama-1")
    results = evaluate_grid(replace(coded, grid=grid), find_tasks(["cranfield", "stsb"]), data, asymmetric=True)
    assert {score.granularity for score in results.scores} == set(map(str, grid))
    assert results.rescored_searches and not results.two_stage_searches and not results.asymmetric_searches
