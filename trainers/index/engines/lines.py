"""Lines of Python that code a query, and score stored vectors by it, without this package."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.codes import code_of
from ...evaluation.coding import Coder


def import_lines(standard: Sequence[str], others: Sequence[str], coder: Coder) -> list[str]:
    """
    Lines of imports, with an empty line after each group.

    Args:
        standard (`Sequence[str]`): Imports from the standard library.
        others (`Sequence[str]`): Imports from packages, sorted.
        coder ([`Coder`]): Code of the searched vectors. The lines of learned codes need torch.
    """
    needed = sorted([*others, *(["import torch"] * code_of(coder.code).learned)], key=lambda line: line.split()[1])
    return [*standard, *([""] if standard else []), *needed, ""]


def without_repeats(lines: Sequence[str]) -> list[str]:
    """Lines in their order, each one once."""
    return list(dict.fromkeys(lines))


def step(coder: Coder) -> float:
    """Step of `int8` with one range. The stored number `n`, from -128 to 127, stands for `step * (n + 1)`."""
    assert coder.ranges is not None
    return float(coder.ranges[1, 0] - coder.ranges[0, 0]) / 255


def unit_line(coder: Coder, name: str = "unit") -> str:
    """A line that sets `unit`, the query as normalised floats, or another name."""
    return f"{name} = query[:{coder.dim}] / np.linalg.norm(query[:{coder.dim}])"


def bits_lines(coder: Coder) -> list[str]:
    """Lines that set `bits`, the query in a binary code."""
    if coder.code == "sign":
        return [f"bits = np.packbits(query[:{coder.dim}] > 0)"]
    return [
        f"codes = quantizer.encode(torch.from_numpy(query), {coder.code!r}, {coder.dim})",
        "bits = codes.packed[0].numpy()",
    ]


def score_lines(coder: Coder) -> list[str]:
    """Lines that set `scores` of `stored`, vectors as they are stored: the dot products with the float query. For a
    learned code, they read `codes`, which [`bits_lines`] sets."""
    if code_of(coder.code).learned:
        return [
            "codes = type(codes)(torch.from_numpy(stored.copy()), codes.code, codes.dim, codes.fingerprint)",
            "units = quantizer.units(torch.from_numpy(query[None]), codes.code, codes.dim)",
            "scores = (torch.nn.functional.normalize(units) @ quantizer.decode(codes).T)[0].detach().numpy()",
        ]
    return [unit_line(coder), f"scores = {_decoded(coder)} @ unit"]


def _decoded(coder: Coder) -> str:
    if coder.code == "sign":
        return f"(2.0 * np.unpackbits(stored, axis=1, count={coder.dim}) - 1)"
    if coder.code == "int8":
        return f"{step(coder):.9g} * (stored + 1.0)"
    return "stored.astype(np.float32)" if coder.code == "float16" else "stored"
