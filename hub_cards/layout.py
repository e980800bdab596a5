"""Lay out a checkpoint as a repository: choose its files, convert them if asked to, and write the card."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, get_token
from transformers import TorchAoConfig

from ..encode.granularity import Granularity
from ..encode.quantizer import QUANTIZER_FOLDER
from ..evaluation.results import GridResults
from ..modeling.files_elastic import PARTS_FOLDER
from ..models.settings import MODULES_FILE, EmbeddingSettings
from ..utils.durable import replace_text
from ..utils.extras import require_extra
from .adapter import Adapter, AdapterCard
from .card import render_card
from .card_source import CardSource
from .checkpoint import Checkpoint
from .export_files import write_json
from .exports import TABLE, choose_sizes, export_plain
from .figures import draw_all
from .files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CARD, RESULTS, bytes_by_file, files_of
from .metadata import Statements
from .native_export import export_native
from .onnx_graphs import GraphReport, write_graphs
from .scores import leaderboard_entries, results_that_hold, write_eval_results
from .upload import Publication


FIGURES = "figures"
FORMATS = ("elastic", "native", "static", "router")
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
BINARY_FILES = (".safetensors", ".onnx", ".png", ".model")


@dataclass(frozen=True)
class Options:
    """
    How to publish a checkpoint.

    Args:
        granularity ([`Granularity`], *optional*): Publish only this granularity, as a small, complete model.
        quantize (`bool`, *optional*, defaults to `False`): Store the linear layers in 8 bits. Needs the
            package torchao.
        onnx (`tuple[Granularity, ...]`, *optional*): Also export the full size and these granularities as ONNX
            graphs; see [`write_graphs`]. Needs the extra `onnx`.
        statements ([`Statements`], *optional*): What a person adds to the card.
        format (`str`, *optional*, defaults to `"elastic"`): `"elastic"`, the repository as it is, or what needs no
            remote code: `"native"`, a plain encoder of transformers ([`export_native`]), `"static"`, the table
            ([`export_static`]), or `"router"`, queries by few layers or the table and documents by all
            ([`export_router`]).
        onnx_int8 (`bool`, *optional*, defaults to `False`): Export each granularity of `onnx` also in 8 bits.
        onnx_fp16 (`bool`, *optional*, defaults to `False`): Export each ONNX graph also in float16.
        data (`Path`, *optional*): Folder of local data sets. If STS-B is there, ONNX graphs are scored on it.
        own_code (`bool`, *optional*, defaults to `False`): Publish Python files that differ from this package's.
        sizes (`tuple[str, ...]`, *optional*): Sizes to publish as branches beside the elastic repository; see
            [`choose_sizes`].
    """

    granularity: Granularity | None = None
    quantize: bool = False
    onnx: tuple[Granularity, ...] = ()
    statements: Statements = field(default_factory=Statements)
    format: str = "elastic"
    onnx_int8: bool = False
    onnx_fp16: bool = False
    data: Path | None = None
    own_code: bool = False
    sizes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r} is unknown; legal values: {', '.join(FORMATS)}.")
        if (self.quantize and self.format != "elastic") or (self.onnx and self.standalone):
            raise ValueError(f"quantize and onnx do not apply to format={self.format!r}.")
        if self.sizes and (self.granularity is not None or self.format != "elastic"):
            raise ValueError("sizes are those of a whole elastic repository: omit granularity and format.")
        if self.format == "static" and self.granularity is not None and self.granularity.layer:
            raise ValueError(f"format='static' publishes layer 0, not {self.granularity}.")

    @property
    def standalone(self) -> bool:
        """Whether a model of sentence-transformers is published that has no encoder at its root."""
        return self.format in ("static", "router")


def prepare(
    source: Checkpoint | Adapter,
    folder: Path,
    repo_id: str,
    options: Options | None = None,
    results: GridResults | None = None,
    previous: str | None = None,
    token: str | None = None,
) -> Publication:
    """
    Lay out the files to upload: weights in safetensors, the code that loads them, tokenizer, modules of
    sentence-transformers, ONNX graphs, results, figures, and the card. The files of each size of `options` are in a
    folder beside `folder`, which has the size's name.

    Args:
        source ([`Checkpoint`] or [`Adapter`]): What to publish. An adapter is published as it is.
        folder (`Path`): An empty folder for the files.
        repo_id (`str`): The repository, `user/model`.
        options ([`Options`], *optional*): How to publish it.
        results ([`GridResults`], *optional*): An evaluation of exactly these weights. Not for an adapter, a static
            table or a router.
        previous (`str`, *optional*): The existing card, whose edits are kept. Default: the card in the checkpoint's
            folder.
        token (`str`, *optional*): Token of the Hub. No file may hold it, nor the token of the environment.

    Returns:
        [`Publication`]

    Raises:
        ValueError: if the results belong to other weights or settings, the options do not apply, a file is a link
            out of the folder or holds a token, a Python file differs from this package's, or an extra is missing.
    """
    options, branches = options or Options(), {}
    if isinstance(source, Adapter):
        if results is not None or replace(options, statements=Statements(), data=None) != Options():
            raise ValueError(
                f"{source.folder} holds only an adapter, which is published as it is: for results, granularity, "
                "format, sizes, quantize and onnx, merge it (m3bert train --merge_adapter, or merge_and_unload)."
            )
        _lay_out_adapter(AdapterCard(repo_id, source, options.statements), folder, previous)
    elif options.standalone:
        if results is not None:
            raise ValueError(f"The results are scores of the encoder: omit them for format={options.format!r}.")
        _lay_out_export(source, folder, options, options.format, options.granularity, f'"{repo_id}"', previous)
    else:
        sizes = choose_sizes(source, options.sizes) if options.sizes else {}
        _lay_out_encoder(source, folder, repo_id, options, results, previous, [*sizes])
        for name, size in sizes.items():
            branches[name] = folder.with_name(name)
            place = f'"{repo_id}", revision="{name}"'
            _lay_out_export(source, branches[name], options, "static" if name == TABLE else "native", size, place)
    for written in (folder, *branches.values()):
        _refuse_tokens(written, token)
    left_out = sorted(bytes_by_file(source.folder).keys() - bytes_by_file(folder).keys())
    return Publication(folder, repo_id, left_out, branches)


def _lay_out_adapter(card: AdapterCard, folder: Path, previous: str | None) -> None:
    """Lay out an adapter as it is, with the config that users need."""
    adapter = card.adapter
    for name in files_of(adapter.folder, more=(ADAPTER_CONFIG, ADAPTER_WEIGHTS)):
        _add(adapter.folder / name, folder / name)
    write_json(folder / ADAPTER_CONFIG, adapter.published_config())
    replace_text(folder / CARD, str(render_card(card, previous)))


def _lay_out_encoder(
    checkpoint: Checkpoint,
    folder: Path,
    repo_id: str,
    options: Options,
    results: GridResults | None,
    previous: str | None,
    branches: Sequence[str],
) -> None:
    """Lay out a model with an encoder at its root, with its card."""
    size, is_native = options.granularity or checkpoint.full, options.format == "native"
    is_part = options.granularity is not None or is_native
    loses_quantizer = is_part and checkpoint.quantizer_misfit(size) is not None
    if options.onnx and (options.quantize or checkpoint.quantized):
        raise ValueError("onnx needs weights in full precision: publish without quantize.")
    if results is not None:
        if options.quantize:
            raise ValueError("The results belong to the weights before quantize: evaluate the quantised ones instead.")
        results = results_that_hold(
            checkpoint, results, size, repo_id, native=is_native, quantizer=not loses_quantizer
        )
    if is_native:
        export_native(checkpoint, folder, options.granularity)
    else:
        left_out = (*checkpoint.quantizer_code(), QUANTIZER_FOLDER) if loses_quantizer else ()
        if is_part or options.quantize:
            _rebuild(checkpoint, folder, options)
            left_out = (*left_out, "model", PARTS_FOLDER)
        for name in checkpoint.files():
            if not name.startswith(left_out):
                _add(checkpoint.folder / name, folder / name)
    _complete(folder, results)
    if not options.own_code and (other := Checkpoint(folder).other_code()):
        raise ValueError(
            f"{', '.join(other)} in {checkpoint.folder} differs from the code of this package: remove it to publish "
            "the package's, or read it and pass own_code (--own_code)."
        )
    if previous is None:
        previous = card_in(checkpoint.folder)
    cut = f"{size} of {checkpoint.full}" if is_part else None
    write_card_and_results(Checkpoint(folder), repo_id, options, results, previous, cut, branches)


def _rebuild(checkpoint: Checkpoint, folder: Path, options: Options) -> None:
    """Save a checkpoint reduced to a granularity or in 8 bits. An elastic model writes its own code and exits."""
    size = options.granularity
    if checkpoint.quantized or (size is not None and checkpoint.projection is not None):
        raise ValueError(
            f"{checkpoint.folder} is already quantised, or has a projection: publish it without granularity and "
            "quantize."
        )
    loading: dict[str, Any] = {} if size is None else {"output_layer": size.layer, "output_dim": size.dim}
    if options.quantize:
        torchao = require_extra("torchao.quantization", None, "Quantization to 8 bits")
        loading["quantization_config"] = TorchAoConfig(torchao.Int8WeightOnlyConfig())
    checkpoint.load(**loading).save_pretrained(folder)


def _complete(folder: Path, results: GridResults | None) -> None:
    """Add code and modules of sentence-transformers where they are missing."""
    staged = Checkpoint(folder)
    for name, file in staged.code().items():
        _add(file, folder / name)
    if staged.head == "AutoModel" and not (folder / MODULES_FILE).is_file():
        settings = results.settings if results is not None else {}
        EmbeddingSettings(
            pooling=settings.get("pooling", "mean"), prompts=settings.get("prompts", {}), max_length=staged.max_length
        ).write(folder, width=staged.full.dim)


def _add(source: Path, target: Path) -> None:
    """Put a file into another folder, unless it is there: weights as a hard link where possible, others as a copy."""
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".safetensors":
        try:
            target.hardlink_to(source.resolve())
            return
        except OSError:  # another disk
            pass
    shutil.copyfile(source, target)


def _lay_out_export(
    checkpoint: Checkpoint,
    folder: Path,
    options: Options,
    format: str,
    size: Granularity | None,
    place: str,
    previous: str | None = None,
) -> None:
    """Lay out a model of sentence-transformers with the README of its export; see [`export_plain`]. An existing card
    is kept."""
    export_plain(checkpoint, folder, format, size, place=place)
    if options.onnx and format == "native":
        _write_graphs(Checkpoint(folder), (), options)
    card = ModelCard.load(folder / CARD) if previous is None else ModelCard(previous)
    said = options.statements
    stated = {"license": said.license, "language": list(said.languages), "datasets": list(said.datasets)}
    stated |= {"base_model": said.base_model, "tags": [*(card.data.tags or ()), *said.tags]}
    for name, value in stated.items():
        if value:
            setattr(card.data, name, value)
    replace_text(folder / CARD, str(card))


def _refuse_tokens(folder: Path, token: str | None) -> None:
    """Raise a ValueError if a text file holds a token of the Hub, or that of the user in any form."""
    tokens = [known for known in (token, get_token()) if known]
    for name in bytes_by_file(folder):
        if not name.endswith(BINARY_FILES):
            text = (folder / name).read_text(encoding="utf-8", errors="replace")
            if TOKEN.search(text) or any(token in text for token in tokens):
                raise ValueError(f"{name} holds a token of the Hub: remove it, and revoke the token.")


def write_card_and_results(
    checkpoint: Checkpoint,
    repo_id: str,
    options: Options,
    results: GridResults | None = None,
    previous: str | None = None,
    cut: str | None = None,
    branches: Sequence[str] = (),
) -> None:
    """Write results, figures, ONNX graphs and the card into the folder of a checkpoint in its published form. `cut` is
    which part of which size it is (`"4x64 of 12x768"`); then the results may be those of the larger checkpoint.
    `branches` of the repository hold one size each."""
    folder, figures = checkpoint.folder, {}
    if results is not None:
        results = results.within(checkpoint.full)
        if cut is not None:  # a cut model has other weights than the one that was scored, and the same scores
            results.weights = checkpoint.weights_fingerprint
            results.settings = {**results.settings, **{n: checkpoint.identity[n] for n in ("config", "tokenizer")}}
        results.save(folder / RESULTS)
        write_eval_results(folder, leaderboard_entries(results, checkpoint.full, repo_id))
        drawn = draw_all(results, folder / FIGURES)
        figures = {f"{FIGURES}/{file.name}": title for file, title in drawn.items()}
    graphs = _write_graphs(checkpoint, options.onnx, options) if options.onnx else None
    content = CardSource(repo_id, checkpoint, results, options.statements, figures, graphs, cut, branches)
    replace_text(folder / CARD, str(render_card(content, previous)))


def _write_graphs(checkpoint: Checkpoint, sizes: Sequence[Granularity], options: Options) -> GraphReport:
    """Write the ONNX graphs of the full size and of these into the folder of a checkpoint."""
    int8, fp16 = options.onnx_int8, options.onnx_fp16
    return write_graphs(checkpoint.encoder(), sizes, checkpoint.folder, int8=int8, fp16=fp16, data=options.data)


def card_in(folder: Path) -> str | None:
    """The card in a folder, if there is one."""
    return (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else None
