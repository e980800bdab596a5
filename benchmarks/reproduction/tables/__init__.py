"""
The tables of the studies that are not in the harness: `TABLES` has them by name. Each reads its results files and is
Markdown, below a line that names the command, date, machine and seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from benchmarks.reproduction.tables import exits, indexes, measurements, paths, small_models


TABLES: dict[str, Callable[[], str]] = {
    "quickstart": exits.quickstart,
    "quickstart-in-short": exits.quickstart_in_short,
    "exits": exits.exits_fitted,
    "exits-texts": exits.exits_texts,
    "exits-trained": exits.exits_trained,
    "exits-development": exits.exits_development,
    "paths": paths.paths,
    "late": paths.late,
    "paths-candidates": paths.paths_candidates,
    "paths-decoder": paths.paths_decoder,
    "trained-paths": paths.trained_paths,
    "join": indexes.join,
    "qama-steps": indexes.qama_steps,
    "qama-bytes": indexes.qama_bytes,
    "qama-kept": indexes.qama_kept,
    "qama-development": indexes.qama_development,
    "static-peers": small_models.static_peers,
    "sparse": indexes.sparse,
    "static-tables": small_models.static_tables,
    "onnx-quality": small_models.onnx_quality,
    "trim": small_models.trim,
    "data": measurements.data_sources,
    "public": measurements.public,
    **{name: partial(measurements.speed, name) for name in measurements.SPEED},
}
