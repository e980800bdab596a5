"""
Train an encoder:

    m3bert train multigranular-mlm --model_name_or_path DIR --train_files text.txt --output_dir runs/mlm
    m3bert train multigranular-mlm --prepared_data runs/prepared --tokenizer_name DIR --output_dir runs/mlm
    m3bert train contrastive --config msmarco_triplets --train_files triplets.jsonl --model_name_or_path DIR ...
    m3bert train contrastive --train_files nli=nli.csv qa=qa.jsonl --model_name_or_path DIR ...
    m3bert train contrastive --dataset_name HUB_ID --dataset_config NAME --model_name_or_path DIR ...
    m3bert train path/to/mine.py:MyConfig --train_files pairs.jsonl --model_name_or_path DIR ...

Methods: {methods}. A config class in a file of your own is a method, too; its `objective_class` is what is trained.

`m3bert train METHOD --help` lists the options of a method, and `--help --all` describes all of them. `--config` reads
options from a YAML file or a recipe (`m3bert recipes` lists them). It can be repeated: later files override earlier
ones, the command line overrides all files, and mappings such as `sia: ...` are merged. `--peft lora` trains an
adapter. `--student_layers 3` trains the first three layers of a model as an m3BERT, `--student_layers 1,4,6` these
three; for ibkd, the default model is the teacher.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trainers
from trainers.core.durable import only_writer, remove_files, replacing_files

from .command import (
    MODEL_FILES,
    BriefHelpFormatter,
    HelpFormatter,
    check_overwriting,
    group_options,
    read_options,
    run_command,
)
from .recipes import read_recipes
from .training_data import DataArguments, cleaned, data_files, masked_lm_data, read_data


if TYPE_CHECKING:
    from .backbone import BackboneArguments

TRAINED_FILES = (*MODEL_FILES, "checkpoint-*", "adapter_*", "*_results.json", "trainer_state.json")
__doc__ = (__doc__ or "").format(methods=", ".join(trainers.METHODS))
BRIEF = """
    m3bert train METHOD --train_files FILE --model_name_or_path DIR --output_dir DIR

Options of a method, with the first sentence of their help. --help --all describes all of them.
"""
TRAINING = "Training (TrainingArguments of transformers)"
USUAL = (
    "bf16", "eval_strategy", "gradient_accumulation_steps", "hub_model_id", "load_best_model_at_end", "logging_steps",
    "lr_scheduler_type", "max_steps", "metric_for_best_model", "num_train_epochs", "output_dir", "push_to_hub",
    "report_to", "resume_from_checkpoint", "save_steps", "seed", "torch_compile", "warmup_steps", "weight_decay",
)  # fmt: skip


def method_of(name: str) -> tuple[type, type]:
    """
    The config and the trainer of a method.

    Args:
        name (`str`): One of `trainers.METHODS`, or `path/to/file.py:ConfigClass`.

    Raises:
        ValueError: if there is no such method, file or class.
    """
    if name in trainers.METHODS:
        prefix = trainers.METHODS[name]
        return getattr(trainers, f"{prefix}Config"), getattr(trainers, f"{prefix}Trainer")
    file, _, class_name = name.rpartition(":")
    if not file.endswith(".py"):
        raise ValueError(
            f"{name!r} is not a method; methods: {', '.join(trainers.METHODS)}, or path/to/mine.py:MyConfig."
        )
    config_class = load_class(Path(file), class_name)
    for base in config_class.__mro__:  # the nearest class of this library that has a trainer
        prefix = base.__name__.removesuffix("Config")
        if base is trainers.TextTrainingArguments:
            return config_class, trainers.EmbeddingTrainer
        if f"{prefix}Trainer" in trainers.__all__ and getattr(trainers, base.__name__, None) is base:
            return config_class, getattr(trainers, f"{prefix}Trainer")
    raise ValueError(f"{class_name} in {file} must derive from EmbeddingConfig or MultigranularMLMConfig.")


def load_class(file: Path, name: str) -> type:
    """
    A class that a Python file defines.

    Raises:
        ValueError: if there is no such file, or it has no such class.
    """
    spec = importlib.util.spec_from_file_location(f"m3bert_user_{file.stem}", file)
    if not file.is_file() or spec is None or spec.loader is None:
        raise ValueError(f"{file} does not exist.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look up their module there
    spec.loader.exec_module(module)
    found = vars(module).get(name)
    if not isinstance(found, type):
        classes = [
            key for key, value in vars(module).items() if isinstance(value, type) and value.__module__ == spec.name
        ]
        raise ValueError(f"{file} has no class {name!r}; its classes: {', '.join(classes) or 'none'}.")
    return found


def parse(config_class: type, arguments: list[str]) -> tuple[BackboneArguments, DataArguments, Any]:
    """
    Options from `--config` and the command line; see [`with_command_line`].

    Raises:
        ValueError: if a recipe is not found or has unknown options.
    """
    from transformers import HfArgumentParser

    from .backbone import BackboneArguments

    configs = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    configs.add_argument("--config", action="append", default=[])
    known, arguments = configs.parse_known_args(arguments)
    recipe, arguments = with_command_line(read_recipes(known.config), arguments)
    brief = "--all" not in arguments
    arguments = [argument for argument in arguments if argument != "--all"]
    parser = HfArgumentParser(
        (BackboneArguments, DataArguments, config_class),
        usage="%(prog)s METHOD [options]",
        description=BRIEF if brief else __doc__,
        formatter_class=BriefHelpFormatter if brief else HelpFormatter,
    )
    group_options(parser, option_groups(config_class))
    if brief:
        hide_rest(parser)
    unknown = set(recipe) - {action.dest for action in parser._actions}
    if unknown:
        raise ValueError(f"--config has unknown options: {', '.join(sorted(unknown))}.")
    for action in parser._actions:
        if action.dest in recipe:
            action.required = False
    parser.set_defaults(**recipe)
    return read_options(parser, arguments)


def option_groups(config_class: type) -> dict[str, list[str]]:
    """Title -> names of options: those of the method and of its bases, of the model and the data, and of transformers'
    training arguments."""
    from transformers import TrainingArguments

    from trainers.core.help_texts import groups_of

    from .backbone import BackboneArguments

    groups: dict[str, list[str]] = {}
    bases = [base for base in config_class.__mro__ if base not in TrainingArguments.__mro__]
    for base in bases:
        grouped = {name for names in groups.values() for name in names}
        for title, names in groups_of(base).items():
            groups[title] = [name for name in names if name not in grouped]
    groups["The model"] = [one.name for one in fields(BackboneArguments)]
    groups["The data"] = [one.name for one in fields(DataArguments)]
    groups[TRAINING] = sorted(
        one.name for one in fields(TrainingArguments) if one.name not in sum(groups.values(), [])
    )
    return groups


def hide_rest(parser: argparse.ArgumentParser) -> None:
    """Leave negations of switches, and all but the usual ones of transformers' arguments, out of the help."""
    for group in parser._action_groups:
        seen: set[str] = set()
        for action in group._group_actions:
            if action.dest in seen or (group.title == TRAINING and action.dest not in USUAL):
                action.help = argparse.SUPPRESS
            seen.add(action.dest)


def with_command_line(recipe: dict[str, Any], arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    """A recipe whose mappings are merged with those of the command line, and the rest of the command line."""
    from trainers.core.composition import mapping_of, merged

    mappings = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    for name, value in recipe.items():
        if isinstance(value, Mapping):
            mappings.add_argument(f"--{name}")
    found, rest = mappings.parse_known_args(arguments)
    return merged(recipe, {name: mapping_of(f"--{name}", text) for name, text in vars(found).items()}), rest


def check_options(backbone: BackboneArguments, data: DataArguments, args: Any) -> None:
    """
    Check that every option has an effect.

    Raises:
        ValueError: names the option and what it needs.
    """
    embeds = isinstance(args, trainers.TextTrainingArguments)
    sources = [name for name in ("train_files", "dataset_name", "prepared_data") if getattr(data, name)]
    if len(sources) != 1:
        raise ValueError(
            "Training needs one of --train_files, --dataset_name and, for masked LMs, --prepared_data; "
            f"got {', '.join(f'--{name}' for name in sources) or 'none'}."
        )
    single = not embeds or args.views > 1 or isinstance(args, trainers.DistillationConfig)
    adapter_alone = backbone.peft is not None and not backbone.merge_adapter
    without_effect = {
        "--prepared_data is for masked LMs only": embeds and data.prepared_data,
        "--eval_files and --eval_split exclude each other": data.eval_files and data.eval_split,
        "--dataset_config and --eval_split need --dataset_name": (data.dataset_config or data.eval_split)
        and data.dataset_name is None,
        "--merge_adapter needs --peft lora": backbone.merge_adapter and backbone.peft is None,
        "--merge_adapter excludes --fsdp and --push_to_hub: save the adapter, and merge or push it after training": (
            backbone.merge_adapter and (args.fsdp or args.push_to_hub)
        ),
        "--student_layers and --transfer_vocabulary make a new base model, which an adapter needs: --merge_adapter": (
            adapter_alone and (backbone.student_layers or backbone.transfer_vocabulary)
        ),
        "--max_pairs_per_query needs --clean_pairs": data.max_pairs_per_query is not None and not data.clean_pairs,
        "--clean_pairs is for pairs": data.clean_pairs and single,
        "--language_exponent is for files of masked LMs that are not streamed": data.language_exponent is not None
        and (embeds or data.streaming or data.dataset_name is not None),
    }
    for message, found in without_effect.items():
        if found:
            raise ValueError(f"{message}.")


def masked_lm_trainer(trainer_class: Any, backbone: BackboneArguments, data: DataArguments, args: Any) -> Any:
    """The trainer of a masked language model, with its data."""
    from transformers import AutoModelForMaskedLM

    from trainers.core.states import unwrap_encoder
    from trainers.data.preparing import load_prepared, read_prepared

    from .backbone import load_backbone

    model, tokenizer = load_backbone(backbone, AutoModelForMaskedLM)
    if data.prepared_data is not None:
        args.max_length = read_prepared(data.prepared_data)["settings"]["max_length"]
        config = unwrap_encoder(model).config
        train = load_prepared(data.prepared_data, tokenizer, config, exponent=data.language_exponent, seed=args.seed)
    else:
        train = masked_lm_data(data, args, tokenizer, evaluation=False)
    evaluation = masked_lm_data(data, args, tokenizer, evaluation=True)
    return trainer_class(model, args, tokenizer, train, evaluation, evaluator=evaluator_of(data))


def embedding_trainer(trainer_class: Any, backbone: BackboneArguments, data: DataArguments, args: Any) -> Any:
    """The trainer of an embedding model, with its data."""
    from transformers import AutoModel

    from .backbone import load_backbone

    teaches = isinstance(args, trainers.DistillationConfig)
    if teaches and backbone.model_name_or_path is None and backbone.student_layers is not None:
        backbone = replace(backbone, model_name_or_path=args.teacher.name_or_path)
    model, tokenizer = load_backbone(backbone, AutoModel)
    train = read_data(data)
    if data.clean_pairs and isinstance(train, dict):
        train = {name: cleaned(each, data, args, f"{name}: ") for name, each in train.items()}
    elif data.clean_pairs:
        args.text_columns = args.columns_of(train)
        train = cleaned(train, data, args)
    evaluation = read_data(data, evaluation=True)
    return trainer_class(model, args, tokenizer, train, evaluation, evaluator=evaluator_of(data))


def evaluator_of(data: DataArguments) -> Any:
    """What scores `eval_tasks`; `None` if there are none."""
    from trainers.evaluation import GridEvaluator

    from .sources import local_data

    return GridEvaluator(data.eval_tasks, data=local_data()) if data.eval_tasks else None


def resumed_checkpoint(args: Any) -> str | None:
    """
    The checkpoint that `--resume_from_checkpoint` names: a folder, or the last complete one for `true`, and for `auto`
    if there is one.

    Raises:
        ValueError: if it is `true`, and there is no complete checkpoint.
    """
    from trainers.core.checkpoints import complete_checkpoints, last_checkpoint

    named = args.resume_from_checkpoint
    if named is None or named.lower() == "false":
        return None
    if named.lower() == "auto":
        return next(reversed(complete_checkpoints(args.output_dir)), None)
    return last_checkpoint(args.output_dir) if named.lower() == "true" else named


def save_merged(trainer: Any) -> None:
    """Save the backbone with the adapter merged into it. The adapter itself stays in the last checkpoint."""
    if trainer.is_world_process_zero():
        with replacing_files(Path(trainer.args.output_dir)) as draft:
            trainer.backbone.merge_and_unload().save_pretrained(draft)
            trainer.processing_class.save_pretrained(draft)
            trainer.save_modules(str(draft), trainer.nested.state_dict())


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        print(__doc__.strip())
        return
    config_class, trainer_class = method_of(arguments[0])
    backbone, data, args = parse(config_class, arguments[1:])
    check_options(backbone, data, args)
    # Of several processes, the first one writes.
    with only_writer(Path(args.output_dir)) if args.should_save else nullcontext():
        train(trainer_class, backbone, data, args)


def train(trainer_class: Any, backbone: BackboneArguments, data: DataArguments, args: Any) -> None:
    """Train, save, and evaluate where there is something to evaluate on."""
    checkpoint = resumed_checkpoint(args)
    if checkpoint is None:
        instead = "or go on with it: --resume_from_checkpoint auto"
        check_overwriting(args.output_dir, TRAINED_FILES, backbone.overwrite, backbone.model_name_or_path, instead)
    from transformers import set_seed

    from modeling_m3bert.conversion_m3bert import hub_id

    set_seed(args.seed)
    masked_lm = isinstance(args, trainers.MultigranularMLMConfig)
    build: Callable[..., Any] = masked_lm_trainer if masked_lm else embedding_trainer
    trainer = build(trainer_class, backbone, data, args)
    if (dataset := hub_id(data.dataset_name)) is not None:
        trainer.dataset_ids = (dataset,)
    trainer.data_files = data_files(data)
    if checkpoint is None and args.should_save:
        remove_files(args.output_dir, TRAINED_FILES)
    trainer.train(resume_from_checkpoint=checkpoint)
    if not backbone.merge_adapter:
        trainer.save_model()
    if data.eval_files or data.eval_split is not None or data.eval_tasks:
        trainer.save_metrics("eval", trainer.evaluate())
    if backbone.merge_adapter:  # last, since merging removes the adapter from the model
        save_merged(trainer)


if __name__ == "__main__":
    run_command(main)
