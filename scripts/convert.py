"""
Turn a BERT-family encoder into an elastic m3BERT with equal states at every layer:

    python -m scripts.convert intfloat/multilingual-e5-base runs/m3bert-from-me5

An embedding model stays one: how sentence-transformers pools its states goes with them. `--encoder_only` leaves that
out.
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import AutoModel, AutoTokenizer

from modeling_m3bert import M3BertModel, convert_to_m3bert
from scripts._command import run_command
from trainers import Projection
from trainers.embedding_modules import published_options, published_pooling, width_of, write_modules


def convert(source: str, output_dir: str, revision: str | None = None, *, encoder_only: bool = False) -> M3BertModel:
    """
    Convert the encoder `source` and write it, its code and its tokenizer to `output_dir`, and how it was published as
    an embedding model, if it was.

    Args:
        source (`str`): Folder or Hub id.
        output_dir (`str`): Where to write.
        revision (`str`, *optional*): Branch, tag or commit of the source.
        encoder_only (`bool`, *optional*, defaults to `False`): Write nothing of the embedding model.

    Raises:
        ValueError: if the encoder is of another family, or its embedding is more than a mean or a first token and a
            matrix.
    """
    pooling = None if encoder_only else published_pooling(source, causal=False, revision=revision)
    projection = None if pooling is None else Projection.find(source, revision=revision)
    model = convert_to_m3bert(AutoModel.from_pretrained(source, revision=revision, use_safetensors=True))
    tokenizer = for_m3bert(AutoTokenizer.from_pretrained(source, revision=revision), model)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    if pooling is not None:
        options, limit = published_options(source, revision=revision), tokenizer.model_max_length
        options["max_length"] = min(options["max_length"] or limit, limit)
        write_modules(output_dir, width=width_of(model.config), pooling=pooling, projection=projection, **options)
    return model


def for_m3bert(tokenizer: Any, model: M3BertModel) -> Any:
    """The tokenizer of a converted model: without token types, and with as many positions as the source has after its
    offset."""
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # only what is in here is saved
    tokenizer.model_max_length = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    return tokenizer


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="folder or Hub id of a BERT, RoBERTa, XLM-R, ... encoder")
    parser.add_argument("output_dir", help="where to write the m3BERT")
    parser.add_argument("--revision", help="branch, tag or commit of the source")
    parser.add_argument(
        "--encoder_only", action="store_true", help="leave out how the source was published as an embedding model"
    )
    options = parser.parse_args(arguments)
    model = convert(options.source, options.output_dir, options.revision, encoder_only=options.encoder_only)
    print(
        f"{options.output_dir}: {model.config.num_hidden_layers} layers, width {model.config.hidden_size}, "
        f"{model.num_parameters():,} parameters. Load it with AutoModel.from_pretrained({options.output_dir!r}, "
        "trust_remote_code=True, output_layer=..., output_dim=...)."
    )


if __name__ == "__main__":
    run_command(main)
