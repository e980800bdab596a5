"""How a batch is encoded: texts, chunks and packed rows, and gradients that are cached between."""
