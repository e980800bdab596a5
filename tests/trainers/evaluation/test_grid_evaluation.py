"""Every task at every granularity: equal to one granularity at a time, and to sentence-transformers' evaluators."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import ConstantInputWarning
from torch.utils.data import DataLoader
from transformers import AutoModel, AutoTokenizer

from tests.evaluation_data import write_data, write_rows
from tests.trainers.evaluation.test_encoding import count_forwards
from trainers import Granularity, Grid
from trainers.evaluation import (
    GROUPS,
    STS,
    TASKS,
    GridEncoder,
    GridResults,
    Task,
    evaluate_grid,
    find_task,
    find_tasks,
    fit_classifier,
    measure_latency,
    score_grid,
)
from trainers.evaluation import tasks as task_module


GRID = Grid.parse("2,6x8,32")
NAMES = ["stsb", "mrpc", "tatoeba-deu", "banking77", "cranfield", "stsb-geometry"]


@pytest.fixture
def data(tmp_path, sentences):
    return write_data(tmp_path / "data", sentences)


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    return GridEncoder(tiny_model, tiny_tokenizer, GRID, batch_size=4)


def test_scores_of_a_grid_are_those_of_each_granularity_alone(encoder, data):
    for name in NAMES:
        protocol = find_task(name).load(data)
        scores = score_grid(encoder, protocol)
        assert list(scores) == list(GRID)
        for g in GRID:
            alone = score_grid(replace(encoder, grid=Grid((g,))), protocol)[g]
            if g.dim < 32:  # of what is behind a prefix, an encode of the prefix alone knows nothing
                scores[g].pop("prefix_residual_correlation", None)
            assert scores[g] == alone, (name, g)


def test_a_grid_that_is_no_product_has_the_same_scores(encoder, data):
    picked = Grid.parse("2x8,4x16,6x32")
    found = evaluate_grid(replace(encoder, grid=picked), find_tasks(["stsb", "cranfield"]), data)
    assert {score.granularity for score in found.scores} == {"2x8", "4x16", "6x32"} and not found.plans
    whole = evaluate_grid(replace(encoder, grid=Grid.parse("2,4,6x8,16,32")), find_tasks(["stsb", "cranfield"]), data)
    assert set(found.scores) <= set(whole.scores)


def test_results_say_what_was_run_and_survive_a_file(encoder, data, tmp_path):
    results = evaluate_grid(encoder, find_tasks(NAMES), data, seed=3)
    results.latency = measure_latency(encoder, ["open the file"], documents=50, rounds=2)
    assert {dim: set(sizes) for dim, sizes in results.latency.rerank_ms.items()} == {
        dim: {"10", "20", "50"} for dim in ("8", "32")
    }
    exact, staged = results.latency.of(GRID.full), results.latency.of_two_stages(GRID.full, 8, 20)
    times = results.latency
    assert exact == times.encode_ms["6"] + times.search_ms["32"]
    assert staged == times.encode_ms["6"] + times.search_ms["8"] + times.rerank_ms["32"]["20"]
    assert times.of(GRID.full, 100) == pytest.approx(times.encode_ms["6"] + 2 * times.search_ms["32"])
    assert results.tasks() == NAMES and results.seed == 3 and results.granularities == GRID
    assert results.families() == ["sts", "pair_classification", "bitext", "classification", "retrieval", "geometry"]
    assert results.settings["pooling"] == "mean" and results.settings["max_length"] == 48
    assert set(results.variances["stsb-geometry"]) == {"2", "6"}
    assert all(0 <= score.value <= 1 for score in results.scores if score.family in ("retrieval", "bitext"))
    results.save(tmp_path / "out" / "results.json")
    assert GridResults.load(tmp_path / "out" / "results.json") == results
    mains = {score.task: score.value for score in results.scores if score.main and score.granularity == "2x8"}
    assert results.quality(NAMES[:2])[Granularity(2, 8)] == (mains["stsb"] + mains["mrpc"]) / 2
    with pytest.raises(ValueError, match="No scores of snli; scored: stsb, "):
        results.quality(["snli"])
    broken = asdict(results) | {"schema_version": 99}
    (tmp_path / "old.json").write_text(json.dumps(broken))
    with pytest.raises(ValueError, match="schema version 99; this program reads 1"):
        GridResults.load(tmp_path / "old.json")
    (tmp_path / "cut.json").write_text('{"model": ')
    with pytest.raises(ValueError, match="cut.json is not JSON"):
        GridResults.load(tmp_path / "cut.json")


def test_retrieval_leaves_out_queries_without_answers_and_measures_two_stages(encoder, data):
    protocol = find_task("cranfield").load(data)
    assert len(protocol.texts["queries"]) == 7 and protocol.relevant[0] == {0: 1.0, 1: 2.0, 2: 3.0}
    results = evaluate_grid(encoder, [find_task("cranfield")], data)
    assert {(plan.layer, plan.first_dim, plan.second_dim, plan.shortlist) for plan in results.plans} == {
        (layer, 8, 32, size) for layer in (2, 6) for size in (10, 20)
    }
    assert not evaluate_grid(encoder, [find_task("cranfield")], data, two_stages=False).plans
    with pytest.raises(ValueError, match="needs queries, each with a relevant document"):
        replace(protocol, relevant=[])


def test_embeddings_on_disk_give_the_same_scores_and_are_read_again(encoder, data, tmp_path):
    tasks = find_tasks(NAMES)
    expected = evaluate_grid(encoder, tasks, data)
    evaluate_grid(encoder, tasks, data, folder=tmp_path / "embeddings")
    seen = count_forwards(encoder.model)
    again = evaluate_grid(encoder, tasks, data, folder=tmp_path / "embeddings")
    assert not seen and again.scores == expected.scores and again.plans == expected.plans


def test_a_task_without_data_says_where_it_was_looked_for(encoder, data, tmp_path):
    missing = re.escape(str(data / "emotion" / "train.jsonl.gz"))
    with pytest.raises(ValueError, match=f"Task 'emotion': there is no 'train': {missing} is not there .*, and mteb"):
        evaluate_grid(encoder, [find_task("stsb"), find_task("emotion")], data)
    with pytest.raises(
        ValueError, match="'wic'.* is not there .*M3BERT_DATA.*, and it is not on the Hub in this form"
    ):
        find_task("wic").load(data)
    with pytest.raises(ValueError, match="no folder of local data was given"):
        find_task("wic").load(None)
    with pytest.raises(ValueError, match="There is no task 'bleu'. Tasks: stsb, .* groups: seeds, "):
        find_tasks(["bleu"])


HUB = {
    "allenai/scitail": {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": ["entails", "neutral"]},
    "stanfordnlp/snli": {
        "premise": ["a", "b", "c", "d"],
        "hypothesis": ["e", "f", "g", "h"],
        "label": [0, 1, 2, -1],
    },
    "mteb/scifact": {
        "corpus": {"_id": ["4", "5"], "title": ["T", ""], "text": ["x", "y"]},
        "queries": {"_id": ["1", "2"], "text": ["q", "r"]},
        "test": {"query-id": ["1"], "corpus-id": ["5"], "score": [1]},
    },
}


def test_the_hub_has_the_same_tasks_under_other_columns_and_labels(monkeypatch):
    asked = []

    def load_dataset(path, config, split):
        asked.append((path, config, split))
        return Dataset.from_dict(HUB[path] if path != "mteb/scifact" else HUB[path][split])

    monkeypatch.setattr(task_module, "load_dataset", load_dataset)
    scitail = find_task("scitail").load()
    assert scitail.texts == {"sentence1": ["a", "b"], "sentence2": ["c", "d"]} and scitail.labels == [1, 0]
    snli = find_task("snli").load()
    assert snli.texts["sentence1"] == ["a", "c"] and snli.labels == [1, 0]
    scifact = find_task("scifact").load()
    assert scifact.texts == {"queries": ["q"], "documents": ["T x", "y"]} and scifact.relevant == [{1: 1.0}]
    assert asked[0] == ("allenai/scitail", "tsv_format", "test")
    assert asked[-1] == ("mteb/scifact", "default", "test")


def test_bad_data_names_the_task(encoder, data, sentences):
    write_rows(data / "banking77" / "train.jsonl.gz", [{"text": text, "label": 4} for text in sentences[:9]])
    seen = count_forwards(encoder.model)
    with pytest.raises(ValueError, match=r"'banking77': a classifier needs two classes at least; found \[4\]"):
        evaluate_grid(encoder, find_tasks(["stsb", "banking77"]), data)
    write_rows(data / "mrpc" / "test.jsonl.gz", [{"sentence1": "a", "sentence2": "b", "label": 1}])
    with pytest.raises(ValueError, match=r"'mrpc': pair classification needs labels 0 and 1; found \[1\]"):
        evaluate_grid(encoder, find_tasks(["stsb", "mrpc"]), data)
    assert not seen, "bad data is refused before any work is done"
    with torch.no_grad():
        encoder.model.layers[3].mlp.down_proj.weight[20] = torch.nan
    with pytest.raises(ValueError, match="Task 'stsb': Embeddings at 6x8, 6x32 are not finite"):
        evaluate_grid(encoder, [find_task("stsb")], data)
    evaluate_grid(replace(encoder, grid=Grid.parse("2x8,32")), [find_task("stsb")], data)


def test_a_metric_that_is_not_defined_is_refused(encoder, data, sentences):
    rows = [{"sentence1": "a", "sentence2": "a", "score": row % 2} for row in range(4)]
    write_rows(data / "stsb" / "test.jsonl.gz", rows)
    with pytest.warns(ConstantInputWarning), pytest.raises(ValueError, match="'stsb': spearman is not defined at 2x8"):
        evaluate_grid(encoder, [find_task("stsb")], data)
    with pytest.raises(ValueError, match="'stsb-geometry': alignment needs pairs that are alike"):
        find_task("stsb-geometry").load(data)
    write_rows(data / "stsb" / "test.jsonl.gz", [row | {"score": 5} for row in rows])
    with pytest.raises(ValueError, match=r"'stsb': a correlation needs scores that differ; found \[5\]"):
        find_task("stsb").load(data)


def test_an_empty_text_is_scored(encoder, data, sentences):
    rows = [{"sentence1": text, "sentence2": "", "score": row} for row, text in enumerate(sentences[:9])]
    write_rows(data / "stsb" / "test.jsonl.gz", [*rows, {"sentence1": "", "sentence2": "", "score": 5}])
    scores = score_grid(encoder, find_task("stsb").load(data))
    assert all(np.isfinite(its["spearman"]) for its in scores.values())


def test_groups_name_tasks():
    assert all(find_tasks([group]) for group in GROUPS)
    assert [task.name for task in find_tasks(["stsb", "sts", "xnli-de"])][-1] == "xnli-de"
    assert len({task.name for task in find_tasks(GROUPS)}) == len(find_tasks(GROUPS)) > len(TASKS)


# The real encoder on real data.


@pytest.fixture(scope="module")
def real(minilm) -> GridEncoder:
    model, tokenizer = AutoModel.from_pretrained(minilm), AutoTokenizer.from_pretrained(minilm)
    return GridEncoder(model, tokenizer, Grid.parse("6x64,384"), max_length=256)


@pytest.fixture(scope="module")
def sentence_transformer(minilm):
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(minilm, device="cpu")


def test_similarity_equals_sentence_transformers_and_the_published_value(real, sentence_transformer, data_folder):
    from sentence_transformers.sentence_transformer.evaluation import EmbeddingSimilarityEvaluator

    protocol = find_task("stsb").load(data_folder)
    assert isinstance(protocol, STS)
    ours = score_grid(real, protocol)
    assert ours[Granularity(6, 384)]["spearman"] == pytest.approx(0.820, abs=0.003)
    for g in real.grid:
        evaluator = EmbeddingSimilarityEvaluator(
            protocol.texts["sentence1"],
            protocol.texts["sentence2"],
            protocol.scores,
            truncate_dim=g.dim,
            main_similarity="cosine",
        )
        theirs = evaluator(sentence_transformer)["spearman_cosine"]
        assert ours[g]["spearman"] == pytest.approx(theirs, abs=1e-6)


def test_classification_equals_sentence_transformers(real, minilm, data_folder):
    from sentence_transformers import InputExample, SentenceTransformer
    from sentence_transformers.sentence_transformer.evaluation import LabelAccuracyEvaluator

    protocol = find_task("banking77").load(data_folder)
    # The encoder without the step of its pipeline that normalises: logistic regression sees embeddings as they are.
    transformer = SentenceTransformer(minilm, device="cpu")
    pipeline = SentenceTransformer(modules=list(transformer)[:2], device="cpu")
    classifier = fit_classifier(
        pipeline.encode(protocol.texts["train"], convert_to_tensor=True).cpu(), protocol.train_labels
    )
    weight, bias = (torch.from_numpy(part).float() for part in (classifier.coef_, classifier.intercept_))

    def head(features, labels):
        return None, pipeline(features[0])["sentence_embedding"] @ weight.T + bias

    examples = [
        InputExample(texts=[text], label=label)
        for text, label in zip(protocol.texts["test"], protocol.test_labels, strict=True)
    ]
    evaluator = LabelAccuracyEvaluator(DataLoader(examples, batch_size=64), softmax_model=head)
    theirs = evaluator(pipeline)["accuracy"]
    grid = Grid.parse("6x384")
    ours = score_grid(replace(real, grid=grid), protocol)[grid.full]["accuracy"]
    assert ours == pytest.approx(theirs, abs=1e-6) and ours > 0.9


def test_retrieval_equals_sentence_transformers(real, sentence_transformer, data_folder):
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    protocol = find_task("cisi").load(data_folder)
    assert {grade for grades in protocol.relevant for grade in grades.values()} == {1.0}
    evaluator = InformationRetrievalEvaluator(
        {str(row): text for row, text in enumerate(protocol.texts["queries"])},
        {str(row): text for row, text in enumerate(protocol.texts["documents"])},
        {str(query): {str(row) for row in grades} for query, grades in enumerate(protocol.relevant)},
        precision_recall_at_k=[1, 10, 100],
        truncate_dim=64,
        score_functions={"cosine": sentence_transformer_cosine},
    )
    theirs = evaluator(sentence_transformer)
    ours = score_grid(real, protocol)[Granularity(6, 64)]
    for name, value in ours.items():
        assert value == pytest.approx(theirs[f"cosine_{name}"], abs=1e-6), name


def sentence_transformer_cosine(first, second):
    from sentence_transformers.util import cos_sim

    return cos_sim(first, second)


def test_a_development_split_is_a_task_too(real, data_folder):
    protocol = Task("stsb-dev", STS, folder="stsb", splits=("dev",)).load(data_folder)
    assert len(protocol.scores) == 1500
