"""
Draw how the embeddings of an encoder lie in space: the variance of every dim with the ends of the prefixes, and the
correlation between a prefix and what comes behind it.

    python -m scripts.geometry --output_dir runs/geometry                     # the default encoder, texts of STS-B
    python -m scripts.geometry --model_name_or_path runs/mic --files sentences.txt --dims 64 128

One pair of figures a layer of the grid; the numbers behind them, for every dim, are printed and go to geometry.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import HfArgumentParser

from hub_cards.figures import draw_prefix_residual_correlation, draw_variances
from scripts._command import HelpFormatter, run_command
from scripts._encoder import EncoderArguments, load_encoder
from scripts._sources import local_data
from trainers import Granularity, Grid
from trainers.data import load_files, require_columns
from trainers.evaluation import find_task
from trainers.evaluation.geometry import feature_correlation, feature_covariance, geometry_scores


PAPER_DIM = 128  # MIC, Figure 2


@dataclass
class GeometryArguments:
    """Of which texts, and where to write it."""

    files: list[str] = field(
        default_factory=list, metadata={"help": "Texts: .txt, .jsonl, .csv or .parquet. Default: STS-B's test set."}
    )
    text_column: str = field(default="text", metadata={"help": "Column with the text."})
    dims: list[int] | None = field(
        default=None, metadata={"help": "Prefixes to draw correlations of. Default: 128, or the largest below it."}
    )
    output_dir: str = field(default="runs/geometry", metadata={"help": "Where figures and numbers go."})


def read_texts(options: GeometryArguments) -> tuple[list[str], str]:
    """The texts, each once, and what they are."""
    if options.files:
        dataset = load_files(options.files)
        require_columns(dataset, (options.text_column,))
        return list(dict.fromkeys(dataset[options.text_column])), ", ".join(Path(file).name for file in options.files)
    texts = find_task("stsb").load(local_data()).texts
    return list(dict.fromkeys([*texts["sentence1"], *texts["sentence2"]])), "STS-B"


def prefixes_to_draw(dims: list[int] | None, width: int, trained: list[int]) -> list[int]:
    """
    The prefixes whose correlations are drawn.

    Raises:
        ValueError: if one has nothing behind it.
    """
    if dims is None:
        below = [dim for dim in trained if dim < width]
        return [max((dim for dim in below if dim <= PAPER_DIM), default=below[0])] if below else []
    outside = [str(dim) for dim in dims if not 0 < dim < width]
    if outside:
        raise ValueError(f"--dims must be within 1..{width - 1}, below the full width: {', '.join(outside)}.")
    return dims


def main(arguments: list[str]) -> None:
    parser = HfArgumentParser(
        (EncoderArguments, GeometryArguments), description=__doc__, formatter_class=HelpFormatter
    )
    encoding, options = parser.parse_args_into_dataclasses(arguments)
    encoder = load_encoder(encoding)
    width = encoder.model.config.hidden_size
    dims = prefixes_to_draw(options.dims, width, encoder.grid.dims)
    texts, source = read_texts(options)
    # Correlations with what lies behind a prefix need the full width, whatever the grid asks for.
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
