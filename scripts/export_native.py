"""
Export an elastic model, or one granularity of it, as a plain encoder of transformers:

    m3bert export --format native --model_name_or_path runs/model --granularity 4x64 --output_dir runs/bert-4x64

transformers, sentence-transformers and servers load the folder without remote code and without this package. An m3BERT
becomes a BERT, RoBERTa, XLM-R, ...; any other encoder keeps its class, and has the layers of the depth.
sentence-transformers gives the embeddings of the granularity: exit, output dim and projection are a Dense module after
the pooling. Without --granularity, it is the full size.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import snapshot_download
from transformers.utils import logging

from hub_cards.checkpoint import Checkpoint
from hub_cards.native_export import export_native, state_only
from modeling_m3bert.conversion_m3bert import hub_id
from trainers.core.durable import replacing_files
from trainers.core.granularity import Granularity
from trainers.hub.serving import problems_for_servers

from .command import EXPORT_FILES, parse_options, writing_to


@dataclass
class NativeArguments:
    """What to export, and where to."""

    model_name_or_path: str = field(metadata={"help": "Folder or Hub id of the model.", "aliases": ["--model"]})
    output_dir: str = field(default="runs/native", metadata={"help": "Folder for the model."})
    overwrite: bool = field(default=False, metadata={"help": "Replace an export that output_dir holds."})
    format: str = field(default="native", metadata={"help": "native; other formats have options of their own."})
    granularity: str | None = field(default=None, metadata={"help": "Granularity to export: 4x64."})
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the Hub."})
    model_type: str | None = field(
        default=None,
        metadata={
            "help": "Of an m3BERT, the model type of the result: bert, roberta, xlm-roberta, ... Default: that of the "
            "encoder that it was converted from, or else bert."
        },
    )
    encoder_only: bool = field(default=False, metadata={"help": "Leave out a head."})


def checkpoint_of(name_or_path: str, revision: str | None = None) -> Checkpoint:
    """A checkpoint in a folder, or downloaded from the Hub."""
    folder = Path(name_or_path)
    if not folder.is_dir():
        if hub_id(name_or_path) is None:
            raise ValueError(f"{folder} is neither a folder nor a Hub id.")
        folder = Path(snapshot_download(name_or_path, revision=revision))
    logging.disable_progress_bar()
    return Checkpoint(folder)


def main(arguments: list[str]) -> None:
    (options,) = parse_options((NativeArguments,), __doc__, arguments)
    granularity = Granularity.parse(options.granularity) if options.granularity else None
    output, source = Path(options.output_dir), options.model_name_or_path
    with writing_to(output, EXPORT_FILES, options.overwrite, source):
        checkpoint = checkpoint_of(source, options.revision)
        with replacing_files(output, stale=EXPORT_FILES) as draft:
            export_native(
                checkpoint, draft, granularity, model_type=options.model_type, encoder_only=options.encoder_only
            )
        native = Checkpoint(output)
        architecture = native.config.architectures[0]
        print(f"{output}: {architecture}, {native.full} of {options.model_name_or_path}; needs no remote code.")
        if state_only(checkpoint, native.config.num_hidden_layers):
            print("Its exit reads the hidden state alone, and no static table: evaluate this folder.")
        if native.head == "AutoModel":
            for problem in problems_for_servers(output):
                print(f"Servers may refuse it: {problem}")
