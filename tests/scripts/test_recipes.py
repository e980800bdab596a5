"""The recipe files end to end, on local data: a few steps of a small model in place of the real one."""

from __future__ import annotations

import gzip
import json
from itertools import islice
from pathlib import Path

import pytest
import yaml

from modeling_m3bert import M3BertModel
from scripts.train import main
from tests.conftest import tiny_config


RECIPES = Path(__file__).resolve().parents[2] / "scripts" / "recipes"
LOCALLY = ["--use_cpu", "--max_steps", "20", "--per_device_train_batch_size", "8", "--disable_tqdm", "true"]


def read(file: Path, limit: int | None = None) -> list[dict]:
    with gzip.open(file, "rt", encoding="utf-8") as lines:
        return [json.loads(line) for line in islice(lines, limit)]


def triplets(data: Path) -> list[dict[str, str]]:
    """Queries of MS MARCO with a passage of the best grade, its first sentence as a title, and one of no grade."""
    folder = data / "msmarco-mini"
    passages = {row["id"]: row["text"] for row in read(folder / "corpus.jsonl.gz")}
    queries = {row["id"]: row["text"] for row in read(folder / "queries.jsonl.gz")}
    with gzip.open(folder / "qrels.tsv.gz", "rt", encoding="utf-8") as lines:
        judged = [line.rstrip("\n").split("\t") for line in islice(lines, 1, None)]
    judged = [(query, passage) for query, passage, grade in judged if int(grade) == 3 and passage in passages]
    others = list(passages.values())
    return [
        {
            "query": queries[query],
            "positive": passages[passage],
            "negative": others[index],
            "document": passages[passage],
            "title": passages[passage].split(".")[0],
            "description": passages[passage],
        }
        for index, (query, passage) in enumerate(judged)
    ]


@pytest.fixture
def folder(tmp_path, data_folder, minilm) -> Path:
    """A small model with the real encoder's tokenizer, and files of the kinds that the recipes take."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(minilm)
    tokenizer.save_pretrained(tmp_path / "model")
    config = tiny_config(vocab_size=len(tokenizer), max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id)
    M3BertModel(config).save_pretrained(tmp_path / "model")
    rows = triplets(data_folder)
    assert len(rows) > 100
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows + rows[:5])))
    sentences = [row["sentence1"] for row in read(data_folder / "snli" / "dev.jsonl.gz", limit=400)]
    (tmp_path / "sentences.txt").write_text("\n".join(sentences))
    return tmp_path


@pytest.mark.parametrize(
    ("objective", "recipe", "file", "grid", "term"),
    [
        ("contrastive", "m3bert_stage3", "rows.jsonl", "2,6 x 8,16", "contrastive_2x8"),
        ("contrastive", "m3bert_finetune_pairs", "rows.jsonl", "2,6 x 8,32", "contrastive_6x32"),
        ("contrastive", "msmarco_triplets", "rows.jsonl", "2,4,6 x 8,32", "contrastive_4x8"),
        ("simcse", "unsupervised_simcse", "sentences.txt", None, "simcse_6x32"),
    ],
)
def test_a_recipe_runs(folder, capsys, objective, recipe, file, grid, term):
    output = folder / "out"
    arguments = [objective, "--config", RECIPES / f"{recipe}.yaml", "--model_name_or_path", folder / "model"]
    arguments += ["--train_files", folder / file, "--output_dir", output, *LOCALLY]
    main([str(argument) for argument in arguments + (["--grid", grid] if grid else [])])
    printed = capsys.readouterr().out
    (checkpoint,) = output.glob("checkpoint-*")
    state = json.loads((checkpoint / "trainer_state.json").read_text())
    assert state["global_step"] == 20
    assert term in state["log_history"][0]
    trained = M3BertModel.from_pretrained(output)
    assert trained.config.matryoshka_layers == ([2, 4, 6] if recipe == "msmarco_triplets" else [2, 6] if grid else [6])
    assert ("dropped" in printed) == (recipe == "m3bert_stage3")


def test_every_recipe_is_run_here():
    names = {path.stem for path in RECIPES.glob("*.yaml")}
    (marks,) = (mark for mark in test_a_recipe_runs.pytestmark if mark.name == "parametrize")
    assert names == {arguments[1] for arguments in marks.args[1]}
    for path in RECIPES.glob("*.yaml"):
        assert "output_dir" not in yaml.safe_load(path.read_text()), "where to write is the user's to say"
