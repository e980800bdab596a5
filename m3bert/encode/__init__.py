"""Text to embeddings of every granularity: what training, evaluation and indexes stand on."""
