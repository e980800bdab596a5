"""Codes: how the numbers of a stored embedding are written, and the bytes that this takes."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


FLOAT = "float32"


@dataclass(frozen=True)
class Code:
    """
    One way to store the numbers of an embedding.

    Args:
        name (`str`): Name in a grid: `int8` in `4x64@int8`.
        bits (`float`): Stored bits per dim. `qama-2` stores 4 levels in 3 bits: its thermometer code.
        words (`str`): The code in plain words.
    """

    name: str
    bits: float
    words: str

    @property
    def learned(self) -> bool:
        """Whether the code needs the quantizer of a checkpoint ([`M3BertQuantizer`])."""
        return self.name.startswith("qama-")

    @property
    def symmetric(self) -> bool:
        """Whether a search codes the query, too, and compares bits by Hamming distance."""
        return self.name == "binary" or self.learned


# Name -> code, from most to fewest bits.
CODES = {
    code.name: code
    for code in (
        Code(FLOAT, 32, "4 bytes per dim"),
        Code("float16", 16, "2 bytes per dim"),
        Code("int8", 8, "1 byte per dim"),
        Code("int4", 4, "half a byte per dim"),
        Code("qama-2", 3, "one of 4 learned levels per dim"),
        Code("qama-1.5", 2, "one of 3 learned levels per dim"),
        Code("qama-hybrid", 1.625, "learned levels: 4, 3 and 2 per dim, and 2 per pair of dims"),
        Code("binary", 1, "the sign of each dim"),
        Code("qama-1", 1, "one of 2 learned levels per dim"),
        Code("qama-0.5", 0.5, "one of 2 learned levels per pair of dims"),
    )
}


def code_of(name: str) -> Code:
    """
    The code of a name.

    Raises:
        ValueError: if there is none. The message names the legal values.
    """
    if name not in CODES:
        raise ValueError(f"{name!r} is not a precision; legal values: {', '.join(CODES)}.")
    return CODES[name]


def stored_bits(code: str, dim: int) -> int:
    """
    Bits of a stored vector, before it is filled up to whole bytes.

    Args:
        code (`str`): Name of a precision.
        dim (`int`): Dims of the vector.

    Raises:
        ValueError: if the code is unknown.
    """
    known = code_of(code)
    if not known.learned:
        return int(known.bits) * dim
    # Imported here, because grids are also read where torch is not needed.
    from ..modeling.quantization_m3bert import stored_bits

    return stored_bits(code, dim)


def bytes_per_vector(code: str, dim: int) -> int:
    """Whole bytes of a stored vector; see [`stored_bits`]."""
    return ceil(stored_bits(code, dim) / 8)
