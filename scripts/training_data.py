"""Training data: the options, and reading the data that they name."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data.formats import files_by_name
from ..utils.columns import check_columns, fields_of, text_columns_of
from ..utils.help_texts import option


if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@dataclass
class DataArguments:
    """The training data."""

    train_files: list[str] = option(
        [],
        "Training data: .txt, .jsonl, .csv, .tsv or .parquet files, also gzipped. NAME=FILE for several data sets: "
        "files with the same name are one, and each batch is of one data set.",
    )
    eval_files: list[str] | None = option(None, "Evaluation data, in the same formats.")
    dataset_name: str | None = option(None, "In place of --train_files: Hub id, or a folder with a file per split.")
    dataset_config: str | None = option(None, "Configuration (subset) of --dataset_name. Default: its default one.")
    split: str = option("train", "Split of --dataset_name to train on.")
    eval_split: str | None = option(None, "Split of --dataset_name to evaluate on, in place of --eval_files.")
    eval_tasks: list[str] = option(
        [],
        "Tasks to score the trained granularities on at each evaluation, beside --eval_files or in their place; see "
        "`m3bert evaluate --list_tasks`. --metric_for_best_model stsb_4x64_spearman selects by one.",
    )
    prepared_data: str | None = option(None, "For masked LMs, in place of --train_files: folder of `m3bert prepare`.")
    text_column: str = option("text", "For masked LMs: the column with the text.")
    language_exponent: float | None = option(
        None,
        "For masked LMs: treat each training file as one language, and sample language L with a probability "
        "proportional to its share P(L) raised to this power (the paper: 0.7). With --prepared_data: in place of the "
        "power that it was prepared with.",
    )
    streaming: bool = option(False, "Read the training data during training, not before it. Needs --max_steps.")
    clean_pairs: bool = option(False, "For pairs: drop duplicates, and pairs beyond --max_pairs_per_query.")
    max_pairs_per_query: int | None = option(None, "For pairs: documents to keep per query. Drops duplicates, too.")


def read_data(data: DataArguments, *, evaluation: bool = False) -> Any:
    """The rows to train on, or to evaluate on: a `dict` of several data sets, and `None` if there are none."""
    from ..data.files import load_files
    from ..data.hub_data import load_hub

    streaming = data.streaming and not evaluation
    files, split = (data.eval_files, data.eval_split) if evaluation else (data.train_files, data.split)
    if named := files_by_name(files or ()):
        return {name: load_files(each, streaming=streaming) for name, each in named.items()}
    if files:
        return load_files(files, streaming=streaming)
    if data.dataset_name is None or split is None:
        return None
    return load_hub(data.dataset_name, data.dataset_config, split=split, streaming=streaming)


def check_text_columns(named: list[str] | None, columns: list[str], source: str) -> None:
    """Check that there are the columns that `--text_columns` names, or else that their names say what they are."""
    read = named or text_columns_of(columns, source, "name them with --text_columns, anchors first")
    check_columns(columns, [field for column in read for field in fields_of(column)], source)


def embedding_rows(data: DataArguments, args: Any) -> tuple[Any, Any]:
    """The rows to train an embedding model on, and those to evaluate on."""
    train = read_data(data)
    if data.dataset_name is not None:
        check_text_columns(args.text_columns, args.all_columns(train), data.dataset_name)
    if data.clean_pairs or data.max_pairs_per_query:
        if isinstance(train, dict):
            train = {name: cleaned(each, data, args, f"{name}: ") for name, each in train.items()}
        else:
            args.text_columns = args.columns_of(train)
            train = cleaned(train, data, args)
    return train, read_data(data, evaluation=True)


def masked_lm_rows(
    data: DataArguments, args: Any, model: PreTrainedModel, tokenizer: Any
) -> tuple[Dataset, Dataset | None]:
    """The texts to train a masked language model on, and those to evaluate on."""
    from ..data.preparing import load_prepared, read_prepared
    from ..encode.states import unwrap_encoder

    if data.prepared_data is None:
        train = masked_lm_data(data, args, tokenizer, evaluation=False)
    else:
        args.max_length = read_prepared(data.prepared_data)["settings"]["max_length"]
        config = unwrap_encoder(model).config
        train = load_prepared(data.prepared_data, tokenizer, config, exponent=data.language_exponent, seed=args.seed)
    return train, masked_lm_data(data, args, tokenizer, evaluation=True)


def masked_lm_data(
    data: DataArguments, args: Any, tokenizer: PreTrainedTokenizerBase, *, evaluation: bool
) -> Dataset | None:
    """The tokenised texts to train or evaluate on, mixed by language with `language_exponent`."""
    from ..data.files import load_files, tokenize_texts
    from ..data.languages import mix_languages

    files = data.eval_files if evaluation else data.train_files
    if data.language_exponent is not None and data.prepared_data is None and files:
        parts = [load_files([file]) for file in files]
    else:
        parts = [read_data(data, evaluation=evaluation)]
        if isinstance(parts[0], dict):
            raise ValueError(f"{' '.join(files or ())}: NAME=FILE is for pairs; masked LMs take files without a name.")
    tokenized = [
        tokenize_texts(part, tokenizer, column=data.text_column, max_length=args.max_length)
        for part in parts
        if part is not None
    ]
    if not tokenized:
        return None
    return mix_languages(tokenized, exponent=data.language_exponent or 1.0, seed=args.seed)


def cleaned(dataset: Dataset, data: DataArguments, args: Any, label: str = "") -> Any:
    """The pairs of a dataset without duplicates and pairs over the maximum. Says what was dropped."""
    from ..data.pairs import clean_pairs

    query, document, *_ = args.columns_of(dataset)
    pairs, report = clean_pairs(dataset, fields_of(query), fields_of(document), max_per_query=data.max_pairs_per_query)
    if args.process_index == 0:
        left = report["rows"] - report["duplicates"] - report["over"]
        print(
            f"{label}Kept {left} of {report['rows']} pairs; dropped {report['duplicates']} duplicates and "
            f"{report['over']} over the maximum number of documents per query."
        )
    return pairs


def data_files(data: DataArguments) -> tuple[str, ...]:
    """The files or the local folder that the training data is read from, for the record of the run."""
    from ..data.preparing import read_prepared

    if data.prepared_data is not None:
        return tuple(name for name, _ in read_prepared(data.prepared_data)["settings"]["files"])
    if data.dataset_name is not None and Path(data.dataset_name).is_dir():
        return (data.dataset_name,)
    return tuple(chain(*files_by_name(data.train_files).values())) or tuple(data.train_files)
