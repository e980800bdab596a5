"""The lines that search an index of faiss without this package."""

from __future__ import annotations

from pathlib import Path

from ...core.codes import stored_bits
from ...evaluation.coding import Coder
from ..layout import Layout
from .faiss_parts import k_factor


FOUND = 10  # documents that the lines find


def example(folder: Path, layout: Layout, deleted: Path | None = None, breadth: int = 0) -> str:
    """
    Lines of Python that read `query`, and set `found`.

    Args:
        folder (`Path`): Folder of the index.
        layout ([`Layout`]): What is in the index.
        deleted (`Path`, *optional*): File with keys that a graph holds, and that must not be found.
        breadth (`int`, *optional*): `efSearch` of the graph; needed with `deleted`.
    """
    folder = folder.resolve()
    read = "read_index_binary" if layout.binary else "read_index"
    lines = [f"index = faiss.{read}({str(folder / 'index.faiss')!r})"]
    settings = _params(layout, deleted, breadth)
    params = ", params=params" if settings else ""
    lines += [*settings, *(_bits(layout, folder, params) if layout.binary else _floats(layout, params))]
    lines += [
        f"documents = sqlite3.connect({str(folder / 'documents.sqlite')!r})",
        'one = "SELECT id FROM documents WHERE key = ?"',
        "ids = [documents.execute(one, [key]).fetchone()[0] for key in keys.tolist() if key >= 0]",
        "found = list(zip(ids, scores.tolist()))",
    ]
    others = {"np.": "import numpy as np", "torch.": "import torch"}
    used = [line for name, line in others.items() if any(name in code for code in lines)]
    return "\n".join(["import sqlite3", "", "import faiss", *used, "", *lines])


def _params(layout: Layout, deleted: Path | None, breadth: int) -> list[str]:
    """Lines that set `params` of a search, if it needs any."""
    native, lines, base = layout.second is not None and not layout.binary, [], ""
    if deleted is not None:
        lines.append(f"deleted = np.load({str(deleted.resolve())!r})")
        if native:  # below its keys, an index knows rows
            lines.append("deleted = np.flatnonzero(np.isin(faiss.vector_to_array(index.id_map), deleted))")
        lines += [
            "kept = faiss.IDSelectorNot(faiss.IDSelectorBatch(deleted))",
            f"params = faiss.SearchParametersHNSW(sel=kept, efSearch={breadth})",
        ]
        base = ", base_index_params=params"
    if native:
        factor = k_factor(layout.shortlist, FOUND)
        lines.append(f"params = faiss.IndexRefineSearchParameters(k_factor={factor}{base})")
    return lines


def _floats(layout: Layout, params: str) -> list[str]:
    dim = max(layout.first.dim, (layout.second or layout.first).dim)
    return [
        f"vector = query[None, :{dim}].copy()",
        "faiss.normalize_L2(vector)",
        f"(scores,), (keys,) = index.search(vector, {FOUND}{params})",
    ]


def _bits(layout: Layout, folder: Path, params: str) -> list[str]:
    coder, count = layout.first, max(FOUND, layout.shortlist or 0)
    if coder.code == "sign":
        lines = [f"bits = np.packbits(query[None, :{coder.dim}] > 0, axis=1)"]
    else:
        lines = [
            f"codes = quantizer.encode(torch.from_numpy(query[None]), {coder.code!r}, {coder.dim})",
            "bits = codes.packed.numpy()",
        ]
    lines.append(f"(distances,), (keys,) = index.search(bits, {count}{params})")
    if layout.shortlist is None:
        return [*lines, f"scores = 1 - 2 * distances / {stored_bits(coder.code, coder.dim)}"]
    lines.append("keys = keys[keys >= 0]")
    lines += _decoded(coder) if layout.second is None else _beside(layout.second, folder)
    return [*lines, f"best = scores.argsort()[::-1][:{FOUND}]", "scores, keys = scores[best], keys[best]"]


def _beside(coder: Coder, folder: Path) -> list[str]:
    """Lines that score a shortlist by the second vectors."""
    return [
        f"second = faiss.read_index({str(folder / 'second.faiss')!r})",
        f"vector = query[:{coder.dim}] / np.linalg.norm(query[:{coder.dim}])",
        "scores = second.reconstruct_batch(keys) @ vector",
    ]


def _decoded(coder: Coder) -> list[str]:
    """Lines that score a shortlist by its bits, decoded."""
    lines = ["stored = np.stack([index.reconstruct(key) for key in keys.tolist()])"]
    if coder.code == "sign":
        return [
            *lines,
            f"vector = query[:{coder.dim}] / np.linalg.norm(query[:{coder.dim}])",
            f"scores = (2.0 * np.unpackbits(stored, axis=1, count={coder.dim}) - 1) @ vector",
        ]
    return [
        *lines,
        "codes = type(codes)(torch.from_numpy(stored), codes.code, codes.dim, codes.fingerprint)",
        "units = quantizer.units(torch.from_numpy(query[None]), codes.code, codes.dim)",
        "scores = (torch.nn.functional.normalize(units) @ quantizer.decode(codes).T)[0].detach().numpy()",
    ]
