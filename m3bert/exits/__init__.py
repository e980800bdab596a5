"""Exits, the static table and paths in closed form: maps from the hidden states of a model to its embeddings."""
