"""Exits, the static table and stitches in closed form: maps from the states of a model to its embeddings."""
