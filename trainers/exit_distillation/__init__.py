"""Exit distillation: an encoder teaches its own depths."""
