"""Training data: files, text pairs, mixtures of languages, collators, and cached embeddings of a teacher."""
