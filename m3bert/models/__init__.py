"""Encoders on this machine: loading, anatomy, conversion, and settings. None of it travels with a checkpoint."""
