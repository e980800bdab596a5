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

import argparse
import shutil
from pathlib import Path

from ..encode.granularity import Granularity
from ..evaluation.results import GridResults
from .command import argument_parser, next_step
from .sources import local_data


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("repo_id", help="repository on the Hub: user/model")
    parser.add_argument("--results", type=Path, help="results.json of `m3bert evaluate` for exactly this checkpoint")
    parser.add_argument("--sizes", nargs="+", default=[], help="also push these sizes as branches: 2 4 table; or all")
    parser.add_argument("--granularity", help="publish only this granularity, as a small, complete model")
    parser.add_argument(
        "--format",
        choices=("elastic", "native", "static", "router"),
        default="elastic",
        help="elastic: the repository as it is; native: a plain encoder; static: the table; router: queries "
        "by --granularity, or the table, and documents by all layers. All but elastic need no remote code "
        "(default: %(default)s)",
    )
    parser.add_argument("--quantize", action="store_true", help="store the linear layers in 8 bits: needs torchao")
    parser.add_argument(
        "--onnx", nargs="+", default=[], help="also export the full size, these granularities and --sizes to ONNX"
    )
    parser.add_argument("--onnx_int8", action="store_true", help="export each granularity of --onnx also in 8 bits")
    parser.add_argument("--onnx_fp16", action="store_true", help="export each ONNX graph also in float16")
    parser.add_argument("--license", help="license identifier: apache-2.0")
    parser.add_argument("--language", nargs="+", default=[], help="language codes: en de")
    parser.add_argument("--datasets", nargs="+", default=[], help="Hub ids of training data, besides those on record")
    parser.add_argument("--base_model", help="Hub id of the base model, in place of the one on record")
    parser.add_argument("--tags", nargs="+", default=[], help="additional tags")
    parser.add_argument("--mteb_meta", type=Path, help="write a ModelMeta for MTEB's repository to this Python file")
    parser.add_argument("--own_code", action="store_true", help="publish Python files that differ from this package's")
    parser.add_argument("--public", action="store_true", help="make a new repository public")
    parser.add_argument("--revision", help="existing branch to commit to; default: main")
    parser.add_argument("--message", default="Publish with m3bert", help="commit message (default: %(default)s)")
    parser.add_argument("--dry_run", action="store_true", help="list all files with their sizes, and push nothing")
    parser.add_argument("--output_dir", type=Path, help="new folder for a copy of these files, also the card")
    given = parser.parse_args(arguments)
    if not given.checkpoint.is_dir():
        raise ValueError(f"{given.checkpoint} is not a folder: name the folder of a checkpoint.")
    given.granularity = None if given.granularity is None else Granularity.parse(given.granularity)
    given.onnx = [Granularity.parse(size) for size in given.onnx]
    return given


def main(arguments: list[str]) -> None:
    given = parse(arguments)
    results = GridResults.load(given.results) if given.results is not None else None
    from ..hub_cards.metadata import Statements
    from ..hub_cards.mteb_meta import write_mteb_meta
    from ..hub_cards.publication import Options, laid_out

    options = Options(
        granularity=given.granularity,
        quantize=given.quantize,
        onnx=tuple(given.onnx),
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
    with laid_out(given.checkpoint, given.repo_id, options, results, **where) as publication:
        print(publication.listing())
        if given.mteb_meta is not None:  # before the push, so that an error comes first
            write_mteb_meta(given.mteb_meta, publication.folder, given.repo_id)
        if given.output_dir is not None:
            for name, folder in {"": publication.folder, **publication.branches}.items():
                shutil.copytree(folder, given.output_dir / name)
            print(f"{given.output_dir}: these files; README.md is the card.")
        if given.dry_run:
            print("Nothing was pushed (--dry_run).")
            copy = ("--output_dir", str(given.output_dir))  # which exists now
            next_step("m3bert", "push", *(word for word in arguments if word not in ("--dry_run", *copy)))
            return
        commit = publication.upload(private=not given.public, revision=given.revision, message=given.message)
        if given.mteb_meta is not None:
            write_mteb_meta(given.mteb_meta, publication.folder, given.repo_id, commit.oid)
    print(commit.commit_url)
    for name in publication.branches:
        print(f"{commit.repo_url}/tree/{name}")
    if given.format in ("elastic", "native"):
        next_step(model=given.repo_id)
