"""Lines of Python that code a query, and score stored vectors by it, without this package."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ...core.codes import bytes_per_vector, code_of, stored_bits
from ...evaluation.coding import Coder


FOUND = 10  # documents that the lines find
# What a line uses -> the import that it needs: of the standard library, and of packages.
STANDARD = {"json.": "import json", "os.": "import os", "sqlite3.": "import sqlite3"}
PACKAGES = {
    "faiss.": "import faiss",
    "lancedb.": "import lancedb",
    "np.": "import numpy as np",
    "QdrantClient(": "from qdrant_client import QdrantClient, models",
    "torch.": "import torch",
}


def with_imports(lines: Sequence[str]) -> str:
    """Lines in their order, each one once, after the imports that they need."""
    lines = list(dict.fromkeys(lines))
    groups = (
        [line for name, line in group.items() if any(name in used for used in lines)] for group in (STANDARD, PACKAGES)
    )
    return "\n".join([line for group in groups if group for line in (*group, "")] + lines)


def unit_line(coder: Coder, name: str = "unit") -> str:
    """A line that sets `unit`, the query as normalised floats, or another name."""
    return f"{name} = query[:{coder.dim}] / np.linalg.norm(query[:{coder.dim}])"


def bits_lines(coder: Coder) -> list[str]:
    """Lines that set `bits`, the query in a binary code."""
    if coder.code == "binary":
        return [f"bits = np.packbits(query[:{coder.dim}] > 0)"]
    return [
        f"codes = quantizer.encode(torch.from_numpy(query[None]), {coder.code!r}, {coder.dim})",
        "bits = codes.packed[0].numpy()",
    ]


def cosine_of_bits(coder: Coder, distances: str) -> str:
    """The score of Hamming distances."""
    return f"1 - 2 * {distances} / {stored_bits(coder.code, coder.dim)}"


def stored_lines(coder: Coder, folder: Path, name: str) -> list[str]:
    """Lines that set `stored`, the vectors of `keys` in the store of an index."""
    numbers = coder.code if coder.code in ("float32", "float16") else "uint8"
    width = coder.dim if numbers != "uint8" else bytes_per_vector(coder.code, coder.dim)
    file = str(folder / "vectors" / name)
    return [
        f"vectors = np.memmap({file!r}, {numbers!r}, mode='r').reshape(-1, {width})",
        "stored = vectors[keys]",
    ]


def score_lines(coder: Coder, folder: Path) -> list[str]:
    """Lines that set `scores` of `stored`, vectors as they are stored: the dot products with the float query. For a
    learned code, they read `codes`, which [`bits_lines`] sets."""
    if code_of(coder.code).learned:
        return [
            "codes = type(codes)(torch.from_numpy(stored.copy()), codes.code, codes.dim, codes.fingerprint)",
            "units = quantizer.units(torch.from_numpy(query[None]), codes.code, codes.dim)",
            "scores = (torch.nn.functional.normalize(units) @ quantizer.decode(codes).T)[0].detach().numpy()",
        ]
    decoded = {
        "binary": f"(2.0 * np.unpackbits(stored, axis=1, count={coder.dim}) - 1)",
        "int8": "(low + (stored + 0.5) / 255 * (high - low))",
        "float16": "stored.astype(np.float32)",
    }
    lines = [unit_line(coder), f"scores = {decoded.get(coder.code, 'stored')} @ unit"]
    if coder.ranges is not None:
        layout = f"json.load(open({str(folder / 'index.json')!r}))['layout']"
        return [f"low, high = np.array({layout}['second']['ranges'])", *lines]
    return lines
