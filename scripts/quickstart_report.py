"""What a run of the quickstart reports: its tables, its figure and its `results.json`."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from hub_cards.onnx_export import missing_packages
from hub_cards.tables import engine_table, latency_note, markdown, percent
from trainers import Granularity, Grid
from trainers.core.extras import require_extra
from trainers.evaluation import Latency


# Keys of results.json -> headings. A search is symmetric, or has all documents at the last layer.
SEARCHES = {
    "untouched": "converted",
    "exits": "exits",
    "exits_asymmetric": "exits, documents at layer {last}",
    "trained": "trained",
    "trained_asymmetric": "trained, documents at layer {last}",
}
METRICS = {"recall@10": "Recall@10", "mrr@10": "MRR@10"}
Scores = dict[Granularity, dict[str, float]]


class Clock:
    """Seconds of each stage of the run."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def time(self, stage: str) -> Iterator[None]:
        """Time what runs inside."""
        start = time.perf_counter()
        yield
        self.seconds[stage] = round(time.perf_counter() - start, 1)


def report(grid: Grid, scores: Mapping[str, Scores], latency: Latency, tfidf: Mapping[str, float]) -> str:
    """The final table, in Markdown: Recall@10 / MRR@10 of each search, latency and size."""
    searches = [SEARCHES[name].format(last=grid.full.layer) for name in scores]
    rows = [
        [str(g), *(cell(found[g]) for found in scores.values()), f"{latency.of(g):.1f}", str(4 * g.dim)] for g in grid
    ]
    rows.append(["TF-IDF", *[cell(tfidf)] * len(scores), "", ""])
    return markdown(["granularity", *searches, "ms per query", "bytes per vector"], rows)


def cell(scores: Mapping[str, float]) -> str:
    """Recall@10 and MRR@10 in percent."""
    return " / ".join(percent(scores[metric]) for metric in METRICS)


def latency_report(grid: Grid, latency: Latency) -> str:
    """What the times of the table are, and those of the other engines, or the extra that they need."""
    engines = engine_table(latency, grid.layers)
    if engines:
        return f"{latency_note(latency)}\n\nms to encode one query, by engine:\n\n{engines}"
    return (
        f"{latency_note(latency)} Not measured in onnxruntime, which needs {', '.join(missing_packages())}: "
        "pip install 'm3bert[onnx]'."
    )


def require_figure() -> Any:
    """matplotlib's `Figure`."""
    return require_extra("matplotlib.figure", "quickstart", "The quickstart").Figure


def draw(grid: Grid, scores: Mapping[str, Scores], tfidf: Mapping[str, float], file: Path) -> None:
    """Plot Recall@10 over bytes per vector, one colour per layer: symmetric search on the left, documents at the last
    layer on the right."""
    figure = require_figure()(figsize=(9, 4.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    colors = dict(zip(grid.layers, ("#e7298a", "#d95f02", "#7570b3", "#1b9e77"), strict=True))
    styles = {"untouched": ":", "exits": "--", "trained": "-"}
    titles = ("documents at the layer of the query", f"documents at layer {grid.full.layer}: one index")
    for axes, suffix, title in zip(panels, ("", "_asymmetric"), titles, strict=True):
        for start, style in styles.items():
            for layer in grid.layers if f"{start}{suffix}" in scores else ():
                found = scores[f"{start}{suffix}"]
                recalls = [100 * found[Granularity(layer, dim)]["recall@10"] for dim in grid.dims]
                axes.plot([4 * dim for dim in grid.dims], recalls, style, color=colors[layer], marker="o", ms=4)
        axes.axhline(100 * tfidf["recall@10"], color="grey", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks([4 * dim for dim in grid.dims], [str(4 * dim) for dim in grid.dims])
        axes.set_xlabel("bytes per vector (float32)")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("Recall@10 of held-out documentation (%)")
    panels[0].set_ylim(0, 100)
    for layer, color in colors.items():
        panels[0].plot([], [], "o", color=color, label=f"queries at layer {layer}")
    for start, style in styles.items():
        if start in scores:
            panels[0].plot([], [], style, color="black", label=SEARCHES[start])
    panels[0].plot([], [], color="grey", linewidth=1, label="TF-IDF")
    figure.legend(handlelength=3, fontsize="small", ncols=4, loc="outside upper center")
    figure.savefig(file, dpi=150)


def write_results(
    file: Path,
    settings: Mapping[str, Any],
    grid: Grid,
    scores: Mapping[str, Scores],
    latency: Latency,
    tfidf: Mapping[str, float],
    clock: Clock,
) -> None:
    """
    Write `results.json`.

    Args:
        file (`Path`): The file.
        settings (`dict[str, Any]`): What was run, and with what.
        grid ([`Grid`]): The granularities.
        scores (`dict[str, dict[Granularity, dict[str, float]]]`): Search -> granularity -> metric -> value.
        latency ([`Latency`]): Latency of one query.
        tfidf (`dict[str, float]`): Scores of the baseline.
        clock ([`Clock`]): Seconds of each stage.
    """
    results = {
        "date": date.today().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {torch.cuda.device_count()} GPUs",
        "versions": {name: version(name) for name in ("torch", "transformers")},
        "python": platform.python_version(),
        **settings,
        "seconds": clock.seconds,
        "tfidf": tfidf,
        "latency": asdict(latency),
        "granularities": {
            str(g): {
                **{name: found[g] for name, found in scores.items()},
                "ms_per_query": latency.of(g),
                "bytes_per_vector": 4 * g.dim,
            }
            for g in grid
        },
    }
    file.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
