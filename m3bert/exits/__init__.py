"""
Exits, the static table and paths in closed form: maps from the hidden states of a model to its embeddings.

- A fit (`fit`): `plan` -> `tokenized_texts`, `token_features` -> `read_texts` (`passes`, `sums`, `queries`, `kept`)
  -> `solve` (`maps`, `ridge`; `choice`, `layer_lists`; `paths`, `refit`, `layer_rows`; `centred`)
  -> `install` (`record`).
- `late`: the same for late interaction. `repository`: `m3bert.fit`, from a name to a folder.
- `join`, `space_map`: the queries of one encoder for the index of another; no part of a fit.
"""
