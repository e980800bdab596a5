"""
The losses and the weights after three training steps of every method, in float64 (methods with a teacher:
float32): run it on two commits and compare the files.

    python -m benchmarks.method_values before.json
    python -m benchmarks.method_values after.json --against before.json

The second call prints the largest relative difference of each method, and fails above 1e-12, or in float32 above 1e-5.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, PrinterCallback, set_seed

from m3bert import trainers
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.train import method_of
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM, M3BertModel


WORDS = [f"w{index}" for index in range(90)]
GRID = "1,3x8,32"
# Method -> settings, where its defaults are not for this model. Masks are drawn from the seed.
SETTINGS: dict[str, dict[str, Any]] = {
    "multigranular-mlm": {"grid": GRID},
    "matryoshka-distillation": {"grid": GRID, "pairs": "3x32>all", "allow_untrained_teacher": True},
    "simcse": {"grid": "3x32", "unsupervised": True},
    "starbucks": {"grid": "1x8,3x32"},
    "mic": {"grid": "3x8,32"},
    "ibkd-finetuning": {"grid": "3x32"},
    "exit-distillation": {"grid": GRID, "candidates": 8},
    "qama": {"grid": "3x8,32"},
}
NEED_DROPOUT = ("simcse", "mipic", "mic", "mixture")  # two views of a text
TAUGHT = ("exit-distillation", "ibkd")  # by embeddings in float32
TOLERANCE, TOLERANCE_TAUGHT = 1e-12, 1e-5


def tokenizer_of() -> PreTrainedTokenizerFast:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = {token: index for index, token in enumerate([*special, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, model_max_length=32, **dict(zip(names, special, strict=True))
    )


def texts_of(count: int) -> list[str]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 20, (count,), generator=generator).tolist()
    return [" ".join(WORDS[word] for word in torch.randint(90, (length,), generator=generator)) for length in lengths]


def values_of(method: str, folder: Path) -> list[float]:
    """The loss of each step, and the sum and the norm of the trained weights."""
    tokenizer, texts = tokenizer_of(), texts_of(32)
    config_class, trainer_class = method_of(method)
    set_seed(0)
    config = M3BertConfig(
        vocab_size=len(tokenizer), hidden_size=32, num_hidden_layers=3, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=32, embedding_dropout=0.0,
    )  # fmt: skip
    config.attention_dropout = 0.1 if method in NEED_DROPOUT else 0.0
    embeds = issubclass(config_class, trainers.TextTrainingArguments)
    model: Any = (M3BertModel if embeds else M3BertForMaskedLM)(config)
    if method == "exit-distillation":
        model.set_depths(exits={1: (torch.eye(32), torch.zeros(32))}, table=torch.randn(len(tokenizer), 32))
    source = folder / "source"
    model.save_pretrained(source)
    tokenizer.save_pretrained(source)
    model = type(model).from_pretrained(source)
    options = {"grid": GRID} | SETTINGS.get(method, {})
    if issubclass(config_class, trainers.DistillationConfig):
        options["teacher_cache_dir"] = str(folder / "teachers")
    if method == "ibkd":
        options = {"teacher_name_or_path": str(source)}
    args = config_class(
        output_dir=str(folder / "out"), max_steps=3, per_device_train_batch_size=8, learning_rate=1e-3,
        logging_steps=1, report_to="none", save_strategy="no", disable_tqdm=True, use_cpu=True, seed=0,
        optim="sgd", lr_scheduler_type="constant", warmup_steps=0, **options,
    )  # fmt: skip
    rows: dict[str, Any] = {"anchor": texts[:16], "positive": texts[16:]}
    if isinstance(args, trainers.DistillationConfig) or getattr(args, "unsupervised", False):
        rows = {"text": texts[:16]}
    if method == "scored-pairs":
        rows["score"] = [index / 16 for index in range(16)]
    dataset = Dataset.from_dict(rows)
    if not embeds:
        dataset = Dataset.from_dict({"input_ids": tokenizer(texts)["input_ids"]})
    trainer = trainer_class(model, args, tokenizer, dataset)
    if method not in TAUGHT:
        trainer.model.double()
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    weights = torch.cat([weight.detach().double().flatten() for weight in trainer.model.parameters()])
    return [*losses, weights.sum().item(), weights.norm().item()]


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path, help="file for the values")
    parser.add_argument("--against", type=Path, help="file of another commit")
    options = parser.parse_args(arguments)
    values = {}
    for method in trainers.METHODS:
        with tempfile.TemporaryDirectory() as folder:
            values[method] = values_of(method, Path(folder))
        print(method, values[method], flush=True)
    options.file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    if options.against is not None:
        before = json.loads(options.against.read_text(encoding="utf-8"))
        for method, after in values.items():
            difference = max(abs(a - b) / max(abs(b), 1e-30) for a, b in zip(after, before[method], strict=True))
            print(f"{method}: {difference:.1e}")
            if difference > (TOLERANCE_TAUGHT if method in TAUGHT else TOLERANCE):
                raise SystemExit(f"{method} differs by {difference:.1e}.")


if __name__ == "__main__":
    run_command(main)
