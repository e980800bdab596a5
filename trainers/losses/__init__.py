"""Loss functions: one equation each, tensors in, a loss out, without model, trainer or state."""

from .alignment import compression_alignment, embedding_kl, principal_map, similarity_kl
from .contrastive import nested_info_nce, with_own_negatives
from .false_negatives import Guide, false_negatives, guided_limits
from .independence import gram_matrix, hsic
from .isotropy import (
    correlation_penalty,
    nested_uniformity,
    prefix_residual_products,
    standardized,
    variance_floor,
    variance_variation,
)
from .masked_lm import nested_cross_entropy, nested_cross_entropy_and_divergence
from .quantization import (
    added_dims_overlap,
    cosine_matrix,
    information_bottleneck,
    range_penalty,
    rank_error,
    similarity_divergence,
    similarity_error,
    soft_bits,
    threshold_repulsion,
    variance_control,
)
from .representation import critic_loss
from .scored import (
    cosent,
    margin_mse,
    nested_pair_angles,
    nested_pair_cosines,
    nested_pair_products,
    score_divergence,
)
from .sia import (
    attention_divergence,
    nested_token_counts,
    prefix_attention_scores,
    token_importance,
)
from .similarity import nested_cosine_distances, nested_cosines, nested_similarity_distillation
from .token_cka import nested_token_cka


__all__ = [
    "Guide",
    "added_dims_overlap",
    "attention_divergence",
    "compression_alignment",
    "correlation_penalty",
    "cosent",
    "cosine_matrix",
    "critic_loss",
    "embedding_kl",
    "false_negatives",
    "gram_matrix",
    "guided_limits",
    "hsic",
    "information_bottleneck",
    "margin_mse",
    "nested_cosine_distances",
    "nested_cosines",
    "nested_cross_entropy",
    "nested_cross_entropy_and_divergence",
    "nested_info_nce",
    "nested_pair_angles",
    "nested_pair_cosines",
    "nested_pair_products",
    "nested_similarity_distillation",
    "nested_token_cka",
    "nested_token_counts",
    "nested_uniformity",
    "prefix_attention_scores",
    "prefix_residual_products",
    "principal_map",
    "range_penalty",
    "rank_error",
    "score_divergence",
    "similarity_divergence",
    "similarity_error",
    "similarity_kl",
    "soft_bits",
    "standardized",
    "threshold_repulsion",
    "token_importance",
    "variance_control",
    "variance_floor",
    "variance_variation",
    "with_own_negatives",
]
