"""Pure functions, one equation each: tensors in, a loss out. No model, no trainer, no state."""

from .contrastive import info_nce
from .masked_lm import nested_cross_entropy


__all__ = ["info_nce", "nested_cross_entropy"]
