"""From the name of an encoder to the elastic repository of its fit."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from transformers import AutoModel, PreTrainedModel, PreTrainedTokenizerBase

from ..data.teacher import TeacherEmbeddings
from ..data.text_files import TextFiles
from ..encode.device import ComputeArguments, place
from ..modeling.files_elastic import Source
from ..models.repository import MODEL_FILES, loading_from, write_repository
from ..models.settings import EmbeddingSettings, load_tokenizer, safetensors_only
from ..utils.durable import only_writer, replacing_files
from .fit import fit_exits
from .layer_lists import default_depths
from .plan import FitOptions, Sources, by_name
from .record import ExitFit


Embed = Callable[[Iterable[str]], TeacherEmbeddings]


class Fitted(NamedTuple):
    """A fitted model, its tokenizer, and the record of the fit."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    record: ExitFit


def fit(
    source: str | Path,
    output: str | Path,
    texts: Iterable[str] | Sources | TextFiles,
    options: FitOptions | None = None,
    *,
    compute: ComputeArguments | None = None,
    embed: Embed | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    overwrite: bool = False,
) -> Fitted:
    """
    Make an encoder elastic, as `m3bert fit` does: load it, fit its depths ([`fit_exits`]), and write its repository.
    Without `trust_remote_code`, this is the source. An interrupted fit continues when it is called again.

    Args:
        source (`str`): Folder or Hub id of an encoder.
        output (`str`): Folder for the elastic encoder.
        texts (`Iterable[str]`, `Mapping[str, Iterable[str]]` or [`TextFiles`]): Unlabelled texts, several sources of
            texts by name, or files.
        options ([`FitOptions`], *optional*): What is fitted. Without depths, layers are chosen for about a sixth, a
            third, a half and two thirds of the layers.
        compute ([`ComputeArguments`], *optional*): Where and how the encoder computes. The weights keep their type.
        embed (`Callable[[Iterable[str]], TeacherEmbeddings]`, *optional*): Embeds the texts by another encoder, which
            the exits then predict: `functools.partial(Teacher(name).embed, cache_dir=folder)`.
        revision (`str`, *optional*): Branch, tag or commit of the source.
        trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the source.
        overwrite (`bool`, *optional*, defaults to `False`): Replace a model that `output` holds.

    Returns:
        [`Fitted`]: The model, its tokenizer and the record.

    Raises:
        ValueError: as [`fit_exits`]; if `output` is the source, holds a model, or another process writes to it; or if
            the source cannot be loaded.
        OSError: if the source is not there, or `output` cannot be written.
    """
    folder = Path(output)
    with only_writer(folder):
        if folder.resolve() == Path(source).resolve():
            raise ValueError(f"output={str(output)!r} is the source: name another folder.")
        if not overwrite and (folder / "config.json").is_file():
            raise ValueError(f"output={str(output)!r} holds a model: pass overwrite=True, or name another folder.")
        model, tokenizer = load_source(str(source), revision, trust_remote_code)
        fitted = fit_model(model, tokenizer, texts, with_cache(options or FitOptions(), folder), compute, embed)
        save_fitted(fitted, folder, overwrite=overwrite)
    return fitted


def load_source(
    source: str, revision: str | None, trust_remote_code: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """An encoder and its tokenizer. ValueError if exits cannot be fitted to it."""
    with loading_from(source):
        origin = Source.at(source, {"revision": revision, "trust_remote_code": trust_remote_code}).with_settings()
        # Refuses a pooling or modules that exits and paths cannot follow.
        settings = EmbeddingSettings.of_source(origin, late=True)
        model = AutoModel.from_pretrained(source, **safetensors_only(source), **origin.options)
        model.loaded_from = origin
        return model, load_tokenizer(origin, settings)


def with_cache(options: FitOptions, output: Path) -> FitOptions:
    """The options with a folder for finished parts; by default one that is removed when the model is saved."""
    return options if options.cache_dir is not None else replace(options, cache_dir=_unfinished(output))


def _unfinished(output: Path) -> Path:
    return Path(f"{output}.fit")


def fit_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Iterable[str] | Sources | TextFiles,
    options: FitOptions,
    compute: ComputeArguments | None = None,
    embed: Embed | None = None,
) -> Fitted:
    """Fit the depths of a model in place; arguments as in [`fit`]."""
    compute, dtype = compute or ComputeArguments(), model.dtype
    if options.compute_dtype is None:
        options = replace(options, compute_dtype=compute.autocast_dtype)
    if options.layers is None and not options.paths and not options.depths:
        settings = EmbeddingSettings.of(model.base_model, late=True) or EmbeddingSettings()
        fewest = 2 if settings.is_late else 1  # a path has two layers
        depths = [depth for depth in default_depths(model.config.num_hidden_layers) if depth >= fewest]
        options = replace(options, layers=[], depths=depths)
    sources = texts.sources(tokenizer) if isinstance(texts, TextFiles) else texts
    if embed is not None:
        sources = {name: [*lines] for name, lines in by_name(sources).items()}
        options = replace(options, teacher=embed(text for lines in sources.values() for text in lines if text.strip()))
    record = fit_exits(place(model, compute), tokenizer, sources, options)
    if model.dtype != dtype:
        model.to(dtype)
    return Fitted(model, tokenizer, record)


def save_fitted(fitted: Fitted, output: Path, *, overwrite: bool = False) -> None:
    """Write a fitted m3BERT, or the elastic repository of any other encoder; with a map to the space of a teacher, if
    there is one. The finished parts of the fit are removed."""
    model, tokenizer, record = fitted
    with replacing_files(output, stale=MODEL_FILES if overwrite else ()) as draft:
        if model.config.model_type == "m3bert":
            model.save_pretrained(draft)
            tokenizer.save_pretrained(draft)
        else:
            write_repository(model, draft)
        if record.to_target is not None:
            np.save(draft / "elastic" / "to_target.npy", record.to_target.numpy())
    shutil.rmtree(_unfinished(output), ignore_errors=True)
