"""
Text to embeddings of every granularity: what training, evaluation and indexes stand on.

- Sizes: `granularity`. How embeddings are stored: `precisions`, `coding`, `quantizer`.
- Hidden states of a batch: `states`, `packed_rows`, `projection`.
- Batches of texts of similar length: `padded_batches`.
- Embeddings of texts: `encoder`, `embeddings`, `embedding_store`. What they depend on: `identity`.
- The machine: `device`, `ranks`.
"""
