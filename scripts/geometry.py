"""
Plot the geometry of an encoder's embeddings: the variance of each dim, and the correlations between the dims of a
prefix and the dims after it.

    m3bert geometry --output_dir runs/geometry                      # the default encoder, on the texts of STS-B
    m3bert geometry --model_name_or_path runs/mic --files sentences.txt --dims 64 128

Draws one pair of figures per layer of the grid. The scores of each dim are printed and saved to geometry.json. Needs
the extra `publish`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from hub_cards.figures import draw_prefix_residual_correlation, draw_variances
from trainers import Granularity, Grid
from trainers.core.dataset_checks import require_columns
from trainers.core.extras import require_extra
from trainers.data.files import load_files
from trainers.evaluation import find_task
from trainers.evaluation.geometry import feature_correlation, feature_covariance, geometry_scores
from trainers.evaluation.readers import load_task

from .command import parse_options, run_command
from .encoder import EncoderArguments, load_encoder
from .sources import local_data


PAPER_DIM = 128  # MIC, Figure 2


@dataclass
class GeometryArguments:
    """Which texts, and where to write."""

    files: list[str] = field(
        default_factory=list,
        metadata={"help": "Texts: .txt, .jsonl, .csv or .parquet files. Default: the test set of STS-B."},
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    dims: list[int] | None = field(
        default=None,
        metadata={"help": "Prefixes whose correlations to plot. Default: the largest dim of the grid up to 128."},
    )
    output_dir: str = field(default="runs/geometry", metadata={"help": "Folder for figures and scores."})


def read_texts(options: GeometryArguments) -> tuple[list[str], str]:
    """The distinct texts, and the name of their source."""
    if options.files:
        dataset = load_files(options.files)
        require_columns(dataset, (options.text_column,))
        return list(dict.fromkeys(dataset[options.text_column])), ", ".join(Path(file).name for file in options.files)
    texts = load_task(find_task("stsb"), local_data()).texts
    return list(dict.fromkeys([*texts["sentence1"], *texts["sentence2"]])), "STS-B"


def prefixes_to_draw(dims: list[int] | None, width: int, trained: list[int]) -> list[int]:
    """
    The prefixes whose correlations are plotted.

    Raises:
        ValueError: if one is not shorter than the hidden size.
    """
    if dims is None:
        below = [dim for dim in trained if dim < width]
        return [max((dim for dim in below if dim <= PAPER_DIM), default=below[0])] if below else []
    outside = [str(dim) for dim in dims if not 0 < dim < width]
    if outside:
        raise ValueError(f"--dims {' '.join(outside)} must be within 1..{width - 1}, below the hidden size.")
    return dims


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, GeometryArguments), __doc__, arguments)
    require_extra("matplotlib", "publish", "A figure")
    encoder = load_encoder(encoding)
    width = encoder.model.config.hidden_size
    dims = prefixes_to_draw(options.dims, width, encoder.grid.dims)
    texts, source = read_texts(options)
    # Correlations with the dims after a prefix need the full width, whatever the grid is.
    whole = replace(encoder, grid=Grid.product(encoder.grid.layers, sorted({*encoder.grid.dims, width})))
    embeddings = whole.encode(texts, description="Embedding")
    folder, numbers = Path(options.output_dir), {}
    for layer in whole.grid.layers:
        vectors = embeddings.at(Granularity(layer, width))
        covariance = feature_covariance(vectors)
        correlation = feature_correlation(covariance).numpy()
        title = f"layer {layer}, {len(texts):,} texts of {source}"
        spectrum = covariance.diagonal().tolist()
        draw_variances(spectrum, encoder.grid.dims_of(layer), title, folder / f"variances_layer_{layer}.png")
        for dim in dims:
            file = folder / f"correlation_layer_{layer}_dim_{dim}.png"
            draw_prefix_residual_correlation(correlation, dim, title, file)
        shown = sorted({*encoder.grid.dims_of(layer), *dims})
        numbers[layer] = geometry_scores(vectors, shown)
        for dim, scores in numbers[layer].items():
            print(f"{layer}x{dim}:", ", ".join(f"{name} {value:.3f}" for name, value in scores.items()))
    (folder / "geometry.json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(f"{folder}: {', '.join(sorted(file.name for file in folder.iterdir()))}")


if __name__ == "__main__":
    run_command(main)
