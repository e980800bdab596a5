"""Ray Data embeds with the function of the package what the command embeds."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts import embed
from scripts.encoder import EncoderArguments, load_encoder
from trainers import Granularity
from trainers.evaluation.bulk import GridEmbedder
from trainers.evaluation.parts import read_vectors, search_parts


pytestmark = pytest.mark.slow


@pytest.fixture
def ray(monkeypatch):
    """Ray on this machine, without the network."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_DATA_DISABLE_PROGRESS_BARS", "1")
    ray = pytest.importorskip("ray", reason="ray is not installed")
    pytest.importorskip("ray.data", reason="ray[data] is not installed")
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)  # two of them read and write
    yield ray
    ray.shutdown()


def load(arguments: EncoderArguments, folder: Path):
    """The encoder, and a trace of the process that loaded it."""
    (folder / str(os.getpid())).touch()
    return load_encoder(arguments)


def test_ray_gives_the_rows_of_the_command(ray, tiny_checkpoint, tmp_path, sentences):
    rows = [{"id": f"d{row}", "title": "open", "text": text} for row, text in enumerate(sentences)]
    for part in range(4):
        (tmp_path / "in").mkdir(exist_ok=True)
        pq.write_table(pa.Table.from_pylist(rows[part::4]), tmp_path / "in" / f"{part}.parquet")
    files = sorted(map(str, (tmp_path / "in").iterdir()))
    line = ["--model_name_or_path", tiny_checkpoint, "--files", *files, "--output_dir", str(tmp_path / "parts")]
    line += ["--text_column", "title+text", "--grid", "2,6x8,16", "--document"]
    embed.main([*line, "--shard", "0/1"])
    expected = pa.concat_tables(pq.read_table(tmp_path / "parts" / f"{part}.parquet") for part in range(4))

    arguments = EncoderArguments(model_name_or_path=tiny_checkpoint, grid="2,6x8,16")
    (tmp_path / "processes").mkdir()
    options = {"load": partial(load, arguments, tmp_path / "processes"), "text_column": "title+text"}
    embedded = (
        ray.data.read_parquet(str(tmp_path / "in"))
        .repartition(8)
        .map_batches(
            GridEmbedder,
            fn_constructor_kwargs=options,
            batch_size=4,
            compute=ray.data.ActorPoolStrategy(size=2),
        )
    )
    embedded.write_parquet(str(tmp_path / "ray"))

    processes = {int(file.name) for file in (tmp_path / "processes").iterdir()}
    assert len(processes) == 2 and os.getpid() not in processes
    outputs = sorted((tmp_path / "ray").glob("*.parquet"))
    found = pa.concat_tables(pq.read_table(file, columns=["id", "title", "text"]) for file in outputs)
    order = np.argsort(found["id"].to_pylist())
    own_order = np.argsort(expected["id"].to_pylist())
    assert found.take(order).to_pylist() == expected.select(["id", "title", "text"]).take(own_order).to_pylist()
    for granularity in (Granularity(2, 16), Granularity(6, 16), Granularity(6, 8)):
        theirs = np.concatenate([block for file in outputs for block in read_vectors(file, granularity)])[order]
        ours = [
            block for part in range(4) for block in read_vectors(tmp_path / "parts" / f"{part}.parquet", granularity)
        ]
        np.testing.assert_allclose(theirs, np.concatenate(ours)[own_order], atol=1e-5)
    query = load_encoder(arguments).encode([f"open </s> {sentences[7]}"], role="document").at(Granularity(6, 16))
    assert search_parts(outputs, query, Granularity(6, 16), 1)[1] == [["d7"]]
