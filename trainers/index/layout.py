"""What an index stores per document, and how it is searched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..core.codes import bytes_per_vector, code_of
from ..evaluation.coding import Coder


if TYPE_CHECKING:
    from modeling_m3bert.quantization_m3bert import M3BertQuantizer

# How the searched vectors are arranged: compared one by one, in clusters (IVF), or as a graph (HNSW).
KINDS = ("flat", "ivf", "hnsw")


@dataclass(frozen=True)
class Layout:
    """
    What an index stores per document, and how it is searched.

    Args:
        first ([`Coder`]): Precision of the vectors that are searched.
        second ([`Coder`], *optional*): Precision of the vectors beside them, which rescore the shortlist. `None`:
            there are none, and a shortlist of bits is scored with the first ones, decoded.
        shortlist (`int`, *optional*): Length of the shortlist. `None`: the first search is the result.
        kind (`str`, *optional*, defaults to `"flat"`): One of `KINDS`. Only `"flat"` is exact.
        url (`str`, *optional*): Address of a server, for a vector store that is one.
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
        """The layout that [`~Layout.to_dict`] wrote. Only the quantizer makes and compares learned precisions."""
        first, second = (content[name] and _read(content[name], quantizer) for name in ("first", "second"))
        return cls(**{**content, "first": first, "second": second})


def _written(coder: Coder) -> dict[str, Any]:
    return {"code": coder.code, "dim": coder.dim, "ranges": None if coder.ranges is None else coder.ranges.tolist()}


def _read(content: Mapping[str, Any], quantizer: M3BertQuantizer | None) -> Coder:
    ranges = None if content["ranges"] is None else np.array(content["ranges"], dtype=np.float32)
    code = code_of(content["code"])
    return Coder(code.name, content["dim"], ranges, quantizer if code.learned else None)
