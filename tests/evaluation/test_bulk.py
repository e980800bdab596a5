"""A function that adds embeddings to batches of rows, in this process and in the workers of Ray Data."""

import os
import pickle
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset

from m3bert.commands.encoder import EncoderArguments, load_encoder
from m3bert.evaluation import GridEncoder
from m3bert.evaluation.bulk import GridEmbedder
from m3bert.trainers import Granularity, Grid
from tests.conftest import assert_close


@pytest.fixture
def encoder(tiny_model, tiny_tokenizer) -> GridEncoder:
    grid = Grid.parse("2,6x8,16")
    return GridEncoder(tiny_model, tiny_tokenizer, grid, batch_size=4, prompts={"document": "open "})


def itself(value):
    return value


def test_a_batch_gets_a_column_per_layer(encoder, sentences):
    embedder = GridEmbedder(partial(itself, encoder))
    actual = embedder({"id": [1, 2, 3], "text": np.array(sentences[:3], dtype=object)})
    expected = encoder.encode(sentences[:3], role="document")
    assert list(actual) == ["id", "text", "layer_2", "layer_6"]
    for layer in (2, 6):
        np.testing.assert_allclose(actual[f"layer_{layer}"], expected.layers[layer], rtol=1e-5)
    unit = GridEmbedder(partial(itself, encoder), role="query", normalize=True)({"text": sentences[:3]})
    assert_close(unit["layer_6"], encoder.encode(sentences[:3]).at(Granularity(6, 16), normalize=True))
    empty = embedder({"id": [], "text": []})
    assert empty["layer_2"].shape == (0, 16) and empty["layer_2"].dtype == np.float32


def test_datasets_maps_the_function_which_travels_without_its_encoder(encoder, sentences):
    embedder = GridEmbedder(partial(itself, "encoder"), text_column="title+text")
    assert embedder.encoder == "encoder" and "encoder" not in vars(pickle.loads(pickle.dumps(embedder)))
    rows = Dataset.from_dict({"title": ["read"] * len(sentences), "text": sentences})
    mapped = rows.map(GridEmbedder(partial(itself, encoder), text_column="title+text"), batched=True, batch_size=7)
    expected = encoder.encode([f"read </s> {text}" for text in sentences], role="document").layers[6]
    np.testing.assert_allclose(np.array(mapped["layer_6"][:]), expected, atol=1e-5)


def load(arguments: EncoderArguments, folder: Path):
    """The encoder, and a trace of the process that loaded it."""
    (folder / str(os.getpid())).touch()
    return load_encoder(arguments)


@pytest.mark.slow
def test_ray_maps_the_function_in_processes_of_its_own(tiny_checkpoint, tmp_path, sentences, monkeypatch):
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.data", reason="ray[data] is not installed")
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    arguments = EncoderArguments(model_name_or_path=tiny_checkpoint, grid="2,6x8,16")
    (tmp_path / "processes").mkdir()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)  # two of them read and write
    try:
        rows = ray.data.from_items([{"id": row, "text": text} for row, text in enumerate(sentences)]).repartition(8)
        options = {"load": partial(load, arguments, tmp_path / "processes")}
        workers = ray.data.ActorPoolStrategy(size=2)
        mapped = rows.map_batches(GridEmbedder, fn_constructor_kwargs=options, batch_size=4, compute=workers)
        actual = {row["id"]: row["layer_6"] for row in mapped.take_all()}
    finally:
        ray.shutdown()
    processes = {int(file.name) for file in (tmp_path / "processes").iterdir()}
    assert len(processes) == 2 and os.getpid() not in processes
    expected = load_encoder(arguments).encode(sentences, role="document").layers[6]
    np.testing.assert_allclose(np.stack([actual[row] for row in range(len(sentences))]), expected, atol=1e-5)
