"""
Convert a BERT-family encoder to an elastic m3BERT, whose hidden states are the same at every layer:

    m3bert convert intfloat/multilingual-e5-base runs/m3bert-from-me5

An embedding model keeps its pooling, projection, normalisation and prompts, as modules of sentence-transformers; with
--encoder_only it does not.
--student_layers makes a smaller model of some layers, such as every other one:

    m3bert convert intfloat/multilingual-e5-base runs/student --student_layers 1,4,7,10,12

With --fit_exits, shallow layers embed into the space of the last one (see `m3bert fit`):

    m3bert convert intfloat/multilingual-e5-base runs/elastic --fit_exits texts.txt queries.txt --depths 1-2 1-4 1-8
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..encode.device import ComputeArguments
from ..models.repository import MODEL_FILES, loading_from
from ..utils.durable import replacing_files
from ..utils.help_texts import option
from .command import next_step, parse_options, writing_to
from .fit import ExitArguments, fit_options, report, teacher_of


if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..modeling import M3BertModel


@dataclass
class ConversionArguments:
    """What to convert."""

    revision: str | None = option(None, "Branch, tag or commit of the source.")
    encoder_only: bool = option(False, "Leave out pooling, projection and prompts.")
    student_layers: str | None = option(
        None, "Make a student of the first N layers, or of chosen ones: 1,4,6, counted from 1."
    )
    fit_exits: list[str] = option([], "Files with texts to fit exits to, with the options of `m3bert fit`.")


def convert(
    source: str,
    output_dir: str,
    revision: str | None = None,
    *,
    encoder_only: bool = False,
    student_layers: str | None = None,
) -> M3BertModel:
    """Convert an encoder and save it with its code and tokenizer, in place of a model that the folder holds. Unless
    `encoder_only`, an embedding model stays one, with its pooling, projection, normalisation, prompts and
    quantizer."""
    from ..encode.quantizer import find_quantizer, write_quantizer
    from ..modeling.files_elastic import Source

    with loading_from(source):
        revision = Source.at(source, {"revision": revision}).revision
    model, tokenizer = converted(source, revision, encoder_only=encoder_only, student_layers=student_layers)
    embeds_alike = model.embedding_settings is not None and student_layers is None
    quantizer = find_quantizer(source, revision=revision) if embeds_alike else None
    with replacing_files(Path(output_dir), stale=MODEL_FILES) as draft:
        model.save_pretrained(draft)
        tokenizer.save_pretrained(draft)
        if quantizer is not None:
            write_quantizer(draft, quantizer)
    return model


def converted(
    source: str, revision: str | None = None, *, encoder_only: bool = False, student_layers: str | None = None
) -> tuple[M3BertModel, PreTrainedTokenizerBase]:
    from ..encode.states import longest_text
    from ..modeling.files_elastic import source_of
    from ..models.auto import load_model
    from ..models.conversion import convert_to_m3bert
    from ..models.settings import load_tokenizer

    with loading_from(source):
        encoder = load_model(source, revision=revision)
    depth = encoder.config.num_hidden_layers
    layers = None if student_layers is None else layers_from(student_layers, depth, source)
    model = convert_to_m3bert(encoder, encoder_only=encoder_only, layers=layers)
    settings = model.embedding_settings
    tokenizer = for_m3bert(load_tokenizer(source_of(encoder), settings), model)
    if settings is not None:
        longest = longest_text(model.config, tokenizer, settings.max_length)
        model.embedding_settings = replace(settings, max_length=longest)
    return model, tokenizer


def layers_from(text: str, depth: int, name: str) -> list[int]:
    """The layers that `--student_layers` chooses of a model of this depth and name: the first ones for a number,
    `"3"`, or a list, `"1,4,6"`."""
    words = str(text).replace(" ", "").split(",")  # a recipe may have a number
    layers = [int(word) if word.isdecimal() else 0 for word in words]
    if not {*layers} <= {*range(1, depth + 1)} or sorted(set(layers)) != layers:
        raise ValueError(
            f"--student_layers {text} must be within 1..{depth}, the depth of {name}: a number of first layers, or "
            "ascending layers such as 1,4,6."
        )
    return layers if len(layers) > 1 else [*range(1, layers[0] + 1)]


def for_m3bert(tokenizer: PreTrainedTokenizerBase, model: M3BertModel) -> PreTrainedTokenizerBase:
    """The tokenizer of a converted model: without token types, and limited to the model's positions."""
    tokenizer.model_input_names = ["input_ids", "attention_mask"]
    tokenizer.init_kwargs["model_input_names"] = tokenizer.model_input_names  # only what is in here is saved
    tokenizer.model_max_length = min(tokenizer.model_max_length, model.config.max_position_embeddings)
    return tokenizer


def main(arguments: list[str]) -> None:
    options, exits, compute, place = parse_options(
        (ConversionArguments, ExitArguments, ComputeArguments),
        __doc__,
        arguments,
        source={"help": "folder or Hub id of a BERT, RoBERTa, XLM-R, ... encoder"},
        output_dir={"help": "folder for the m3BERT"},
    )
    if options.fit_exits and options.encoder_only:
        raise ValueError("--fit_exits needs the pooling, which --encoder_only leaves out: pass one of them.")
    source, output_dir = place.source, place.output_dir
    with writing_to(output_dir, MODEL_FILES, exits.overwrite, source):
        if options.fit_exits:
            from ..data.text_files import TextFiles
            from ..exits.repository import fit_model, save_fitted, with_cache

            texts, output = TextFiles(options.fit_exits, exits.text_column), Path(output_dir)
            model, tokenizer = converted(source, options.revision, student_layers=options.student_layers)
            settings = with_cache(fit_options(exits), output)
            fitted = fit_model(model, tokenizer, texts, settings, compute, teacher_of(exits, compute))
            save_fitted(fitted, output, overwrite=exits.overwrite)
            print(report(fitted))
        else:
            named = {"encoder_only": options.encoder_only, "student_layers": options.student_layers}
            model = convert(source, output_dir, options.revision, **named)
    print(
        f"{output_dir}: {model.config.num_hidden_layers} layers, hidden size {model.config.hidden_size}, "
        f"{model.num_parameters():,} parameters. Load it with AutoModel.from_pretrained({output_dir!r}, "
        "trust_remote_code=True, output_layer=..., output_dim=...)."
    )
    next_step(model=output_dir)
