"""
Turn a BERT-family encoder into an elastic m3BERT with equal states at every layer:

    python -m scripts.convert intfloat/multilingual-e5-base runs/m3bert-from-me5
"""

from __future__ import annotations

import argparse
from typing import Any

from transformers import AutoModel, AutoTokenizer

from modeling_m3bert import M3BertModel, convert_to_m3bert
from scripts._command import run_command


def convert(source: str, output_dir: str, revision: str | None = None) -> M3BertModel:
    """Convert the encoder `source` (folder or Hub id) and write it, its code and its tokenizer to `output_dir`."""
    model = convert_to_m3bert(AutoModel.from_pretrained(source, revision=revision, use_safetensors=True))
    tokenizer = for_m3bert(AutoTokenizer.from_pretrained(source, revision=revision), model)
    model.save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
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
    options = parser.parse_args(arguments)
    model = convert(options.source, options.output_dir, options.revision)
    print(
        f"{options.output_dir}: {model.config.num_hidden_layers} layers, width {model.config.hidden_size}, "
        f"{model.num_parameters():,} parameters. Load it with AutoModel.from_pretrained({options.output_dir!r}, "
        "trust_remote_code=True, output_layer=..., output_dim=...)."
    )


if __name__ == "__main__":
    run_command(main)
