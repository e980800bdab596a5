"""Qdrant: a folder and a server find the same, what a server is told, and whose collection it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING
from uuid import uuid4

import numpy as np
import pytest

from tests.trainers.index.collection import Collection, add, check_exact, delete, make_layout, opened
from trainers.index.engine import Engine
from trainers.index.engines import qdrant_engine
from trainers.index.engines.lines import with_imports
from trainers.index.layout import Layout


if TYPE_CHECKING:
    from tests.trainers.index.qdrant_server import QdrantServer

pytestmark = [
    pytest.mark.skipif(find_spec("qdrant_client") is None, reason="needs qdrant-client, whose import takes seconds"),
    # A client that is closed at once cannot ask for the version.
    pytest.mark.filterwarnings("ignore:Failed to obtain server version"),
]
LAYOUTS = ("64@float32", "64@int8", "20@binary", "16@float32>40>64@float32", "64@binary>40>64@float32", "32@binary>40")
ROWS = 150


@pytest.fixture(scope="module")
def collection() -> Collection:
    return Collection.make(ROWS)


@pytest.fixture
def server() -> Iterator[QdrantServer]:
    from tests.trainers.index.qdrant_server import QdrantServer

    server = QdrantServer()
    yield server
    server.close()


@pytest.fixture(params=["a server of the test", "QDRANT_URL"])
def url(request) -> Iterator[str]:
    if request.param == "QDRANT_URL":
        if "QDRANT_URL" not in os.environ:
            pytest.skip("QDRANT_URL names no server of Qdrant")
        yield os.environ["QDRANT_URL"]
    else:
        yield request.getfixturevalue("server").url


@pytest.fixture
def folder(tmp_path, url) -> Iterator[Path]:
    """A folder with a name of its own, whose collection is deleted afterwards."""
    folder = tmp_path / f"m3bert test {uuid4()}"
    folder.mkdir()
    yield folder
    from qdrant_client import QdrantClient

    client = QdrantClient(url=url, api_key=os.environ.get("QDRANT_API_KEY"))
    client.delete_collection(folder.name.replace(" ", "-"))
    client.close()


@pytest.fixture
def filled(collection) -> Iterator[Callable[..., Engine]]:
    """A function that makes an index of the collection. The index is closed after the test."""
    engines = []

    def make(folder: Path, layout: Layout) -> Engine:
        engine = opened(folder, layout, "qdrant")
        engines.append(engine)
        add(engine, collection, range(ROWS))
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.mark.parametrize(
    ("kind", "text"), [*(("flat", text) for text in LAYOUTS[:2]), *(("hnsw", text) for text in LAYOUTS[2:])]
)
def test_a_server_finds_the_nearest(folder, url, collection, filled, text, kind):
    """A graph is made for more documents than these, so that both kinds are exact."""
    layout = make_layout(collection, text, kind, url)
    engine = filled(folder, layout)
    scores, keys = engine.search(collection.queries, 10)
    check_exact(layout, collection, scores, keys, 10)
    kept = [row for row in range(ROWS) if row % 3]
    delete(engine, range(0, ROWS, 3))
    again = opened(folder, layout, "qdrant")
    check_exact(layout, collection, *again.search(collection.queries, 10), 10, kept)
    sea = [row for row in kept if collection.metadata(row)["topic"] == "the sea's"]
    check_exact(layout, collection, *again.search(collection.queries, 10, {"topic": ["the sea's"]}), 10, sea)
    values = {"query": collection.queries[0].numpy()}
    exec(with_imports(again.example()), values)
    scores, keys = again.search(collection.queries[:1], 10)
    np.testing.assert_allclose([score for _, score in values["found"]], scores[0], atol=2e-5)
    assert {key for key, _ in values["found"][:5]} <= {f"id-{key}" for key in keys[0].tolist()}
    again.close()


def test_a_folder_is_opened_once(tmp_path, collection, filled):
    layout = make_layout(collection, "64@float32")
    engine = filled(tmp_path, layout)
    with pytest.raises(ValueError, match=r"qdrant is open already, and Qdrant opens a folder only once: .* \(--url\)"):
        opened(tmp_path, layout, "qdrant")
    engine.close()
    opened(tmp_path, layout, "qdrant").close()


def test_a_server_keeps_codes_in_memory_and_vectors_on_its_disk(tmp_path, collection, filled, server):
    layout = make_layout(collection, "64@binary>40>64@float32", "hnsw", server.url)
    engine = filled(tmp_path / "my index", layout)
    bodies = {(method, path): body for method, path, body in server.requests}
    vectors = bodies["PUT", "/collections/my-index"]["vectors"]
    first, second = vectors["first"], vectors["second"]
    assert first["datatype"] == "float16" and second["datatype"] == "float32"
    assert first["on_disk"] is second["on_disk"] is True
    assert first["quantization_config"]["binary"]["always_ram"] is True and "hnsw_config" not in first
    assert second["hnsw_config"] == {"m": 0} and "quantization_config" not in second
    indexes = [body for method, path, body in server.requests if path.endswith("/index")]
    assert {(body["field_name"], body["field_schema"]) for body in indexes} == {
        ("metadata.year", "integer"),
        ("metadata.topic", "keyword"),
        ("metadata.score", "float"),
        ("metadata.open", "bool"),
    }
    engine.search(collection.queries, 10)
    search = server.requests[-1][2]
    assert search["limit"] == 10 and search["params"] == {"exact": True} and search["using"] == "second"
    assert search["prefetch"]["limit"] == 40 and search["prefetch"]["using"] == "first"
    assert search["prefetch"]["params"] == {"hnsw_ef": 256, "quantization": {"rescore": False}}


def test_a_key_is_sent_and_kept_nowhere(tmp_path, collection, filled, server, monkeypatch):
    monkeypatch.setenv("QDRANT_API_KEY", "a-secret")
    layout = make_layout(collection, "64@float32", url=server.url)
    with pytest.warns(UserWarning, match="insecure"):
        engine = filled(tmp_path / "index", layout)
    assert server.keys == {"a-secret"}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files and all(b"a-secret" not in path.read_bytes() for path in files)
    assert "a-secret" not in str(engine.example()) + str(layout.to_dict())


def test_a_collection_of_another_index_is_left_alone(tmp_path, collection, filled, server):
    layout = make_layout(collection, "64@float32", url=server.url)
    filled(tmp_path / "index", layout)
    other = tmp_path / "other" / "index"
    with pytest.raises(ValueError, match=r"has a collection 'index' of another index: delete it there, or give"):
        opened(other, layout, "qdrant")
    (tmp_path / "index").rename(tmp_path / "moved")
    moved = opened(tmp_path / "moved", layout, "qdrant")
    assert moved.search(collection.queries, 1)[1].min() >= 0
    moved.close()


def test_finishing_waits_for_the_server(tmp_path, collection, filled, server, monkeypatch):
    monkeypatch.setattr(qdrant_engine.time, "sleep", lambda seconds: None)
    engine = filled(tmp_path / "index", make_layout(collection, "64@float32", url=server.url))
    server.statuses, before = ["yellow", "grey", "yellow"], len(server.requests)
    engine.add(np.array([0]))
    assert [method for method, *_ in server.requests[before:]] == ["PUT", "GET", "GET", "PATCH", "GET", "GET"]
    server.statuses = ["red"]
    with pytest.raises(OSError, match=rf"^Qdrant, {server.url}: the collection has the status red"):
        engine.add(np.array([0]))


def test_a_server_that_is_not_there_is_one_line(tmp_path, collection):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(OSError, match=rf"^Qdrant, {url}: .*refused") as caught:
        opened(tmp_path, make_layout(collection, "64@float32", url=url), "qdrant")
    assert "\n" not in str(caught.value)
