"""Evaluation of a whole grid from one encode."""

from .encoding import encode_layers
from .retrieval import retrieval_metrics
from .similarity import similarity_spearman


__all__ = ["encode_layers", "retrieval_metrics", "similarity_spearman"]
