"""
Encoders on this machine; none of it travels with a model.

- Loading and files: `auto`, `repository`, `settings` (files of sentence-transformers).
- What is found by running an encoder: `anatomy`, `feed_forward`.
- Conversion: `conversion` (to m3BERT), `native` (back), `trim` with `vocabulary`.
"""
