"""Tasks by name, and their data: where it is looked for, and how it is read; NanoBEIR among them."""

import gzip
import re

import pytest
from datasets import Dataset

from m3bert.evaluation import (
    GROUPS,
    TASKS,
    GridEncoder,
    as_sentence_transformer,
    find_task,
    find_tasks,
    load_task,
    score_grid,
)
from m3bert.evaluation.readers import read_rows
from m3bert.trainers import Grid
from tests.conftest import refused
from tests.evaluation_data import nanobeir_rows, serve_datasets, write_rows


def test_a_task_without_data_says_where_it_was_looked_for(data):
    missing = re.escape(str(data / "emotion" / "train.jsonl.gz"))
    with pytest.raises(
        ValueError, match=f"Task 'emotion': there is no 'train': {missing} does not exist, and .*mteb/emotion"
    ):
        load_task(find_task("emotion"), data)
    with pytest.raises(ValueError, match="'wic'.* M3BERT_DATA/wic/test.jsonl.gz does not exist, and the Hub has no"):
        load_task(find_task("wic"), None)


HUB = {
    "allenai/scitail": {"premise": ["a", "b"], "hypothesis": ["c", "d"], "label": ["entails", "neutral"]},
    "stanfordnlp/snli": {"premise": ["a", "b", "c", "d"], "hypothesis": ["e", "f", "g", "h"], "label": [0, 1, 2, -1]},
    "mteb/scifact": {
        "corpus": {"_id": ["4", "5"], "title": ["T", ""], "text": ["x", "y"]},
        "queries": {"_id": ["1", "2"], "text": ["q", "r"]},
        "test": {"query-id": ["1"], "corpus-id": ["5"], "score": [1]},
    },
}


def test_the_hub_has_the_same_tasks_under_other_columns_and_labels(monkeypatch):
    asked = []

    def load_dataset(path, config, *, split, streaming):
        asked.append((path, config, split))
        return Dataset.from_dict(HUB[path] if path != "mteb/scifact" else HUB[path][split])

    serve_datasets(monkeypatch, load_dataset)
    scitail = load_task(find_task("scitail"))
    assert scitail.texts == {"sentence1": ["a", "b"], "sentence2": ["c", "d"]} and scitail.labels == [1, 0]
    snli = load_task(find_task("snli"))
    assert snli.texts["sentence1"] == ["a", "c"] and snli.labels == [1, 0]
    scifact = load_task(find_task("scifact"))
    assert scifact.texts == {"queries": ["q"], "documents": ["T x", "y"]} and scifact.relevant == [{1: 1.0}]
    assert asked[0] == ("allenai/scitail", "tsv_format", "test")
    assert asked[-1] == ("mteb/scifact", "default", "test")


def test_judgements_of_unknown_documents_and_queries_are_counted_and_named(data, caplog):
    """For every collection: here the task `cranfield`, with and without the judgements that say nothing."""
    expected = load_task(find_task("cranfield"), data)
    assert not [record for record in caplog.records if "unknown" in record.message]
    file = data / "cranfield" / "qrels.tsv.gz"
    with gzip.open(file, "rt") as opened:
        known = opened.read()
    more = "".join(f"q{row}\tx{row % 5}\t2\n" for row in range(7)) + "p1\td1\t1\np1\tx9\t1\n"
    with gzip.open(file, "wt") as opened:
        opened.write(known + more)
    assert load_task(find_task("cranfield"), data) == expected
    for words in ("8 of 31 qrels name unknown documents (x0, x1, x2, ...)", "2 of 31 qrels name unknown queries (p1)"):
        assert f"Task 'cranfield': {words}; they are left out." in caplog.messages
    with gzip.open(file, "wt") as opened:
        opened.write(known.splitlines()[0] + "\n" + more)
    refused("'cranfield': no query has a relevant document", load_task, find_task("cranfield"), data)


@pytest.mark.parametrize(
    ("document", "score", "left_out"),
    [
        ({"title": "", "text": "An apple, a  pear."}, 0, True),
        ({"title": "Fruit", "text": "An apple, a pear."}, 0, True),
        ({"title": "An apple,", "text": "a pear."}, 0, True),
        ({"title": "", "text": "An apple, no pear."}, 0, False),  # another text that happens to have the id
        ({"title": "", "text": "An apple, a pear."}, 1, False),  # the collection asks for it
    ],
)
def test_a_query_that_is_a_document_is_known_by_its_id_and_words(tmp_path, document, score, left_out):
    rows = [{"id": "a", **document}, {"id": "b", "title": "", "text": "An apple, a pear."}]
    write_rows(tmp_path / "cranfield" / "corpus.jsonl.gz", rows)
    write_rows(tmp_path / "cranfield" / "queries.jsonl.gz", [{"id": "a", "text": "An apple, a pear."}])
    with gzip.open(tmp_path / "cranfield" / "qrels.tsv.gz", "wt") as opened:
        opened.write(f"query-id\tcorpus-id\tscore\na\tb\t1\na\ta\t{score}\n")
    assert [*load_task(find_task("cranfield"), tmp_path).self_rows] == ([0] if left_out else [])


def test_rows_are_read_as_they_are_written_and_a_broken_line_is_named(tmp_path):
    (tmp_path / "a.tsv").write_text('query-id\tscore\n007\t1\n"x\t2\n')
    assert read_rows(tmp_path / "a.tsv") == [{"query-id": "007", "score": "1"}, {"query-id": '"x', "score": "2"}]
    (tmp_path / "a.jsonl").write_text('{"id": 1}\n\n{"id": ')
    refused("a.jsonl cannot be read", read_rows, tmp_path / "a.jsonl")


def test_texts_that_come_with_python_need_no_folder():
    """Every machine can score the task `stdlib`: a summary is to find its own text."""
    evaluator = load_task(find_task("stdlib"))
    queries, documents = evaluator.texts["queries"], evaluator.texts["documents"]
    assert 800 <= len(queries) == len(documents) < 1000
    assert evaluator.relevant == [{row: 1.0} for row in range(len(queries))]


def test_premises_of_two_languages_are_pairs_without_repetition(tmp_path):
    for language, premises in (("de", ["A", "A", "B"]), ("en", ["a", "a", "b"])):
        rows = [{"sentence1": premise, "sentence2": f"{row}"} for row, premise in enumerate(premises)]
        write_rows(tmp_path / "xnli" / f"{language}-dev.jsonl.gz", rows)
    pairs = load_task(find_task("xnli-pairs-de"), tmp_path)
    assert pairs.task_type == "bitext" and {side: [*part] for side, part in pairs.texts.items()} == {
        "sentence1": ["A", "B"], "sentence2": ["a", "b"],
    }  # fmt: skip


def test_groups_name_tasks():
    assert all(find_tasks([group]) for group in GROUPS)
    assert [task.name for task in find_tasks(["stsb", "sts", "xnli-de"])][-1] == "xnli-de"
    assert len({task.name for task in find_tasks(GROUPS)}) == len(find_tasks(GROUPS)) > len(TASKS)
    assert [task.name for task in find_tasks(["builtin"])] == ["stdlib"]


@pytest.fixture
def on_the_hub(monkeypatch, sentences):
    """Tiny copies of the sets, in the form that they have on the Hub."""
    rows = nanobeir_rows(sentences)

    def load_dataset(path, config, *, split, streaming=False):
        assert path == "sentence-transformers/NanoBEIR-en" and split.startswith("Nano")
        return Dataset.from_list(rows[config])

    serve_datasets(monkeypatch, load_dataset)


def test_scores_are_those_of_the_evaluator_of_sentence_transformers(on_the_hub, tiny_model, tiny_tokenizer):
    evaluation = pytest.importorskip("sentence_transformers.sentence_transformer.evaluation")
    encoder = GridEncoder(tiny_model, tiny_tokenizer, Grid.parse("2x8,6x32"))
    theirs = evaluation.NanoBEIREvaluator(write_csv=False)
    tasks = find_tasks(["nanobeir"])
    assert [task.name for task in tasks] == [f"nanobeir-{name}" for name in theirs.dataset_names]
    ours = score_grid(encoder, load_task(tasks[6]))
    for g in encoder.grid:
        actual = theirs(as_sentence_transformer(encoder, g))
        for name in ("ndcg@10", "mrr@10", "recall@10"):
            assert ours[g][name] == pytest.approx(actual[f"NanoNFCorpus_cosine_{name}"], abs=1e-6)
