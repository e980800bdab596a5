"""Qdrant: a folder and a server find the same, what a server is told, and whose collection it is."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from m3bert.index.engine import Engine, Layout
from tests.index.collection import Collection, add, check_exact, make_layout, opened


if TYPE_CHECKING:
    from tests.index.qdrant_server import QdrantServer

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
    from tests.index.qdrant_server import QdrantServer

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
        if engine.layout.url == os.environ.get("QDRANT_URL") and engine.layout.collection is not None:
            engine._client.delete_collection(engine.layout.collection)
        engine.close()


@pytest.mark.parametrize(
    ("kind", "text"), [*(("flat", text) for text in LAYOUTS[:2]), *(("hnsw", text) for text in LAYOUTS[2:])]
)
def test_a_server_finds_the_nearest(tmp_path, url, collection, filled, text, kind):
    """A graph is made for more documents than these, so that both kinds are exact."""
    layout = make_layout(collection, text, kind, url)
    engine = filled(tmp_path, layout)
    check_exact(layout, collection, engine.search(collection.queries, 10), 10)
    remaining = [row for row in range(ROWS) if row % 3]
    engine.delete(range(0, ROWS, 3))
    again = opened(tmp_path, layout, "qdrant")
    check_exact(layout, collection, again.search(collection.queries, 10), 10, remaining)
    sea = [row for row in remaining if collection.metadata(row)["topic"] == "the sea's"]
    check_exact(layout, collection, again.search(collection.queries, 10, {"topic": ["the sea's"]}), 10, sea)
    assert again.keys_of(["id-0", "id-1"]) == {"id-1": 1} and again.count() == len(remaining)
    again.truncate(100)
    early = [row for row in remaining if row < 100]
    check_exact(layout, collection, again.search(collection.queries, 10), 10, early)
    again.close()


def test_a_folder_is_opened_once(tmp_path, collection, filled):
    layout = make_layout(collection, "64@float32")
    engine = filled(tmp_path, layout)
    with pytest.raises(OSError, match=r"^Qdrant, .*is already accessed by another instance"):
        opened(tmp_path, layout, "qdrant")
    engine.close()
    opened(tmp_path, layout, "qdrant").close()


def test_a_server_keeps_codes_in_memory_and_vectors_on_its_disk(tmp_path, collection, filled, server):
    layout = make_layout(collection, "64@binary>40>64@float32", "hnsw", server.url)
    engine = filled(tmp_path / "my index", layout)
    bodies = {(method, path): body for method, path, body in server.requests}
    vectors = bodies["PUT", f"/collections/{layout.collection}"]["vectors"]
    first, second = vectors["first"], vectors["second"]
    assert first["datatype"] == "float16" and second["datatype"] == "float32"
    assert first["on_disk"] is second["on_disk"] is True
    assert first["quantization_config"]["binary"]["always_ram"] is True and "hnsw_config" not in first
    assert second["hnsw_config"] == {"m": 0} and "quantization_config" not in second
    indexes = [body for method, path, body in server.requests if path.endswith("/index")]
    assert {(body["field_name"], body["field_schema"]) for body in indexes} == {
        ("key", "integer"), ("id", "keyword"), ("metadata.year", "integer"), ("metadata.topic", "keyword"),
        ("metadata.score", "float"), ("metadata.open", "bool"),
    }  # fmt: skip
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
    assert "a-secret" not in str(engine.layout.to_dict())


def test_a_server_that_is_not_there_is_one_line(tmp_path, collection):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    engine = opened(tmp_path, make_layout(collection, "64@float32", url=url), "qdrant")
    with pytest.raises(OSError, match=rf"^Qdrant, {url}: .*refused") as caught:
        engine.search(collection.queries, 10)
    assert "\n" not in str(caught.value)
