"""Tables of data sources, public benchmarks and speed."""

from __future__ import annotations

import json
import re
from hashlib import sha256
from typing import Any

from benchmarks.data import RECORD, source_of
from benchmarks.reproduction.study import seeds_of
from benchmarks.reproduction.tables.cells import (
    HERE,
    results,
    titled,
)
from m3bert.hub_cards.tables import markdown, percent


def data_sources() -> str:
    """The public source of every data set, and what our results are measured on: a digest and the number of rows."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for name, (count, digest) in json.loads(RECORD.read_text(encoding="utf-8")).items():
        parts.setdefault(name.partition("/")[0], []).append((count, digest))
    rows = []
    for folder, files in parts.items():
        source = source_of(folder)
        digest = sha256("".join(digest for _, digest in files).encode()).hexdigest()[:12]
        where = re.sub(r"/([0-9a-f]{12})[0-9a-f]{28}/", r" @ \1: ", source.name)
        rows.append([folder, where, source.rule, f"`{digest}`", f"{sum(count for count, _ in files):,}"])
    return markdown(["set", "source", "rule", "digest", "rows"], rows, words=4)


def public() -> str:
    """The means of NanoBEIR and of families of MTEB, by encoder and size."""
    blocks = []
    for file in sorted((HERE / "results" / "public").glob("*.json")):
        content = results(f"public/{file.stem}", HERE)
        scores = content["scores"]
        sizes = dict.fromkeys(g for values in scores.values() for g in values)
        rows = [[g, *(percent(values[g]) if g in values else "" for values in scores.values())] for g in sizes]
        blocks.append(titled(content, markdown([content["model"], *scores], rows)))
    return "\n\n".join(blocks) or "| size | NanoBEIR | STS | classification | pairs | clustering |\n|" + " --- |" * 6


SPEED: dict[str, Any] = json.loads((HERE / "speed.json").read_text(encoding="utf-8"))


def speed(name: str) -> str:
    """A table of `SPEED`, whose cells are formats of the content of results files."""
    files = {file: results(file, HERE.parent) for file in SPEED[name]["files"]}
    sources = (
        f"`python -m benchmarks.{file}` ({content['date']}; {content['machine']}, {content['cores']} CPU cores; "
        f"{seeds_of([content['seed']])})"
        for file, content in files.items()
    )
    rows = [[cell.format(**files) for cell in row] for row in SPEED[name]["rows"]]
    return f"{'; '.join(sources)}:\n\n{markdown(SPEED[name]['header'], rows, words=2 if len(rows) > 5 else 1)}"
