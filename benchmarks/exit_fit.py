"""
Fitting the exits of all layers against encoding the texts once.

    python -m benchmarks.exit_fit

The encoder is that of the extra `quickstart`, the texts are the documentation of Python's standard library. The fit is
timed whole, and inside it the encoding: tokens, layers and pooling. What the fit adds is the rest. Medians over
rounds. The last line printed is a JSON object: `fit_vs_encode` is the time beyond encoding, divided by the time of
encoding. A part of the rest does not grow with the texts, so more texts have a smaller ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any
from unittest.mock import patch

import torch

from benchmarks._measure import about
from scripts.convert import converted
from scripts.sources import default_base
from trainers import exits, fit_exits
from trainers.data.stdlib_docs import stdlib_pairs


SEED = 0


def measure(texts: int, rounds: int) -> dict[str, Any]:
    """Seconds of encoding and of everything else in a fit, as medians."""
    model, tokenizer = converted(default_base())
    pairs = stdlib_pairs()
    every = [text for pair in pairs for text in (pair.summary, pair.body)][:texts]
    encoding = 0.0
    encode = exits.ExitReader.encode

    def timed(*args: Any, **kwargs: Any) -> Any:
        nonlocal encoding
        start = time.perf_counter()
        pooled = encode(*args, **kwargs)
        encoding += time.perf_counter() - start
        return pooled

    seconds: dict[str, list[float]] = {"encode": [], "beyond": []}
    fit_exits(model, tokenizer, every[:400], max_length=128)  # warm up
    with patch.object(exits.ExitReader, "encode", timed):
        for _ in range(rounds):
            encoding, start = 0.0, time.perf_counter()
            fit_exits(model, tokenizer, every, max_length=128)
            seconds["encode"].append(encoding)
            seconds["beyond"].append(time.perf_counter() - start - encoding)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"texts": len(every), **{f"{name}_seconds": round(value, 2) for name, value in medians.items()}} | {
        "fit_vs_encode": round(medians["beyond"] / medians["encode"], 4)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=4096, help="number of texts")
    parser.add_argument("--rounds", type=int, default=3, help="timed fits")
    options = parser.parse_args()
    torch.manual_seed(SEED)
    print(json.dumps(measure(options.texts, options.rounds) | about(SEED)))


if __name__ == "__main__":
    main()
