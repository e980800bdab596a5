"""What an index stores per document, and how it is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ..core.codes import FLOAT, bytes_per_vector, code_of
from ..evaluation.coding import RANGED, Coder


if TYPE_CHECKING:
    from modeling_m3bert.quantization_m3bert import M3BertQuantizer

# How the searched vectors are arranged: compared one by one, in clusters (IVF), or as a graph (HNSW).
KINDS = ("flat", "ivf", "hnsw")


@dataclass(frozen=True)
class Layout:
    """
    What an index stores per document, and how it is searched.

    Args:
        first ([`Coder`]): Code of the vectors that are searched.
        second ([`Coder`], *optional*): Code of the vectors beside them, which score the shortlist again. `None`: there
            are none, and a shortlist is scored with the first ones, decoded.
        shortlist (`int`, *optional*): Length of the shortlist. `None`: the first search is the result.
        kind (`str`, *optional*, defaults to `"flat"`): One of `KINDS`. Only `"flat"` is exact.
        url (`str`, *optional*): Address of a server, for an engine that is one.
        columns (`dict[str, str]`, *optional*): Metadata column -> type: `"text"`, `"integer"`, `"number"`, `"boolean"`
            or `"json"`.
    """

    first: Coder
    second: Coder | None = None
    shortlist: int | None = None
    kind: str = "flat"
    url: str | None = None
    columns: Mapping[str, str] = field(default_factory=dict)

    @property
    def binary(self) -> bool:
        """Whether the searched vectors are bits, compared by Hamming distance."""
        return is_binary(self.first.code)

    @property
    def bytes_per_document(self) -> int:
        """Bytes of the vectors of a document."""
        coders = [self.first] if self.second is None else [self.first, self.second]
        return sum(bytes_per_vector(coder.code, coder.dim) for coder in coders)

    def to_dict(self) -> dict[str, Any]:
        """The layout as JSON can hold it; the quantizer is left out."""
        return {
            "first": _written(self.first),
            "second": None if self.second is None else _written(self.second),
            "shortlist": self.shortlist,
            "kind": self.kind,
            "url": self.url,
            "columns": dict(self.columns),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any], quantizer: M3BertQuantizer | None = None) -> Layout:
        """The layout that [`~Layout.to_dict`] wrote. Learned codes are made and compared by the quantizer only."""
        first, second = (content[name] and _read(content[name], quantizer) for name in ("first", "second"))
        return cls(**{**content, "first": first, "second": second})


def is_binary(code: str) -> bool:
    """Whether vectors in a code are compared by the Hamming distance of their bits."""
    return code == "sign" or code_of(code).learned


def fit_coder(
    code: str,
    dim: int,
    sample: torch.Tensor | None,
    quantizer: M3BertQuantizer | None,
    *,
    one_range: bool = False,
) -> Coder:
    """
    A code for documents that come as a stream, fitted to the first of them.

    Args:
        code (`str`): One of [`~codes.CODES`].
        dim (`int`): Leading dims to keep.
        sample (`torch.Tensor` of shape `(documents, width)`, *optional*): Embeddings of the first documents; needed
            for `int8` and `int4`. Numbers of later documents that are out of their range are cut off to it.
        quantizer ([`M3BertQuantizer`], *optional*): Quantizer, for the codes `qama-*`.
        one_range (`bool`, *optional*, defaults to `False`): Whether all dims share one range around zero, for engines
            that multiply the codes themselves.

    Raises:
        ValueError: as [`Coder.fit`].
    """
    if code in RANGED:
        assert sample is not None
        coder = Coder.fit(sample, code, dim)
        if not one_range:
            return coder
        assert coder.ranges is not None
        widest = np.full(dim, np.abs(coder.ranges).max(), dtype=np.float32)
        return Coder(code, dim, np.stack([-widest, widest]))
    return Coder(code, dim, quantizer=quantizer if code_of(code).learned else None)


def as_numbers(coder: Coder, packed: np.ndarray) -> np.ndarray:
    """
    Stored bytes as the numbers that an engine takes: float32, float16, or int8 between -128 and 127.

    Args:
        coder ([`Coder`]): A code of floats, or `int8` with one range for all dims.
        packed (`np.ndarray` of shape `(vectors, bytes_per_vector)`): Bytes of [`Coder.pack`].
    """
    if coder.code == "int8":
        return (packed.astype(np.int16) - 128).astype(np.int8)
    assert coder.code in (FLOAT, "float16"), coder.code
    return packed.view(coder.code)


def _written(coder: Coder) -> dict[str, Any]:
    return {"code": coder.code, "dim": coder.dim, "ranges": None if coder.ranges is None else coder.ranges.tolist()}


def _read(content: Mapping[str, Any], quantizer: M3BertQuantizer | None) -> Coder:
    ranges = None if content["ranges"] is None else np.array(content["ranges"], dtype=np.float32)
    learned = code_of(content["code"]).learned
    return Coder(content["code"], content["dim"], ranges, quantizer if learned else None)
