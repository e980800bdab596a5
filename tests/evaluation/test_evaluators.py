"""Evaluators: their scores are those of sentence-transformers."""

import pytest
from scipy.stats import ConstantInputWarning
from sklearn.exceptions import UndefinedMetricWarning
from transformers import AutoModel, AutoTokenizer

from m3bert.evaluation import STS, GridEncoder, evaluate_grid, find_task, load_task, score_grid
from m3bert.trainers import Granularity, Grid
from tests.evaluation_data import write_rows


def test_retrieval_leaves_out_queries_without_answers_and_measures_two_stages(encoder, data):
    evaluator = load_task(find_task("cranfield"), data)
    assert len(evaluator.texts["queries"]) == 7 and evaluator.relevant[0] == {0: 1.0, 1: 2.0, 2: 3.0}
    results = evaluate_grid(encoder, [find_task("cranfield")], data)
    assert {(plan.layer, plan.first_dim, plan.second_dim, plan.shortlist) for plan in results.two_stage_searches} == {
        (layer, 8, 32, size) for layer in (2, 6) for size in (10, 20)
    }
    assert not evaluate_grid(encoder, [find_task("cranfield")], data, two_stages=False).two_stage_searches


def test_a_metric_that_is_not_defined_is_refused(encoder, data):
    rows = [{"sentence1": "a", "sentence2": "a", "score": row % 2} for row in range(4)]
    write_rows(data / "stsb" / "test.jsonl.gz", rows)
    with pytest.warns(ConstantInputWarning), pytest.raises(ValueError, match="'stsb': spearman is not defined at 2x8"):
        evaluate_grid(encoder, [find_task("stsb")], data)
    with pytest.raises(ValueError, match="'stsb-geometry': alignment is not defined at 2x8"):
        evaluate_grid(encoder, [find_task("stsb-geometry")], data)
    write_rows(data / "mrpc" / "test.jsonl.gz", [{"sentence1": "a", "sentence2": "b", "label": 1}] * 2)
    with pytest.warns(UndefinedMetricWarning), pytest.raises(ValueError, match="'mrpc': accuracy is not defined"):
        evaluate_grid(encoder, [find_task("mrpc")], data)


@pytest.mark.slow
def test_similarity_has_the_published_value(minilm, data_folder):
    model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)
    real = GridEncoder(model, tokenizer, Grid.parse("6x384"), max_length=256)
    scores = score_grid(real, load_task(find_task("stsb"), data_folder))
    assert scores[Granularity(6, 384)]["spearman"] == pytest.approx(0.820, abs=0.003)


@pytest.fixture
def bert(encoder_folder) -> GridEncoder:
    """A tiny BERT that sentence-transformers reads, too."""
    model, tokenizer = AutoModel.from_pretrained(encoder_folder), AutoTokenizer.from_pretrained(encoder_folder)
    return GridEncoder(model, tokenizer, Grid.parse("2x8,20"))


@pytest.fixture(scope="module")
def sentence_transformer(encoder_folder):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(encoder_folder), device="cpu")


def test_similarity_equals_sentence_transformers(bert, sentence_transformer, data):
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    evaluator = load_task(find_task("stsb"), data)
    assert isinstance(evaluator, STS)
    ours = score_grid(bert, evaluator)
    for g in bert.grid:
        library = EmbeddingSimilarityEvaluator(
            *evaluator.texts.values(), evaluator.scores, truncate_dim=g.dim, main_similarity="cosine"
        )
        theirs = library(sentence_transformer)["spearman_cosine"]
        assert ours[g]["spearman"] == pytest.approx(theirs, abs=1e-6)
