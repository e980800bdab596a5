"""
The geometry of an encoder's embeddings at every layer of a grid, as in MIC's paper: the variance of each dim (Figure
1), the correlations between all dims, those of a prefix and the dims after it among them (Figure 2), and scores.

    python -m benchmarks.geometry --model_name_or_path runs/mic --files sentences.txt --grid "4,6x64,128,384"

Without `--files`, the texts are those of the test set of STS-B. Needs the extra `publish`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

from matplotlib import pyplot

from m3bert.commands.command import parse_options
from m3bert.commands.encoder import EncoderArguments, load_encoder
from m3bert.commands.sources import local_data
from m3bert.data.files import load_files
from m3bert.evaluation import find_task, load_task
from m3bert.evaluation.metrics import feature_correlation, feature_covariance, geometry_scores
from m3bert.trainers import Granularity, Grid


@dataclass
class GeometryArguments:
    """Which texts, and where to write."""

    files: list[str] = field(default_factory=list, metadata={"help": "Files with a column `text`."})
    output_dir: str = field(default="runs/geometry", metadata={"help": "Folder for figures and scores."})


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, GeometryArguments), __doc__, arguments)
    encoder, folder, numbers = load_encoder(encoding), Path(options.output_dir), {}
    if options.files:
        texts = load_files(options.files)["text"]
    else:
        texts = [text for side in load_task(find_task("stsb"), local_data()).texts.values() for text in side]
    # Correlations with the dims after a prefix need the full width, whatever the grid is.
    width = encoder.full_width
    whole = replace(encoder, grid=Grid.product(encoder.grid.layers, sorted({*encoder.grid.dims, width})))
    embeddings = whole.encode(list(dict.fromkeys(texts)), description="Embedding")
    folder.mkdir(parents=True, exist_ok=True)
    for layer in whole.grid.layers:
        vectors, dims = embeddings.at(Granularity(layer, width)), encoder.grid.dims_of(layer)
        covariance = feature_covariance(vectors)
        correlation = feature_correlation(covariance)
        figure, (above, below) = pyplot.subplots(2, figsize=(8, 9), layout="constrained")
        above.bar(range(1, width + 1), covariance.diagonal() / covariance.diagonal().mean(), width=1.0)
        above.set(title=f"layer {layer}", xlabel="dim", ylabel="variance / mean variance")
        for axes in (above, below):
            for dim in dims:
                axes.axvline(dim + 0.5, linestyle="--", linewidth=1)
        shown = below.imshow(correlation, cmap="RdBu_r", vmin=-1, vmax=1, extent=(0.5, width + 0.5, width + 0.5, 0.5))
        figure.colorbar(shown, label="correlation over texts")
        figure.savefig(folder / f"layer_{layer}.png")
        pyplot.close(figure)
        numbers[layer] = geometry_scores(vectors, dims)
        for dim, scores in numbers[layer].items():
            print(f"{layer}x{dim}:", ", ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    (folder / "geometry.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
