"""
Train an encoder with one of the objectives:

    python -m scripts.train multigranular-mlm --model_name_or_path DIR --train_files text.txt --output_dir runs/mlm
    python -m scripts.train contrastive --config scripts/recipes/msmarco_triplets.yaml --train_files triplets.jsonl ...

Objectives: multigranular-mlm, matryoshka-distillation, contrastive, simcse, espresso, 2dmse, starbucks, mipic, mic,
ibkd, ibkd-finetuning. Every option can stand in a YAML file; of several files the later one wins, and what is on the
command line wins over all. `--help` after the objective lists them. `--peft lora` trains an adapter.
`--student_layers 3` trains the first layers of a model, as an m3BERT; those of ibkd's teacher, if no model is named.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoTokenizer,
    HfArgumentParser,
    TrainerCallback,
    set_seed,
)

from modeling_m3bert import convert_to_m3bert
from scripts._command import run_command
from scripts.convert import for_m3bert
from trainers import (
    ContrastiveConfig,
    ContrastiveTrainer,
    EmbeddingConfig,
    EmbeddingTrainer,
    EspressoConfig,
    EspressoTrainer,
    IBKDConfig,
    IBKDFinetuningConfig,
    IBKDFinetuningTrainer,
    IBKDTrainer,
    Matryoshka2dConfig,
    Matryoshka2dTrainer,
    MatryoshkaDistillationConfig,
    MatryoshkaDistillationTrainer,
    MICConfig,
    MICTrainer,
    MIPICConfig,
    MIPICTrainer,
    MultigranularMLMConfig,
    MultigranularMLMTrainer,
    NestedTrainer,
    SimCSEConfig,
    SimCSETrainer,
    StarbucksConfig,
    StarbucksTrainer,
)
from trainers.collators import fields_of
from trainers.data import clean_pairs, load_files, mix_languages, tokenize_texts


@dataclass
class ScriptArguments:
    """What to train and on what."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or Hub id of a backbone. Without it, a new m3BERT is made."}
    )
    tokenizer_name: str | None = field(default=None, metadata={"help": "Tokenizer, if it is not the model's."})
    model_config: dict | str | None = field(
        default=None,
        metadata={
            "help": "Config values of a new m3BERT, or to change in the backbone's, as JSON or a YAML mapping: "
            '{"attention_dropout": 0.1}.'
        },
    )
    student_layers: int | None = field(
        default=None, metadata={"help": "Convert the model to m3BERT and train so many of its layers."}
    )
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    train_files: list[str] = field(
        default_factory=list, metadata={"help": "Training data: .txt, .jsonl, .csv or .parquet, also .gz."}
    )
    eval_files: list[str] | None = field(default=None, metadata={"help": "Evaluation data of the same kind."})
    text_column: str = field(default="text", metadata={"help": "Masked LM: column with the text."})
    language_exponent: float | None = field(
        default=None,
        metadata={"help": "Masked LM: each training file is a language, drawn with P(L)^this (the paper: 0.7)."},
    )
    streaming: bool = field(
        default=False, metadata={"help": "Pairs: read the training files while training. Needs max_steps."}
    )
    clean_pairs: bool = field(
        default=False, metadata={"help": "Pairs: drop identical ones, and those over max_pairs_per_query."}
    )
    max_pairs_per_query: int | None = field(
        default=None, metadata={"help": "Pairs: how many documents a query keeps when pairs are cleaned."}
    )
    peft: str | None = field(default=None, metadata={"help": "Train an adapter in place of the model: lora."})
    lora_r: int = field(default=16, metadata={"help": "Rank of the adapter."})
    lora_alpha: int = field(default=32, metadata={"help": "Scale of the adapter, times its rank."})
    lora_dropout: float = field(default=0.0, metadata={"help": "Dropout before the adapter."})
    lora_target_modules: list[str] | None = field(
        default=None, metadata={"help": "Modules to adapt, by name. Default: every linear layer."}
    )
    merge_adapter: bool = field(
        default=False, metadata={"help": "Save the model with the adapter merged into it, not the adapter alone."}
    )


def load_backbone(script: ScriptArguments, auto_class: Any) -> tuple[Any, Any]:
    """The model and its tokenizer."""
    tokenizer_name = script.tokenizer_name or script.model_name_or_path
    if tokenizer_name is None:
        raise ValueError("A new m3BERT needs --tokenizer_name.")
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_name, trust_remote_code=script.trust_remote_code)
    values = yaml.safe_load(script.model_config) if isinstance(script.model_config, str) else script.model_config
    if script.model_name_or_path is not None:
        known = AutoConfig.from_pretrained(script.model_name_or_path, trust_remote_code=script.trust_remote_code)
        unknown = [name for name in values or {} if not hasattr(known, name)]
        if unknown:
            raise ValueError(f"model_config names values that {known.model_type} does not have: {', '.join(unknown)}.")
        options = {"trust_remote_code": script.trust_remote_code, "use_safetensors": True, **(values or {})}
        if script.student_layers is None:
            model = auto_class.from_pretrained(script.model_name_or_path, **options)
        else:
            model = first_layers(script.model_name_or_path, script.student_layers, auto_class, options)
            tokenizer = for_m3bert(tokenizer, model)
        return with_adapter(model, script), tokenizer
    if script.student_layers is not None:
        raise ValueError("--student_layers cuts a model: pass --model_name_or_path.")
    if script.peft is not None:
        raise ValueError("An adapter needs a trained model to adapt: pass --model_name_or_path.")
    special = {name: getattr(tokenizer, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config = AutoConfig.for_model("m3bert", **{"vocab_size": len(tokenizer), **special, **(values or {})})
    return auto_class.from_config(config), tokenizer


def first_layers(name: str, layers: int, auto_class: Any, options: dict[str, Any]) -> Any:
    """
    The first layers of a model, as an m3BERT: one is read elastically, any other is converted before.

    Raises:
        ValueError: if the model has fewer layers, or cannot be converted.
    """
    config = AutoConfig.from_pretrained(name, trust_remote_code=options["trust_remote_code"])
    if not 0 < layers <= config.num_hidden_layers:
        raise ValueError(f"student_layers={layers} must be within 1..{config.num_hidden_layers}, what {name} has.")
    if config.model_type == "m3bert":
        return auto_class.from_pretrained(name, output_layer=layers, **options)
    if auto_class is not AutoModel:
        raise ValueError("Only an encoder without a head can be converted and cut.")
    with tempfile.TemporaryDirectory() as folder:
        convert_to_m3bert(auto_class.from_pretrained(name, **options)).save_pretrained(folder)
        model = auto_class.from_pretrained(folder, output_layer=layers)
    model.config.name_or_path = name  # where it comes from, not the folder that is gone
    return model


def with_adapter(model: Any, script: ScriptArguments) -> Any:
    """The model with the adapter to train, if one was asked for."""
    if script.peft is None:
        return model
    if script.peft != "lora":
        raise ValueError(f"peft={script.peft!r} is unknown; legal values: lora.")
    modules = script.lora_target_modules
    config = LoraConfig(
        r=script.lora_r,
        lora_alpha=script.lora_alpha,
        lora_dropout=script.lora_dropout,
        target_modules=modules if modules is not None else "all-linear",
    )
    return get_peft_model(model, config)


def masked_lm_data(files: list[str] | None, script: ScriptArguments, args: Any, tokenizer: Any) -> Dataset | None:
    if not files:
        return None
    groups = [[file] for file in files] if script.language_exponent is not None else [files]
    tokenized = [
        tokenize_texts(load_files(group), tokenizer, column=script.text_column, max_length=args.max_length)
        for group in groups
    ]
    return mix_languages(tokenized, exponent=script.language_exponent or 1.0, seed=args.seed)


def masked_lm_trainer(
    trainer_class: type[MultigranularMLMTrainer],
) -> Callable[[ScriptArguments, Any], NestedTrainer]:
    """How to build a trainer of this class."""

    def build(script: ScriptArguments, args: MultigranularMLMConfig) -> NestedTrainer:
        model, tokenizer = load_backbone(script, AutoModelForMaskedLM)
        train, evaluation = (
            masked_lm_data(files, script, args, tokenizer) for files in (script.train_files, script.eval_files)
        )
        return trainer_class(model, args, tokenizer, train, evaluation)

    return build


class PrintAtEnd(TrainerCallback):
    """Prints something that is complete when training is: a stream is cleaned while it is read."""

    def __init__(self, something: object) -> None:
        self.something = something

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            print(self.something)


def embedding_trainer(trainer_class: type[EmbeddingTrainer]) -> Callable[[ScriptArguments, Any], NestedTrainer]:
    """How to build a trainer of this class."""

    def build(script: ScriptArguments, args: EmbeddingConfig) -> NestedTrainer:
        if isinstance(args, IBKDConfig) and script.model_name_or_path is None and script.student_layers is not None:
            script = replace(script, model_name_or_path=args.teacher.name_or_path)
        model, tokenizer = load_backbone(script, AutoModel)
        train = load_files(script.train_files, streaming=script.streaming)
        callbacks: list[TrainerCallback] = []
        if script.clean_pairs:
            query, document, *_ = args.columns_of(train)
            train, report = clean_pairs(
                train, fields_of(query), fields_of(document), max_per_query=script.max_pairs_per_query
            )
            callbacks.append(PrintAtEnd(report))
        evaluation = load_files(script.eval_files) if script.eval_files else None
        return trainer_class(model, args, tokenizer, train, evaluation, callbacks=callbacks)

    return build


OBJECTIVES: dict[str, tuple[type, Callable[[ScriptArguments, Any], NestedTrainer]]] = {
    "multigranular-mlm": (MultigranularMLMConfig, masked_lm_trainer(MultigranularMLMTrainer)),
    "matryoshka-distillation": (MatryoshkaDistillationConfig, masked_lm_trainer(MatryoshkaDistillationTrainer)),
    "contrastive": (ContrastiveConfig, embedding_trainer(ContrastiveTrainer)),
    "simcse": (SimCSEConfig, embedding_trainer(SimCSETrainer)),
    "espresso": (EspressoConfig, embedding_trainer(EspressoTrainer)),
    "2dmse": (Matryoshka2dConfig, embedding_trainer(Matryoshka2dTrainer)),
    "starbucks": (StarbucksConfig, embedding_trainer(StarbucksTrainer)),
    "mipic": (MIPICConfig, embedding_trainer(MIPICTrainer)),
    "mic": (MICConfig, embedding_trainer(MICTrainer)),
    "ibkd": (IBKDConfig, embedding_trainer(IBKDTrainer)),
    "ibkd-finetuning": (IBKDFinetuningConfig, embedding_trainer(IBKDFinetuningTrainer)),
}


def parse(config_class: type, arguments: list[str]) -> tuple[ScriptArguments, Any]:
    """Options from YAML files (`--config FILE`, of several the later one wins), then from the command line."""
    recipe: dict[str, Any] = {}
    while "--config" in arguments:
        position = arguments.index("--config")
        recipe |= yaml.safe_load(Path(arguments[position + 1]).read_text(encoding="utf-8")) or {}
        arguments = arguments[:position] + arguments[position + 2 :]
    parser = HfArgumentParser((ScriptArguments, config_class))
    unknown = set(recipe) - {action.dest for action in parser._actions}
    if unknown:
        raise ValueError(f"The recipe names unknown options: {', '.join(sorted(unknown))}.")
    for action in parser._actions:
        if action.dest in recipe:
            action.required = False
    parser.set_defaults(**recipe)
    return parser.parse_args_into_dataclasses(arguments)


def check_options(script: ScriptArguments, args: Any) -> None:
    """
    Refuse options that would have no effect.

    Raises:
        ValueError: names the option and what it needs.
    """
    if not script.train_files:
        raise ValueError("Training needs --train_files.")
    if script.merge_adapter and script.peft is None:
        raise ValueError("--merge_adapter needs an adapter: pass --peft lora.")
    if script.max_pairs_per_query is not None and not script.clean_pairs:
        raise ValueError("--max_pairs_per_query needs --clean_pairs.")
    pairs = isinstance(args, EmbeddingConfig) and not (args.unsupervised or isinstance(args, IBKDConfig))
    if script.clean_pairs and not pairs:
        raise ValueError("--clean_pairs cleans pairs, and this objective trains on single texts.")
    if script.streaming and not isinstance(args, EmbeddingConfig):
        raise ValueError("--streaming is for the contrastive objectives.")


def save_merged(trainer: NestedTrainer) -> None:
    """Save the backbone as if it had been trained whole; the adapter itself is in the last checkpoint."""
    if trainer.is_world_process_zero():
        trainer.backbone.merge_and_unload().save_pretrained(trainer.args.output_dir)
        trainer.processing_class.save_pretrained(trainer.args.output_dir)
        trainer.save_modules(trainer.args.output_dir)
        trainer.record().save(trainer.args.output_dir)


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] not in OBJECTIVES:
        raise ValueError(f"Name an objective first: {', '.join(OBJECTIVES)}.")
    config_class, build = OBJECTIVES[arguments[0]]
    script, args = parse(config_class, arguments[1:])
    check_options(script, args)
    set_seed(args.seed)
    trainer = build(script, args)
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    if not script.merge_adapter:
        trainer.save_model()
    if script.eval_files:
        trainer.save_metrics("eval", trainer.evaluate())
    if script.merge_adapter:  # last, since it takes the adapter out of the model
        save_merged(trainer)


if __name__ == "__main__":
    run_command(main)
