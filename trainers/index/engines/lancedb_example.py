"""The lines that search an index in LanceDB without this package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...core.codes import stored_bits
from ..layout import Layout
from .lancedb_table import TABLE
from .lines import bits_lines, import_lines, score_lines, unit_line, without_repeats


FOUND = 10  # documents that the lines find


def example(place: Path, layout: Layout, metric: str, settings: Mapping[str, int], rescored: str | None) -> str:
    """
    Lines of Python that read `query`, and set `found`.

    Args:
        place (`Path`): Folder of the database.
        layout ([`Layout`]): What is in its table.
        metric (`str`): Metric of the first stage.
        settings (`dict[str, int]`): Methods of a search that finds `FOUND` documents, and their arguments.
        rescored (`str`, *optional*): The column that what was found is scored with again.
    """
    coder = layout.first
    ranged = layout.second is not None and layout.second.ranges is not None
    calls = "".join(f".{method}({argument})" for method, argument in settings.items())
    lines = [
        *import_lines(["import json"] * ranged, ["import lancedb", "import numpy as np"], coder),
        f"table = lancedb.connect({str(place)!r}).open_table({TABLE!r})",
        *(bits_lines(coder) if layout.binary else [unit_line(coder)]),
        f'search = table.search({"bits" if layout.binary else "unit"}, vector_column_name="first")',
        f'search = search.distance_type("{metric}"){calls}',
    ]
    if rescored is not None:
        return "\n".join(without_repeats([*lines, *_rescoring(layout, rescored)]))
    score = f"1 - 2 * distances / {stored_bits(coder.code, coder.dim)}" if layout.binary else "1 - distances"
    lines += [
        'hits = search.select(["id", "_distance"]).to_arrow()',
        'distances = hits["_distance"].to_numpy()',
        f'found = list(zip(hits["id"].to_pylist(), ({score}).tolist()))',
    ]
    return "\n".join(lines)


def _rescoring(layout: Layout, column: str) -> list[str]:
    """Lines that score what `search` finds again."""
    coder = layout.second or layout.first
    lines = [
        f'hits = search.select(["id", "{column}", "_distance"]).to_arrow()',
        f'stored = np.stack(hits["{column}"].to_numpy())',
    ]
    if coder.code == "int8":
        lines += [
            'low, high = np.array(json.loads(table.schema.metadata[b"ranges"]))',
            unit_line(coder),
            "scores = (low + (stored + 0.5) / 255 * (high - low)) @ unit",
        ]
    else:
        lines += score_lines(coder)
    return [
        *lines,
        f"best = scores.argsort()[::-1][:{FOUND}]",
        'found = list(zip(hits["id"].take(best).to_pylist(), scores[best].tolist()))',
    ]
