"""The console command `m3bert`. It imports a command's module only when that command is called."""

from __future__ import annotations

import sys
from importlib import import_module

from .utils.help_texts import did_you_mean


# Command -> its module in `m3bert.commands` (the folder `scripts/` of a checkout), and what it does.
COMMANDS = {
    "fit": ("fit", "make any encoder elastic: fewer layers and a look-up in its own space, without training"),
    "join": ("join", "search an index with another model than its own, from rows of text and vector"),
    "convert": ("convert", "convert a BERT-family encoder to an m3BERT, exactly"),
    "trim": ("trim", "trim the vocabulary of an encoder to your texts, with equal embeddings of them"),
    "train": ("train", "train an encoder with one of the methods, or with an objective of your own"),
    "prepare": ("prepare", "tokenise and pack text for masked-LM training, by language"),
    "recipes": ("recipes", "list the recipes for `train --config NAME`, or print one"),
    "mine": ("mine_negatives", "find hard negatives for pairs with a teacher model"),
    "embed": ("embed", "embed texts at every granularity of a grid, to files"),
    "evaluate": ("evaluate", "score every granularity of an encoder"),
    "choose": ("choose", "choose the granularity to deploy within a budget"),
    "index": ("index", "build the index that was chosen, in faiss, Qdrant or LanceDB"),
    "search": ("search", "search an index"),
    "push": ("push_to_hub", "publish a checkpoint on the Hub, with a model card"),
    "export": ("export", "export an encoder for servers: ONNX graphs, or plain models without remote code"),
    "demo": ("demo", "open a page to try an encoder with any number of layers and dimensions, in any precision"),
    "example_data": ("example_data", "write small example files to try the commands with"),
    "quickstart": ("quickstart", "fit, measure, fine-tune and query a real encoder (about 10 minutes)"),
}


def usage() -> str:
    """The help text: one line per command."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, (_, text) in COMMANDS.items())
    return f"""usage: m3bert COMMAND [options]

Elastic text encoders: one checkpoint, loaded with the layers and dimensions that you can afford.

{commands}

`m3bert COMMAND --help` prints the options of a command, `m3bert --version` the version."""


def main(arguments: list[str] | None = None) -> None:
    """
    Run a command.

    Args:
        arguments (`list[str]`, *optional*): The command and its options. Default: the command line.
    """
    name, *options = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    if name in ("-h", "--help", "help"):
        print(usage())
        return
    if name in ("-V", "--version"):
        from . import __version__

        print(__version__)
        return
    if name not in COMMANDS:
        sys.exit(f"error: unknown command {name!r}{did_you_mean(name, COMMANDS)}; commands: {', '.join(COMMANDS)}.")
    sys.argv = [f"m3bert {name}", *options]  # what argparse shows as the name of the program
    module = import_module(f"m3bert.commands.{COMMANDS[name][0]}")
    import_module("m3bert.commands.command").run_command(module.main)
