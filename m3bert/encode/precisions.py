"""Precisions: how the numbers of a stored embedding are written, and the bytes that this takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


FLOAT = "float32"


@dataclass(frozen=True)
class Precision:
    """One way to store the numbers of an embedding: its name in a grid (`int8` in `4x64@int8`), the stored bits per
    dim, and plain words. `qama-2` stores 4 levels in 3 bits: its thermometer code."""

    name: str
    bits: float
    words: str

    @property
    def learned(self) -> bool:
        """Whether the precision needs the quantizer of a checkpoint ([`M3BertQuantizer`])."""
        return self.name.startswith("qama-")

    @property
    def symmetric(self) -> bool:
        """Whether a search codes the query, too, and compares bits by Hamming distance."""
        return self.name == "binary" or self.learned


# Name -> precision, from most to fewest bits.
PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(FLOAT, 32, "4 bytes per dim"),
        Precision("float16", 16, "2 bytes per dim"),
        Precision("int8", 8, "1 byte per dim"),
        Precision("int4", 4, "half a byte per dim"),
        Precision("qama-2", 3, "one of 4 learned levels per dim"),
        Precision("qama-1.5", 2, "one of 3 learned levels per dim"),
        Precision("qama-hybrid", 1.625, "learned levels: 4, 3 and 2 per dim, and 2 per pair of dims"),
        Precision("binary", 1, "the sign of each dim"),
        Precision("qama-1", 1, "one of 2 learned levels per dim"),
        Precision("qama-0.5", 0.5, "one of 2 learned levels per pair of dims"),
    )
}


def precision_of(name: str) -> Precision:
    """The precision of a name. ValueError if there is none."""
    if name not in PRECISIONS:
        raise ValueError(f"{name!r} is not a precision; legal values: {', '.join(PRECISIONS)}.")
    return PRECISIONS[name]


def stored_bits(code: str, dim: int) -> int:
    """Bits of a stored vector of `dim` numbers, before whole bytes are filled. ValueError for an unknown precision."""
    precision = precision_of(code)
    if not precision.learned:
        return int(precision.bits) * dim
    # Imported here, because grids are also read where torch is not needed.
    from ..modeling import quantization_m3bert

    return quantization_m3bert.stored_bits(code, dim)


def bytes_per_vector(code: str, dim: int) -> int:
    """Whole bytes of a stored vector; see [`stored_bits`]."""
    return ceil(stored_bits(code, dim) / 8)
