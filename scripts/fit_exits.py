"""
Fit exits: affine maps, one per layer, from the layer's hidden state to the embedding of the last layer, and a static
table of the vocabulary, which is layer 0 and which deeper exits read, too. Every depth of the encoder then embeds into
one space. A fit is a linear solve on unlabelled texts and needs no training:

    m3bert fit_exits runs/m3bert-from-me5 runs/elastic --files sentences.txt passages.jsonl queries.txt

Each file is a source of its own, which helps to choose the penalty. A few thousand texts are enough; take texts like
those that will be searched, and queries like those that will be asked. `m3bert convert SOURCE OUTPUT --fit_exits FILE`
converts and fits at once.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainers.core.durable import replacing_files

from .command import (
    MODEL_FILES,
    add_compute_options,
    argument_parser,
    compute_of,
    run_command,
    writing_to,
)


if TYPE_CHECKING:
    from modeling_m3bert import M3BertModel
    from trainers.exits.fit import ExitFit


def add_exit_options(parser: ArgumentParser) -> None:
    """Add the options of a fit, which `convert` has, too."""
    parser.add_argument("--overwrite", action="store_true", help="replace a model that output_dir holds")
    parser.add_argument(
        "--exit_layers", type=int, nargs="+", help="layers to give an exit; default: all below the last"
    )
    parser.add_argument(
        "--stitch_layers",
        nargs="+",
        default=[],
        metavar="DEPTH",
        help="depths that end in the model's last layers: 2, or 4=1 for 4 layers of which 1 is the last; default: "
        "half of them are",
    )
    parser.add_argument("--text_column", default="text", help="column with the texts, for files with columns")
    parser.add_argument(
        "--basis",
        default="last_layer",
        help="last_layer leaves the last layer as it is; principal rotates all embeddings to principal components",
    )
    parser.add_argument(
        "--no_static", action="store_true", help="fit no static table: exits read their layer's hidden state alone"
    )
    parser.add_argument(
        "--vocabulary_cache_dir",
        help="folder that keeps the embeddings of the vocabulary's tokens for the next fit; default: none",
    )
    parser.add_argument(
        "--teacher",
        "--teacher_name_or_path",
        help="folder or Hub id of another encoder, whose embeddings the exits predict",
    )
    parser.add_argument("--teacher_cache_dir", default="runs/teachers", help="folder for the teacher's embeddings")
    parser.add_argument("--max_length", type=int, help="longest text in tokens; default: the model's limit")
    parser.add_argument("--batch_size", type=int, default=64, help="texts of 128 tokens per batch; more short ones")
    add_compute_options(parser)


def stitches_of(values: list[str]) -> dict[int, int]:
    """Stitched depth -> its number of last layers, from `DEPTH` or `DEPTH=NUMBER`."""
    from modeling_m3bert.configuration_m3bert import default_top_layers

    found = {}
    for value in values:
        depth, _, top = value.partition("=")
        if not depth.isdecimal() or not (top or depth).isdecimal():
            raise ValueError(
                f"--stitch_layers {value} is neither a depth nor a depth and its number of last layers: 4, 4=1."
            )
        found[int(depth)] = int(top) if top else default_top_layers(int(depth))
    return found


def save_with_exits(
    model: M3BertModel,
    tokenizer: Any,
    output_dir: str,
    files: list[str],
    options: Namespace,
    *,
    source: str,
    revision: str | None = None,
) -> ExitFit:
    """
    Fit the exits of an m3BERT to the texts in some files, and save it with its tokenizer and modules.

    Args:
        model ([`M3BertModel`]): The encoder; changed in place.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        output_dir (`str`): Folder to write.
        files (`list[str]`): Data files with the texts.
        options (`Namespace`): Values of [`add_exit_options`].
        source (`str`): Folder or Hub id that the model comes from, for its pooling, projection and prompts.
        revision (`str`, *optional*): Branch, tag or commit of the source.

    Raises:
        ValueError: as [`fit_exits`], or if a file cannot be read or lacks the column.
    """
    from modeling_m3bert import EmbeddingSettings
    from trainers.core.dataset_checks import require_columns
    from trainers.core.device import place
    from trainers.core.projection import Projection
    from trainers.core.states import longest_text, width_of
    from trainers.data.files import load_files
    from trainers.data.teacher import Teacher
    from trainers.exits.fit import fit_exits
    from trainers.hub.training_record import file_name

    compute, kept = compute_of(options), model.dtype
    datasets = {file: load_files([file], streaming=True) for file in files}
    for dataset in datasets.values():
        require_columns(dataset, [options.text_column])

    def texts_of(dataset: Any) -> Iterator[str]:
        return (row[options.text_column] or "" for row in dataset)

    published = EmbeddingSettings.read(source, revision=revision)
    teacher = None
    if options.teacher is not None:
        every = (text for dataset in datasets.values() for text in texts_of(dataset) if text.strip())
        loaded = Teacher(options.teacher, compute=compute)
        teacher = loaded.embed(every, options.teacher_cache_dir, description="Teacher")
    fit = fit_exits(
        place(model, compute),
        tokenizer,
        {file_name(file): texts_of(dataset) for file, dataset in datasets.items()},
        layers=options.exit_layers,
        pooling=published.pooling,
        static=not options.no_static,
        stitches=stitches_of(options.stitch_layers),
        basis=options.basis,
        projection=Projection.of(published.projection) if teacher is None else None,
        teacher=teacher,
        teacher_name=Path(options.teacher).name if options.teacher else "teacher",
        max_length=options.max_length,
        prompts=list(dict.fromkeys(published.prompts.values())) or [""],
        batch_size=options.batch_size,
        compute_dtype=compute.autocast_dtype,
        cache_dir=options.vocabulary_cache_dir,
        description="Fitting exits",
    )
    if model.dtype != kept:
        model.to(kept)
    model.embedding_settings = None  # written below, without the projection
    limit = longest_text(model.config, tokenizer, published.max_length)
    settings = replace(published, projection=None, max_length=limit)  # the exits are fitted to the projection
    with replacing_files(Path(output_dir), stale=MODEL_FILES if options.overwrite else ()) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        settings.write(draft, width=width_of(model.config))
    return fit


def report(fit: ExitFit) -> str:
    """The fit as a table."""
    lines = [
        f"Exits fitted to {fit.texts:,} texts (target: {fit.target}, basis: {fit.basis}, pooling: {fit.pooling}):"
    ]
    lines += ["layer  penalty  held-out R^2  mean cosine to the target  nearest ten kept"]
    lines += [
        f"{layer:>5}  {its.penalty:>7.2g}  {its.r_squared:>12.3f}  {its.cosine:>25.3f}  {its.agreement:>16.3f}"
        for layer, its in fit.layers.items()
    ]
    lines += [
        f"Depth {depth} runs {depth - its.top_layers} first and {its.top_layers} last layers; its stitch explains "
        f"{its.r_squared:.3f} of what the last layers read (penalty {its.penalty:.2g})."
        for depth, its in fit.stitches.items()
    ]
    if fit.state_only:
        lines.append("Layer 0 is the static table; deeper layers read it beside their hidden state.")
    return "\n".join(lines)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", help="folder or Hub id of an m3BERT")
    parser.add_argument("output_dir", help="folder for the m3BERT with exits")
    parser.add_argument("--files", nargs="+", required=True, help=".txt, .jsonl, .csv or .parquet files, also gzipped")
    parser.add_argument("--revision", help="branch, tag or commit of the source")
    add_exit_options(parser)
    options = parser.parse_args(arguments)
    compute_of(options)  # refuses what is not there before the model is loaded

    from transformers import AutoModel, AutoTokenizer

    import modeling_m3bert  # noqa: F401  # registers m3BERT
    from modeling_m3bert.settings_m3bert import safetensors_only

    source, revision = options.source, options.revision
    with writing_to(options.output_dir, MODEL_FILES, options.overwrite, source):
        model = AutoModel.from_pretrained(source, revision=revision, **safetensors_only(source))
        tokenizer = AutoTokenizer.from_pretrained(source, revision=revision)
        fit = save_with_exits(
            model, tokenizer, options.output_dir, options.files, options, source=source, revision=revision
        )
    print(f"{report(fit)}\nSaved to {options.output_dir}.")


if __name__ == "__main__":
    run_command(main)
