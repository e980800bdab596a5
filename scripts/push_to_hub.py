"""
Publish a checkpoint on the Hub, with its code, its modules for sentence-transformers and a card that is made of what
was measured:

    python -m scripts.push_to_hub runs/pairs user/model --results runs/evaluation/results.json --license apache-2.0 \\
        --language en --onnx 4x64 --dry_run
    python -m scripts.push_to_hub runs/pairs user/model-small --granularity 4x64 --public

A new repository is private unless --public is said. --dry_run lays everything out and lists it. A push that was
interrupted goes on where it stopped when the same command runs again. The token is that of `hf auth login` or of
HF_TOKEN.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hub_cards.metadata import Statements
from hub_cards.publication import Options, laid_out
from scripts._command import run_command
from trainers import Granularity, Grid
from trainers.evaluation import GridResults


def one(text: str) -> Granularity:
    """A single granularity."""
    grid = Grid.parse(text)
    if len(grid) != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not one granularity, such as 4x64.")
    return grid.full


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="folder of the checkpoint")
    parser.add_argument("repo_id", help="where it goes: user/model")
    parser.add_argument("--results", type=Path, help="results.json of scripts.evaluate, of this very checkpoint")
    parser.add_argument("--granularity", type=one, help="publish this part alone, as a small, complete model: 4x64")
    parser.add_argument("--quantize", action="store_true", help="store the linear layers in 8 bits (torchao)")
    parser.add_argument("--onnx", type=one, nargs="+", default=[], help="export graphs of these granularities too")
    parser.add_argument("--license", help="identifier of the license: apache-2.0")
    parser.add_argument("--language", nargs="+", default=[], help="codes of languages: en de")
    parser.add_argument("--datasets", nargs="+", default=[], help="Hub ids of training data that is not on record")
    parser.add_argument("--base_model", help="Hub id that it comes from, where none is on record")
    parser.add_argument("--tags", nargs="+", default=[], help="more tags")
    parser.add_argument("--public", action="store_true", help="everybody may see a new repository")
    parser.add_argument("--revision", help="branch to commit to; it must be there")
    parser.add_argument("--message", default="Publish with m3bert", help="of the commit")
    parser.add_argument("--dry_run", action="store_true", help="list every file with its size, and push nothing")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    said = parse(arguments)
    statements = Statements(
        said.license, tuple(said.language), tuple(said.datasets), said.base_model, tuple(said.tags)
    )
    options = Options(said.granularity, said.quantize, tuple(said.onnx), statements)
    results = GridResults.load(said.results) if said.results is not None else None
    where = {"revision": said.revision, "dry_run": said.dry_run}
    with laid_out(said.checkpoint, said.repo_id, options, results, **where) as publication:
        print(publication.listing())
        if said.dry_run:
            print("Nothing was pushed (--dry_run).")
            return
        commit = publication.upload(private=not said.public, revision=said.revision, message=said.message)
    print(commit.commit_url)


if __name__ == "__main__":
    run_command(main)
