"""Loss functions: one equation each, tensors in, a loss out, without model, trainer or state."""
