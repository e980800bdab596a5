"""Model cards of elastic checkpoints."""
