"""
Model cards, exports and publication of elastic checkpoints.

- Card: `checkpoint` and `adapter` read what is on disk, `training_record` what a run left. `card_source` and `card`
  render the templates `*.md` with `words`, `tables`, `sizes`, `figures` and `sections`.
- Exports: `exports` calls `native_export`, `static_export` and `router_export` (files: `export_files`);
  `onnx_graphs` writes the graphs of `onnx_export`.
- Publication: `layout` puts a folder together, and `publication` lets `upload` send it. `scores` and `mteb_meta` are
  for leaderboards.
"""

if __name__ == "hub_cards":
    raise ImportError("Import m3bert.hub_cards: the folder hub_cards is a part of the package m3bert.")
