"""Pure functions, one equation each: tensors in, a loss out. No model, no trainer, no state."""

from .alignment import compression_alignment, embedding_kl, principal_map, similarity_kl
from .contrastive import nested_info_nce
from .masked_lm import nested_cross_entropy


__all__ = [
    "compression_alignment",
    "embedding_kl",
    "nested_cross_entropy",
    "nested_info_nce",
    "principal_map",
    "similarity_kl",
]
