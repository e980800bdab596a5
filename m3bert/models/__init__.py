"""Encoders on this machine: loading, anatomy, conversion, trimming and settings. None of it travels with a model."""
