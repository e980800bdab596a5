"""
The backbones of the studies, all from all-MiniLM-L6-v2 (extra `quickstart`) and converted to m3BERT:

- `real`: the encoder itself, which was trained on pairs;
- `student`: its first three layers, which were never trained as an encoder of their own;
- `reinitialised`: its first four layers, the fourth with new random weights;
- `mlm`: all six layers, continued with plain masked language modelling on local text for 1,500 steps, or until STS-B's
  development set is below 50 at mean pooling. All six, because the studies read layers 2, 4 and a last one;
- `multigranular`: all six layers with a head, trained for 1,500 steps with masked language modelling at 12
  granularities.

    python -m benchmarks.reproduction.backbones                  # makes `mlm`, once, in at most 20 minutes on one core
    python -m benchmarks.reproduction.backbones multigranular    # makes this one, once, in 40 minutes on one core
"""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import AutoModel, AutoTokenizer, TrainerCallback, set_seed

from benchmarks.reproduction.study import development_tasks, is_there, needed
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.convert import converted
from m3bert.commands.sources import data_folder, default_base
from m3bert.data.files import load_files, tokenize_texts
from m3bert.evaluation import GridEncoder, evaluate_grid
from m3bert.modeling import M3BertForMaskedLM, M3BertModel
from m3bert.models.conversion import convert_to_m3bert
from m3bert.trainers import Granularity, Grid, MultigranularMLMConfig, MultigranularMLMTrainer
from m3bert.trainers.core.checkpoints import complete_checkpoints


CACHE = Path.home() / ".cache" / "m3bert" / "reproduction"
TOKENS = 64  # per piece of text
ANISOTROPIC = 0.5  # Spearman correlation on STS-B's development set at which the MLM backbone is done
BOTH: dict[str, Any] = {
    "max_steps": 1500,
    "lr_scheduler_type": "constant_with_warmup",
    "bf16": True,
    "use_cpu": True,
    "report_to": "none",
    "disable_tqdm": True,
    "seed": 0,
}
MASKED_LM = BOTH | {
    "grid": "6x384",
    "per_device_train_batch_size": 16,
    "learning_rate": 1e-3,
    "warmup_steps": 50,
    "save_strategy": "no",
    "logging_steps": 25,
}
MULTIGRANULAR = BOTH | {
    "grid": "2,4,6 x 16,32,64,384",
    "per_device_train_batch_size": 32,
    "learning_rate": 3e-4,
    "warmup_steps": 200,
    "save_steps": 500,
    "logging_steps": 100,
}
HELD_OUT_LINES = 4000  # of the corpus, that `multigranular` and the methods on it do not train on


def contrastive() -> Any:
    return AutoModel.from_pretrained(default_base())


def reinitialised() -> Any:
    """The first four layers, the fourth initialised as BERT's are."""
    model = contrastive()
    model.config.num_hidden_layers = 4
    model.encoder.layer = model.encoder.layer[:4]
    torch.manual_seed(1234)  # the same encoder for every training seed
    for module in model.encoder.layer[-1].modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=model.config.initializer_range)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
    return model


def backbone(name: str, cache: Path = CACHE) -> tuple[Any, Any]:
    """
    A backbone in float32, and its tokenizer.

    Args:
        name (`str`): `real`, `student`, `reinitialised`, `mlm` or `multigranular`, which has a head.
        cache (`Path`, *optional*): Folder with the backbones that were made.

    Raises:
        ValueError: if there is no such backbone, or it was not made yet.
    """
    if name in MADE:
        folder = cache / name
        if not folder.is_dir():
            raise ValueError(f"There is no {folder}: run python -m benchmarks.reproduction.backbones {name} first.")
        loaded = AutoModel if name == "mlm" else M3BertForMaskedLM
        return loaded.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    model, tokenizer = converted(default_base(), student_layers="3" if name == "student" else None)
    if name == "reinitialised":
        model = convert_to_m3bert(reinitialised())
    elif name not in ("real", "student"):
        legal = "real, student, reinitialised, mlm, multigranular"
        raise ValueError(f"There is no backbone {name!r}; legal values: {legal}.")
    return model, tokenizer


def corpus(data: Path) -> list[str]:
    """Lines of news, web text, books and the Brown corpus, in a fixed random order."""
    names = (f"text-english/{name}.txt.gz" for name in ("news", "web", "books", "brown"))
    files = needed([str(data / name) for name in names if is_there(data, name)], "English texts", data)
    texts = [text for text in load_files(files)["text"] if text.strip()]
    random.Random(0).shuffle(texts)
    return texts


def pieces(texts: list[str], tokenizer: Any) -> Dataset:
    """The concatenated texts, cut into pieces of equal length."""
    rows = tokenize_texts(Dataset.from_dict({"text": texts}), tokenizer, max_length=TOKENS)["input_ids"]
    ids = [token for row in rows for token in row]
    return Dataset.from_dict({"input_ids": [ids[start : start + TOKENS] for start in range(0, len(ids), TOKENS)][:-1]})


def untrained_head(grid: Grid) -> M3BertForMaskedLM:
    """The converted encoder with an MLM projection that starts as its token embeddings."""
    encoder = convert_to_m3bert(contrastive())
    encoder.config.tie_word_embeddings = False
    encoder.config.matryoshka_layers, encoder.config.matryoshka_dims = grid.layers, grid.dims
    model = M3BertForMaskedLM(encoder.config)
    model.model = encoder
    with torch.no_grad():
        model.lm_head.weight.copy_(encoder.embed_tokens.weight)
    return model


class UntilAnisotropic(TrainerCallback):
    """Stops training once STS-B's development set is below [`ANISOTROPIC`]; checked every 25 steps."""

    def __init__(self, encoder: M3BertModel, tokenizer: Any, data: Path) -> None:
        self.encoder, self.tokenizer, self.data = encoder, tokenizer, data

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 25:
            return
        full = Granularity(self.encoder.config.num_hidden_layers, self.encoder.config.hidden_size)
        encoder = GridEncoder(self.encoder, self.tokenizer, Grid((full,)), max_length=128)
        results = evaluate_grid(encoder, development_tasks(["stsb-dev"]), self.data)
        value = results.quality(["stsb-dev"])[full]
        print(f"step {state.global_step}: STS-B development {100 * value:.1f}", flush=True)
        control.should_training_stop |= value < ANISOTROPIC


def make_mlm(cache: Path, data: Path) -> None:
    """Make the `mlm` backbone, in float16."""
    _, tokenizer = converted(default_base())
    model = untrained_head(Grid.parse(MASKED_LM["grid"]))
    set_seed(MASKED_LM["seed"])
    until = UntilAnisotropic(model.model, tokenizer, data)
    with tempfile.TemporaryDirectory() as folder:
        args = MultigranularMLMConfig(output_dir=folder, **MASKED_LM)
        texts = corpus(data)[:40_000]
        trainer = MultigranularMLMTrainer(model, args, tokenizer, pieces(texts, tokenizer), callbacks=[until])
        trainer.train()
    encoder = model.model
    encoder.embedding_settings = converted(default_base())[0].embedding_settings
    draft = cache / "mlm.draft"
    shutil.rmtree(draft, ignore_errors=True)
    encoder.half().save_pretrained(draft)
    tokenizer.save_pretrained(draft)
    draft.rename(cache / "mlm")


def make_multigranular(cache: Path, data: Path) -> None:
    """Make the `multigranular` backbone. A call that was interrupted continues with its last checkpoint."""
    _, tokenizer = converted(default_base())
    draft = cache / "multigranular.draft"
    set_seed(MULTIGRANULAR["seed"])
    model = untrained_head(Grid.parse(MULTIGRANULAR["grid"]))
    args = MultigranularMLMConfig(output_dir=str(draft), **MULTIGRANULAR)
    texts = corpus(data)[HELD_OUT_LINES:]
    trainer = MultigranularMLMTrainer(model, args, tokenizer, pieces(texts, tokenizer))
    trainer.train(resume_from_checkpoint=next(reversed(complete_checkpoints(str(draft))), None))
    trainer.save_model()
    draft.rename(cache / "multigranular")


MADE = {"mlm": make_mlm, "multigranular": make_multigranular}


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("name", nargs="?", choices=list(MADE), default="mlm", help="the backbone")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder for the backbone")
    options = parser.parse_args(arguments)
    options.cache.mkdir(parents=True, exist_ok=True)
    if (options.cache / options.name).is_dir():
        print(f"{options.cache / options.name} is there already.")
        return
    MADE[options.name](options.cache, data_folder())


if __name__ == "__main__":
    run_command(main)
