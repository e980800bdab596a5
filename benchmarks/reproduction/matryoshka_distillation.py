"""
Matryoshka distillation inside one model (m3BERT, Table 5), at our scale: a small m3BERT is pretrained with
multigranular MLM, then trained on with and without distillation for as many steps.

    python -m benchmarks.reproduction.matryoshka_distillation --pretrain     # an hour on one CPU core
    python -m benchmarks.reproduction.matryoshka_distillation --seeds 0 1
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer, set_seed

from modeling_m3bert import M3BertForMaskedLM, convert_to_m3bert
from scripts._command import run_command
from scripts._sources import data_folder, default_base
from trainers import Grid, MultigranularMLMConfig, MultigranularMLMTrainer
from trainers.data import load_files, tokenize_texts


GRID = Grid.parse("2,4,6 x 16,32,64,384")
TOKENS = 64
HELD_OUT = 4000


def corpus(data: Path) -> list[str]:
    """Lines of news, web text, books and the Brown corpus, in an order of their own."""
    files = [str(data / "text-english" / f"{name}.txt.gz") for name in ("news", "web", "books", "brown")]
    texts = [text for text in load_files(files)["text"] if text.strip()]
    random.Random(0).shuffle(texts)
    return texts


def chunks(texts: list[str], tokenizer: Any) -> Dataset:
    """The texts one after the other, cut into pieces of equal length."""
    rows = tokenize_texts(Dataset.from_dict({"text": texts}), tokenizer, max_length=TOKENS)["input_ids"]
    ids = [token for row in rows for token in row]
    return Dataset.from_dict({"input_ids": [ids[start : start + TOKENS] for start in range(0, len(ids), TOKENS)][:-1]})


def untrained_head() -> M3BertForMaskedLM:
    """The encoder, converted, with its token embeddings as the first weights of the projection."""
    encoder = convert_to_m3bert(AutoModel.from_pretrained(default_base()))
    encoder.config.matryoshka_layers, encoder.config.matryoshka_dims = GRID.layers, GRID.dims
    model = M3BertForMaskedLM(encoder.config)
    model.model = encoder
    with torch.no_grad():
        model.get_output_embeddings().weight.copy_(encoder.embed_tokens.weight)
    return model


def pretrain(folder: Path, steps: int, batch_size: int, learning_rate: float) -> None:
    texts = corpus(data_folder())
    tokenizer = AutoTokenizer.from_pretrained(default_base())
    held_out, training = texts[:HELD_OUT], texts[HELD_OUT:]
    set_seed(0)
    args = MultigranularMLMConfig(
        output_dir=str(folder),
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        per_device_eval_batch_size=64,
        learning_rate=learning_rate,
        warmup_steps=0.05,
        lr_scheduler_type="constant_with_warmup",
        max_grad_norm=1.0,
        bf16=True,
        use_cpu=True,
        logging_steps=50,
        eval_strategy="steps",
        eval_steps=500,
        save_strategy="steps",
        save_steps=500,
        save_total_limit=2,
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )
    trainer = MultigranularMLMTrainer(
        untrained_head(), args, tokenizer, chunks(training, tokenizer), chunks(held_out[:800], tokenizer)
    )
    trainer.train()
    trainer.save_model()


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pretrain", action="store_true")
    parser.add_argument("--folder", type=Path, default=Path("runs/matryoshka_distillation"))
    parser.add_argument("--pretraining-steps", type=int, default=4000)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args(arguments)
    if options.pretrain:
        pretrain(options.folder / "pretrained", options.pretraining_steps, options.batch_size, options.learning_rate)


if __name__ == "__main__":
    run_command(main)
