"""
A hundred clients at once on loopback: the FastAPI service of docs/serve.md, and the demo.

    python -m benchmarks.serving_load              # two minutes each, and a minute to start
    python -m benchmarks.serving_load --quick      # ten seconds each

Encoder: all-MiniLM-L6-v2 (extra `quickstart`), converted, at layers 2, 4 and 6 and 64 and 384 dims. Each client sends
its next request when it has the answer to the last one, and asks for a granularity at random: to the service, for the
embedding of a query; to the demo, for a search of its 800 documents. Latencies are from request to answer, so with a
hundred clients they are mostly time in the queue. `errors` counts answers other than a good one, and requests without
an answer. Memory is that of the server's process: its `growth` is the difference of its means in the last and in the
second quarter of the time, as the caches of the first quarter fill once. The last line printed is a JSON object; the
latencies of each granularity are in the results file.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean, quantiles
from tempfile import TemporaryDirectory
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from scripts.command import run_command
from scripts.convert import convert
from scripts.demo import LIBRARY
from scripts.sources import default_base


PAGE = Path(__file__).parent.parent / "docs" / "serve.md"
CLIENTS, SECONDS, QUICK_SECONDS = 100, 120, 10
GRID = "2,4,6x64,384"
GRANULARITIES = [f"{layer}x{dim}" for layer in (2, 4, 6) for dim in (64, 384)]
QUERIES = ["remove a folder", "how do I read a file line by line", "the time in another time zone", "sort a list"]
BOUNDS: Bounds = {
    "service_errors": at_most(0),
    "service_requests_per_second": None,
    "service_memory_growth_mb": at_most(20),
    "demo_errors": at_most(0),
    "demo_requests_per_second": None,
    "demo_memory_growth_mb": at_most(20),
}
Ask = Callable[[str, str], bool]  # query, granularity -> whether the answer is good


def service_of_page(model: str) -> str:
    """The service of docs/serve.md, for a model."""
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    (code,) = (block for block in blocks if "FastAPI()" in block)
    return code.replace("runs/quickstart/model", model)


def answer_of(url: str, body: Any = None) -> bytes:
    """The answer to a request, with a JSON body if there is one."""
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(url, data, {"Content-Type": "application/json"}), timeout=120) as answer:
        return answer.read()


def ask_service(url: str) -> Ask:
    def ask(query: str, granularity: str) -> bool:
        (vector,) = json.loads(answer_of(f"{url}/embed", {"inputs": [query], "granularity": granularity}))
        return len(vector) == int(granularity.partition("x")[2])

    return ask


def ask_demo(url: str) -> Ask:
    def ask(query: str, granularity: str) -> bool:
        layer, dim = granularity.split("x")
        positions = [["2", "4", "6"].index(layer) + 1, ["64", "384"].index(dim) + 1]
        call = f"{url}/gradio_api/call/compare"
        event = json.loads(answer_of(call, {"data": [LIBRARY, "", query, *positions, "int8"]}))["event_id"]
        found = answer_of(f"{call}/{event}").decode()
        return "event: complete" in found and f"{layer} layers, {dim} dims" in found

    return ask


@contextmanager
def server(command: list[str], folder: Path, url: str) -> Iterator[int]:
    """A server in a process of its own, from when it answers on; its process id."""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        while True:
            try:
                answer_of(url)
                break
            except OSError as error:
                if isinstance(error, HTTPError):
                    break
                if process.poll() is not None:
                    raise ValueError((folder / "server.log").read_text()) from error
                time.sleep(0.5)
        yield process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def load(run: Run, name: str, pid: int, ask: Ask) -> dict[str, float]:
    """What a hundred clients see of a server: the figures of a case."""
    seconds = QUICK_SECONDS if run.quick else SECONDS
    taken: dict[str, list[float]] = {granularity: [] for granularity in GRANULARITIES}
    problems: list[str] = []
    end = time.monotonic() + seconds

    def client(number: int) -> None:
        draw = random.Random(SEED + number)
        while time.monotonic() < end:
            granularity, start = draw.choice(GRANULARITIES), time.perf_counter()
            try:
                if not ask(draw.choice(QUERIES), granularity):
                    problems.append("another answer")
            except (OSError, ValueError) as error:
                problems.append(repr(error))
            taken[granularity].append(time.perf_counter() - start)

    clients = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for each in clients:
        each.start()
    memory = []
    while any(each.is_alive() for each in clients):
        memory.append(resident(pid))
        time.sleep(0.2)
    for granularity, its in taken.items():
        twentieths = quantiles(its, n=20, method="inclusive")
        run.record(f"{name}, {granularity}", {"p50": twentieths[9], "p95": twentieths[18]})
    if problems:
        run.note(f"{name}_problem", problems[0][:200])
    quarter = len(memory) // 4
    requests = sum(map(len, taken.values()))
    return {
        f"{name}_errors": len(problems),
        f"{name}_requests_per_second": requests / seconds,
        f"{name}_memory_growth_mb": fmean(memory[-quarter:]) - fmean(memory[quarter : 2 * quarter]),
    }


def resident(pid: int) -> float:
    """Memory of a process in megabytes. Linux only."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    return int(re.findall(r"VmRSS:\s+(\d+)", status)[0]) / 1024


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def measure(run: Run) -> dict[str, float]:
    found: dict[str, float] = {}
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        convert(default_base(), str(folder / "model"))
        (folder / "service.py").write_text(service_of_page(str(folder / "model")), encoding="utf-8")
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        with server([sys.executable, "-m", "uvicorn", "service:app", "--port", str(port)], folder, url) as pid:
            found |= load(run, "service", pid, ask_service(url))
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        options = ["--model", str(folder / "model"), "--grid", GRID, "--port", str(port)]
        with server([sys.executable, "-m", "m3bert", "demo", *options], folder, url) as pid:
            found |= load(run, "demo", pid, ask_demo(url))
    return found


BENCHMARK = Benchmark("serving_load", __doc__, BOUNDS, measure, ("fastapi", "gradio", "sentence-transformers"))

if __name__ == "__main__":
    run_command(BENCHMARK.main)
