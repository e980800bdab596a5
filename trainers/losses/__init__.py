"""Pure functions, one equation each: tensors in, a loss out. No model, no trainer, no state."""

from .alignment import compression_alignment, embedding_kl, principal_map, similarity_kl
from .contrastive import nested_info_nce
from .isotropy import (
    correlation_penalty,
    nested_uniformity,
    prefix_residual_products,
    standardized,
    variance_floor,
    variance_variation,
)
from .masked_lm import nested_cross_entropy
from .self_distillation import (
    attention_divergence,
    nested_token_cka,
    nested_token_counts,
    prefix_attention_scores,
    token_importance,
)


__all__ = [
    "attention_divergence",
    "compression_alignment",
    "correlation_penalty",
    "embedding_kl",
    "nested_cross_entropy",
    "nested_info_nce",
    "nested_token_cka",
    "nested_token_counts",
    "nested_uniformity",
    "prefix_attention_scores",
    "prefix_residual_products",
    "principal_map",
    "similarity_kl",
    "standardized",
    "token_importance",
    "variance_floor",
    "variance_variation",
]
