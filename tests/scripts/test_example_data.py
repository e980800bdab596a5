"""The example files: what every page of the documentation reads."""

import json

from m3bert.commands.example_data import main
from m3bert.data.files import load_files
from m3bert.evaluation import collection_task, find_task, labels_task, load_task, pairs_task
from tests.conftest import refused


def rows(file) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_the_three_files_fit_together_and_hold_no_text_of_the_task(tmp_path, capsys):
    main([str(tmp_path)])
    pairs, corpus = rows(tmp_path / "pairs.jsonl"), rows(tmp_path / "corpus.jsonl")
    lines = (tmp_path / "text.txt").read_text().splitlines()
    assert len(pairs) == len(corpus) == len(lines) > 1500
    assert [pair["anchor"] for pair in pairs] == lines
    assert [pair["positive"] for pair in pairs] == [document["text"] for document in corpus]
    assert all(document["title"] for document in corpus)
    task = load_task(find_task("stdlib"))
    assert not {*lines} & {*task.texts["queries"]}
    assert not {document["text"] for document in corpus} & {*task.texts["documents"]}
    assert f"pairs.jsonl: {len(pairs):,} lines" in capsys.readouterr().out


def test_three_columns_to_train_on_and_data_to_score_that_training_has_not_seen(tmp_path):
    main([str(tmp_path)])
    triplets = load_files([str(tmp_path / "triplets.csv")])
    assert triplets.column_names == ["anchor", "positive", "negative"] and len(triplets) > 1500
    assert all(row["positive"] != row["negative"] for row in triplets)
    trained = {text for column in triplets.column_names for text in triplets[column]}
    collection, matches = (
        load_task(task)
        for task in (collection_task(str(tmp_path / "collection")), pairs_task(str(tmp_path / "labelled_pairs.csv")))
    )
    assert len(collection.texts["documents"]) == 200 and collection.relevant == [{row: 1.0} for row in range(200)]
    assert sum(matches.labels) == 200 and len(matches.labels) == 400
    assert not trained & {*collection.texts["queries"], *matches.texts["sentence1"], *matches.texts["sentence2"]}
    kinds = load_task(labels_task(str(tmp_path / "classes.csv")))
    assert {*kinds.train_labels} == {*kinds.test_labels} == {"language", "built-in", "library"}


def test_it_runs_twice_but_never_over_a_file_of_yours(tmp_path):
    main([str(tmp_path)])
    main([str(tmp_path)])
    (tmp_path / "text.txt").write_text("mine\n")
    (tmp_path / "pairs.jsonl").unlink()
    refused(r"text.txt exists and is no example file", main, [str(tmp_path)])
    assert (tmp_path / "text.txt").read_text() == "mine\n" and not (tmp_path / "pairs.jsonl").exists()
