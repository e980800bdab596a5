"""A tiny encoder that was really trained and really evaluated, as its owner has it on disk before publishing it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset

from m3bert.evaluation import GridResults, evaluate_grid, find_tasks, measure_latency
from m3bert.exits.fit import fit_exits
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.modeling import M3BertModel
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, Grid
from tests.conftest import quiet, save, tiny_config
from tests.evaluation_data import write_data


GRID = "2,4,6x8,16,32"
TASKS = ("stsb", "cranfield", "banking77")


def contrastive_trainer(
    folder: Path, tokenizer: Any, sentences: Sequence[str], model: Any = None, **changes: Any
) -> ContrastiveTrainer:
    """A trainer for two steps that leaves a checkpoint, with the state of the optimizer, in its folder."""
    pairs = Dataset.from_dict({"anchor": list(sentences[:24]), "positive": list(sentences[24:48])})
    values = {
        "grid": GRID, "max_steps": 2, "per_device_train_batch_size": 8, "max_length": 40, "save_strategy": "steps",
        "save_steps": 2,
    }  # fmt: skip
    config = ContrastiveConfig(**quiet(folder, **{**values, **changes}))
    return ContrastiveTrainer(model or M3BertModel(tiny_config()), config, tokenizer, pairs)


def evaluated(folder: Path, data: Path, sentences: Sequence[str], latency: bool = True) -> GridResults:
    """Scores of a checkpoint over its grid, on made-up data that is written to `data` if it is not there."""
    if not data.exists():
        write_data(data, sentences)
    encoder = Checkpoint(folder).encoder(Grid.parse(GRID))
    results = evaluate_grid(encoder, find_tasks(TASKS), data)
    if latency:
        results.latency = measure_latency(encoder, sentences[:2], documents=300, rounds=2)
    return results


def save_with_exits(
    folder: Path,
    tokenizer: Any,
    sentences: Sequence[str],
    static: bool = True,
    paths: Mapping[int, Sequence[int]] | None = None,
    **changes: Any,
) -> M3BertModel:
    """A tiny model with fitted exits at depths 1, 2 and 4 of 6, a table and a rotated last layer, saved with its
    tokenizer and modules; `changes` are arguments of its config."""
    model = M3BertModel(tiny_config(**changes)).eval()
    sources = {"words.txt": sentences[:24], "names.txt": sentences[24:]}
    prefixes = [depth for depth in (1, 2, 4) if depth not in (paths or {})]
    fit_exits(model, tokenizer, sources, layers=prefixes, paths=paths, basis="principal", static=static)
    save(folder, model, tokenizer, max_length=model.config.max_position_embeddings)
    return model


def assert_served(folder: Path) -> None:
    """The folder of an embedding model has the fields that text-embeddings-inference and vLLM read, with their types
    (`router/src/lib.rs` and `vllm/transformers_utils/config.py`, read 2026-11-22)."""
    assert (folder / "tokenizer.json").is_file()
    names = ("config.json", "sentence_bert_config.json", "1_Pooling/config.json", "config_sentence_transformers.json")
    config, encoder, pooling, similarity = (json.loads((folder / name).read_text()) for name in names)
    assert isinstance(config["architectures"], list) and isinstance(config["model_type"], str)
    assert 0 < encoder["max_seq_length"] <= config["max_position_embeddings"]
    assert isinstance(encoder["do_lower_case"], bool)
    assert [value for name, value in pooling.items() if name.startswith("pooling_mode_")].count(True) == 1
    assert isinstance(pooling["word_embedding_dimension"], int)
    assert all(isinstance(prompt, str) for prompt in similarity["prompts"].values())
    dims = config.get("matryoshka_dimensions") or []
    assert sorted(set(dims)) == dims and bool(dims) == bool(config.get("is_matryoshka"))
    for module in json.loads((folder / "modules.json").read_text()):
        kind = module["type"].removeprefix("sentence_transformers.models.")
        assert kind in ("Transformer", "Pooling", "Dense", "Normalize")
        if kind == "Dense":
            dense = json.loads((folder / module["path"] / "config.json").read_text())
            assert isinstance(dense["bias"], bool) and (folder / module["path"] / "model.safetensors").is_file()
            assert dense["activation_function"] == "torch.nn.modules.linear.Identity"
