"""Exits, the static table and stitches in closed form: maps from the hidden states of a model to its embeddings."""
