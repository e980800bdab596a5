"""
Publish a checkpoint on the Hub, with its code, its modules for sentence-transformers, and a card made from its
training record and its evaluation:

    m3bert push runs/pairs user/model --results runs/evaluation/results.json --license apache-2.0 --language en \\
        --onnx 4x64 --dry_run
    m3bert push runs/pairs user/model-small --granularity 4x64 --public
    m3bert push runs/pairs user/model-bert --granularity 4x64 --format native --base_model user/model
    m3bert push runs/elastic user/model-asymmetric --format router
    m3bert push runs/elastic user/model --sizes 2 4 table

The last one also writes each of these sizes as a branch: `SentenceTransformer("user/model", revision="4-layers")`
needs no remote code. A new repository is private unless you pass --public. --dry_run lists all files and pushes
nothing; with --output_dir, it also writes them, so that you can read the card. To resume an interrupted push, run the
same command again. The token comes from `hf auth login` or from HF_TOKEN.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..encode.granularity import Granularity
from ..evaluation.results import GridResults
from ..utils.help_texts import option
from .command import next_step, parse_options
from .sources import local_data


@dataclass
class PushArguments:
    """What to publish, and what its card says."""

    results: Path | None = option(None, "results.json of `m3bert evaluate` for exactly this checkpoint.")
    sizes: list[str] = option([], "Also push these sizes as branches: 2 4 table; or all.")
    granularity: str | None = option(None, "Publish only this granularity, as a small, complete model.")
    format: Literal["elastic", "native", "static", "router"] = option(
        "elastic",
        "elastic: the repository as it is; native: a plain encoder; static: the table; router: queries by "
        "--granularity, or the table, and documents by all layers. All but elastic need no remote code.",
    )
    quantize: bool = option(False, "Store the linear layers in 8 bits: needs torchao.")
    onnx: list[str] = option([], "Also export the full size, these granularities and --sizes to ONNX.")
    onnx_int8: bool = option(False, "Export each granularity of --onnx also in 8 bits.")
    onnx_fp16: bool = option(False, "Export each ONNX graph also in float16.")
    license: str | None = option(None, "License identifier: apache-2.0.")
    language: list[str] = option([], "Language codes: en de.")
    datasets: list[str] = option([], "Hub ids of training data, besides those on record.")
    base_model: str | None = option(None, "Hub id of the base model, in place of the one on record.")
    tags: list[str] = option([], "Additional tags.")
    mteb_meta: Path | None = option(None, "Write a ModelMeta for MTEB's repository to this Python file.")
    own_code: bool = option(False, "Publish Python files that differ from this package's.")
    public: bool = option(False, "Make a new repository public.")
    revision: str | None = option(None, "Existing branch to commit to. Default: main.")
    message: str = option("Publish with m3bert", "Commit message.")
    dry_run: bool = option(False, "List all files with their sizes, and push nothing.")
    output_dir: Path | None = option(None, "New folder for a copy of these files, also the card.")


def without_dry_run(arguments: Sequence[str]) -> Iterator[str]:
    """The words of a command line without `--dry_run` and `--output_dir`, whose folder exists now."""
    words = iter(arguments)
    for word in words:
        name, equals, _ = word.replace("-", "_").partition("=")
        if name == "__output_dir" and not equals:
            next(words, None)
        elif name not in ("__dry_run", "__output_dir"):
            yield word


def main(arguments: list[str]) -> None:
    given, place = parse_options(
        (PushArguments,),
        __doc__,
        arguments,
        checkpoint={"type": Path, "help": "folder of the checkpoint"},
        repo_id={"help": "repository on the Hub: user/model"},
    )
    if not place.checkpoint.is_dir():
        raise ValueError(f"{place.checkpoint} is not a folder: name the folder of a checkpoint.")
    if given.output_dir is not None and given.output_dir.exists():
        raise ValueError(f"--output_dir {given.output_dir} exists: name a new folder.")
    size = None if given.granularity is None else Granularity.parse(given.granularity)
    graphs = tuple(Granularity.parse(size) for size in given.onnx)
    results = GridResults.load(given.results) if given.results is not None else None
    from ..hub_cards.metadata import Statements
    from ..hub_cards.mteb_meta import write_mteb_meta
    from ..hub_cards.publication import Options, laid_out

    options = Options(
        granularity=size,
        quantize=given.quantize,
        onnx=graphs,
        statements=Statements(
            given.license, tuple(given.language), tuple(given.datasets), given.base_model, tuple(given.tags)
        ),
        format=given.format,
        onnx_int8=given.onnx_int8,
        onnx_fp16=given.onnx_fp16,
        data=local_data(),
        own_code=given.own_code,
        sizes=tuple(given.sizes),
    )
    where = {"revision": given.revision, "dry_run": given.dry_run}
    with laid_out(place.checkpoint, place.repo_id, options, results, **where) as publication:
        print(publication.listing())
        if given.mteb_meta is not None:  # before the push, so that an error comes first
            write_mteb_meta(given.mteb_meta, publication.folder, place.repo_id)
        if given.output_dir is not None:
            for name, folder in {"": publication.folder, **publication.branches}.items():
                shutil.copytree(folder, given.output_dir / name)
            print(f"{given.output_dir}: these files; README.md is the card.")
        if given.dry_run:
            print("Nothing was pushed (--dry_run).")
            next_step("m3bert", "push", *without_dry_run(arguments))
            return
        commit = publication.upload(private=not given.public, revision=given.revision, message=given.message)
        if given.mteb_meta is not None:
            write_mteb_meta(given.mteb_meta, publication.folder, place.repo_id, commit.oid)
    print(commit.commit_url)
    for name in publication.branches:
        print(f"{commit.repo_url}/tree/{name}")
    if given.format in ("elastic", "native"):
        next_step(model=place.repo_id)
