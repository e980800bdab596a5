"""QAMA: learned precisions of a few bits."""
