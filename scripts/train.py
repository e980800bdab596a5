"""
Train an encoder:

    m3bert train multigranular-mlm --model_name_or_path DIR --train_files text.txt --output_dir runs/mlm
    m3bert train multigranular-mlm --prepared_data runs/prepared --tokenizer_name DIR --output_dir runs/mlm
    m3bert train contrastive --config msmarco_triplets --train_files triplets.jsonl --model_name_or_path DIR ...
    m3bert train contrastive --train_files nli=nli.csv qa=qa.jsonl --model_name_or_path DIR ...
    m3bert train contrastive --dataset_name HUB_ID --dataset_config NAME --model_name_or_path DIR ...
    m3bert train path/to/mine.py:MyConfig --train_files pairs.jsonl --model_name_or_path DIR ...

Methods: {methods}.
A config class in a file of your own is a method, too; its `objective_class` is what is trained.

`m3bert train METHOD --help` lists the options of a method. All TrainingArguments of transformers are options, too.
`--config` reads options from a YAML file or a recipe (`m3bert recipes` lists them). It can be repeated: later files
override earlier ones, the command line overrides all files, and mappings such as `sia: ...` are merged. `--peft lora`
trains an adapter. `--student_layers 3` trains the first three layers of a model as an m3BERT, `--student_layers 1,4,6`
these three; for ibkd, the default model is the teacher.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from m3bert import trainers

from ..data.formats import check_files, files_by_name
from ..encode.granularity import Grid
from ..models.repository import MODEL_FILES
from ..utils.durable import only_writer, remove_files, replacing_files
from ..utils.help_texts import did_you_mean
from .command import check_overwriting, next_step, parse_options
from .recipes import merged, read_recipes
from .sources import local_data
from .training_data import DataArguments, check_text_columns, data_files, embedding_rows, masked_lm_rows


if TYPE_CHECKING:
    from .backbone import BackboneArguments

TRAINED_FILES = (*MODEL_FILES, "checkpoint-*", "adapter_*", "*_results.json", "trainer_state.json")
INSTEAD = "or go on with it: --resume_from_checkpoint auto"
__doc__ = (__doc__ or "").format(methods="\n".join(wrap(", ".join(trainers.METHODS), 100)))


def check_method(name: str) -> None:
    """Raise a ValueError unless a name is in `trainers.METHODS` or has the form `path/to/file.py:ConfigClass`."""
    if name not in trainers.METHODS and not name.rpartition(":")[0].endswith(".py"):
        raise ValueError(
            f"{name!r} is not a method{did_you_mean(name, trainers.METHODS)}; "
            f"methods: {', '.join(trainers.METHODS)}, or path/to/mine.py:MyConfig."
        )


def method_of(name: str) -> tuple[type, type]:
    """The config and the trainer of a method: one of `trainers.METHODS`, or `path/to/file.py:ConfigClass`."""
    if name in trainers.METHODS:
        config, trainer = trainers.METHODS[name]
        return getattr(trainers, config), getattr(trainers, trainer)
    file, _, class_name = name.rpartition(":")
    config_class = load_class(Path(file), class_name)
    known = {getattr(trainers, config): trainer for config, trainer in [*trainers.METHODS.values(), *trainers.BASES]}
    for base in config_class.__mro__:
        if base in known:
            return config_class, getattr(trainers, known[base])
    raise ValueError(f"{class_name} in {file} must derive from EmbeddingConfig or MultigranularMLMConfig.")


def load_class(file: Path, name: str) -> type:
    """A class that a Python file defines."""
    spec: Any = importlib.util.spec_from_file_location(f"m3bert_user_{file.stem}", file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    if not hasattr(module, name):
        raise ValueError(f"{file} defines no {name}.")
    return getattr(module, name)


def read_config(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """The options of the files that `--config` names, and the other words of the command line. A mapping of a recipe,
    such as `sia: ...`, is merged with the one on the command line."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--config", action="append", default=[])
    named, words = parser.parse_known_args(arguments)
    recipe = read_recipes(named.config)
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name in (name for name, value in recipe.items() if isinstance(value, Mapping)):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    mappings, words = parser.parse_known_args(words)
    if not vars(mappings):
        return recipe, words
    from ..trainers.core.composition import mapping_of

    return merged(recipe, {name: mapping_of(f"--{name}", text) for name, text in vars(mappings).items()}), words


@dataclass
class EarlyArguments(DataArguments):
    """Options of every method that can be checked before training is imported."""

    output_dir: str | None = None
    model_name_or_path: str | None = None
    grid: str | None = None
    text_columns: list[str] | None = None
    resume_from_checkpoint: str | None = None
    overwrite: bool = False


def look_ahead(method: str, arguments: list[str]) -> None:
    """Refuse mistakes in files and folders before the libraries of training are imported, which takes seconds."""
    from transformers import HfArgumentParser

    parser = HfArgumentParser(EarlyArguments, add_help=False, allow_abbrev=False)
    recipe, words = read_config(arguments)
    parser.set_defaults(**recipe)
    options, *_ = parser.parse_args_into_dataclasses(words, return_remaining_strings=True)
    if options.output_dir is None:
        raise ValueError("Training needs --output_dir, a folder for the model and its checkpoints.")
    if not options.overwrite and not options.resume_from_checkpoint:
        check_overwriting(options.output_dir, TRAINED_FILES, False, options.model_name_or_path, INSTEAD)
    sources = [name for name in ("train_files", "dataset_name", "prepared_data") if getattr(options, name)]
    if len(sources) != 1:
        raise ValueError(
            "Training needs one of --train_files, --dataset_name and, for masked LMs, --prepared_data; "
            f"got {', '.join(f'--{name}' for name in sources) or 'none'}."
        )
    if options.grid:
        Grid.parse(options.grid)
    masked_lm = method in trainers.MASKED_LM_METHODS
    for files in filter(None, (options.train_files, options.eval_files)):
        for group in files_by_name(files).values() or [files]:
            columns = check_files(group, [options.text_column] if masked_lm else ())
            if columns and method in trainers.METHODS and not masked_lm:
                check_text_columns(options.text_columns, columns, ", ".join(group))


def parse(config_class: type, arguments: list[str]) -> tuple[BackboneArguments, DataArguments, Any]:
    """Options from `--config` and the command line. ValueError if a recipe is not found or has unknown options."""
    from .backbone import BackboneArguments

    classes = (DataArguments, BackboneArguments, config_class)
    recipe, words = read_config(arguments)
    if unknown := recipe.keys() - {field.name for each in classes for field in fields(each) if field.init}:
        raise ValueError(f"--config has unknown options: {', '.join(sorted(unknown))}.")
    data, backbone, args = parse_options(classes, __doc__, words, defaults=recipe, before="METHOD")
    return backbone, data, args


def check_options(backbone: BackboneArguments, args: Any) -> None:
    """Raise a ValueError for options that would be ignored or lose the result."""
    if backbone.merge_adapter and (backbone.peft is None or args.fsdp or args.push_to_hub):
        raise ValueError("--merge_adapter needs --peft lora, and excludes --fsdp and --push_to_hub.")
    if backbone.peft and not backbone.merge_adapter and backbone.student_layers:
        raise ValueError("The base model that --student_layers makes would be lost: pass --merge_adapter.")


def build_trainer(
    trainer_class: Any, backbone: BackboneArguments, data: DataArguments, args: Any
) -> trainers.NestedTrainer:
    """The trainer of a method, with its model and its data."""
    from transformers import AutoModel, AutoModelForMaskedLM

    from ..evaluation import GridEvaluator
    from .backbone import load_backbone

    masked_lm = isinstance(args, trainers.MultigranularMLMConfig)
    if isinstance(args, trainers.DistillationConfig) and backbone.student_layers is not None:
        teacher = args.teacher.name_or_path
        backbone = replace(backbone, model_name_or_path=backbone.model_name_or_path or teacher)
    model, tokenizer = load_backbone(backbone, AutoModelForMaskedLM if masked_lm else AutoModel)
    rows = masked_lm_rows(data, args, model, tokenizer) if masked_lm else embedding_rows(data, args)
    evaluator = GridEvaluator(data.eval_tasks, data=local_data()) if data.eval_tasks else None
    return trainer_class(model, args, tokenizer, *rows, evaluator=evaluator)


def resumed_checkpoint(args: Any) -> str | None:
    """The checkpoint that `--resume_from_checkpoint` names: a folder, or the last complete one for `true`, and for
    `auto` if there is one."""
    from ..trainers.core.checkpoints import complete_checkpoints, last_checkpoint

    named = args.resume_from_checkpoint
    if named is None or named.lower() == "false":
        return None
    if named.lower() == "auto":
        return next(reversed(complete_checkpoints(args.output_dir)), None)
    return last_checkpoint(args.output_dir) if named.lower() == "true" else named


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return
    method, *options = arguments
    check_method(method)
    if not {"-h", "--help"}.intersection(options):
        look_ahead(method, options)
    config_class, trainer_class = method_of(method)
    backbone, data, args = parse(config_class, options)
    check_options(backbone, args)
    # Of several processes, the first one writes.
    with only_writer(Path(args.output_dir)) if args.should_save else nullcontext():
        train(trainer_class, backbone, data, args)


def train(trainer_class: Any, backbone: BackboneArguments, data: DataArguments, args: Any) -> None:
    """Train, save, and evaluate where there is something to evaluate on."""
    checkpoint = resumed_checkpoint(args)
    if checkpoint is None:
        check_overwriting(args.output_dir, TRAINED_FILES, backbone.overwrite, backbone.model_name_or_path, INSTEAD)
    from transformers import set_seed

    from ..models.conversion import hub_id

    set_seed(args.seed)
    trainer = build_trainer(trainer_class, backbone, data, args)
    if (dataset := hub_id(data.dataset_name)) is not None:
        trainer.dataset_ids = (dataset,)
    trainer.data_files = data_files(data)
    if checkpoint is None and args.should_save:
        remove_files(args.output_dir, TRAINED_FILES)
    trained = trainer.train(resume_from_checkpoint=checkpoint)
    if not backbone.merge_adapter:
        trainer.save_model()
    if data.eval_files or data.eval_split is not None or data.eval_tasks:
        trainer.save_metrics("eval", trainer.evaluate())
    # Last, since merging removes the adapter from the model. The adapter itself stays in the last checkpoint.
    if backbone.merge_adapter and trainer.is_world_process_zero():
        with replacing_files(Path(args.output_dir)) as draft:
            trainer.backbone.merge_and_unload().save_pretrained(draft)
            trainer.processing_class.save_pretrained(draft)
            trainer.save_modules(str(draft), trainer.nested.state_dict())
    if args.process_index == 0:
        print(f"{args.output_dir}: {trained.global_step:,} steps in {trained.metrics['train_runtime']:.0f} s.")
        if backbone.merge_adapter or backbone.peft is None:
            next_step(model=args.output_dir)
