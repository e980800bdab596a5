"""A server with the interface of Qdrant, on this machine. Qdrant's own models read the requests, and its local mode
answers them."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from qdrant_client import QdrantClient, models


class QdrantServer:
    """
    The server. It runs until [`QdrantServer.close`].

    Attributes:
        url (`str`): Its address.
        requests (`list[tuple[str, str, Any]]`): Method, path and body of every request.
        keys (`set[str | None]`): API keys that requests had.
    """

    def __init__(self) -> None:
        self.client, self.lock = QdrantClient(":memory:"), Lock()
        self.requests: list[tuple[str, str, Any]] = []
        self.keys: set[str | None] = set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, path: str, body: Any) -> Any:
        """The field `result` of the answer to a request."""
        _, _, name, *rest = path.split("/")
        client = self.client
        match method, "/".join(rest):
            case "GET", "exists":
                return {"exists": client.collection_exists(name)}
            case "GET", "":
                return client.get_collection(name).model_dump(mode="json")
            case "DELETE", "":
                return client.delete_collection(name)
            case "PUT", "":
                asked = models.CreateCollection(**body)
                return client.create_collection(name, vectors_config=asked.vectors)
            case "PUT", "index":
                return _done(models.CreateFieldIndex(**body))
            case "PUT", "points":
                return _done(client.upsert(name, models.PointsList(**body).points))
            case "POST", "points/delete":
                return _done(client.delete(name, models.FilterSelector(**body)))
            case "POST", "points/count":
                return {"count": client.count(name).count}
            case "POST", "points/scroll":
                points, _ = client.scroll(name, models.Filter(**body["filter"]), limit=body["limit"])
                return {"points": [point.model_dump(mode="json") for point in points], "next_page_offset": None}
            case "POST", "points/query":
                return client.query_points(name, **_query(body)).model_dump(mode="json")
        raise ValueError(f"{method} {path}")


def _query(body: Any) -> dict[str, Any]:
    asked = models.QueryRequest(**body)
    return {
        "query": asked.query, "using": asked.using, "prefetch": asked.prefetch, "query_filter": asked.filter,
        "limit": asked.limit, "with_payload": asked.with_payload or False,
    }  # fmt: skip


def _done(_: Any) -> dict[str, Any]:
    return {"operation_id": 0, "status": "completed"}


def handler(server: QdrantServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def _answer(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            path = self.path.partition("?")[0]
            if path == "/":
                content: Any = {"title": "qdrant - vector search engine", "version": "1.20.0"}
            else:
                with server.lock:
                    server.requests.append((self.command, path, body))
                    server.keys.add(self.headers.get("api-key"))
                    content = {"result": server.answer(self.command, path, body), "status": "ok", "time": 0.0}
            data = json.dumps(content).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_PATCH = do_DELETE = _answer

        def log_message(self, *_: Any) -> None:
            pass

    return Handler
