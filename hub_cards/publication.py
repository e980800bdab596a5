"""From a checkpoint on disk to a repository on the Hub: choose the files, write the card, upload."""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, ModelCard
from huggingface_hub.utils import validate_repo_id

from modeling_m3bert.settings_m3bert import MODULES_FILE
from trainers.core.codes import CODES
from trainers.core.durable import replace_text
from trainers.core.granularity import Granularity
from trainers.evaluation.results import GridResults
from trainers.hub.quantizer import QUANTIZER_FOLDER

from .adapter import Adapter, export_adapter, is_adapter, write_adapter_card
from .card import CardSource, render_card
from .checkpoint import Checkpoint
from .codes import without_learned_codes
from .eval_results import eval_results, write_eval_results
from .figures import draw_all
from .metadata import Statements
from .native_export import export_native, lost_layers, state_only
from .onnx_graphs import write_graphs
from .router_export import export_router
from .staging import complete, link_or_copy, rebuild, refuse_tokens
from .static_export import export_static
from .task_words import title_of
from .upload import CARD, RESULTS, Publication, published_card


logger = logging.getLogger(__name__)
FIGURES = "figures"
FORMATS = ("elastic", "native", "static", "router")


@dataclass(frozen=True)
class Options:
    """
    How to publish a checkpoint.

    Args:
        granularity ([`Granularity`], *optional*): Publish only this granularity, as a small, complete model.
        quantize (`bool`, *optional*, defaults to `False`): Store the linear layers in 8 bits. Needs the extra
            `quantization`.
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

    def __post_init__(self) -> None:
        if (self.onnx_int8 or self.onnx_fp16) and not self.onnx:
            raise ValueError("onnx_int8 and onnx_fp16 need onnx: name a granularity, such as 4x64.")
        if self.format == "m3bert":
            warnings.warn(
                "format='m3bert' is now 'elastic'; the next version refuses it.", FutureWarning, stacklevel=3
            )
            object.__setattr__(self, "format", "elastic")
        if self.format not in FORMATS:
            raise ValueError(f"format={self.format!r} is unknown; legal values: {', '.join(FORMATS)}.")
        if self.format != "elastic" and self.quantize:
            raise ValueError("quantize needs format='elastic': servers read native weights in full precision.")
        if self.standalone and self.onnx:
            raise ValueError(f"onnx needs format='elastic' or 'native', not {self.format!r}.")

    @property
    def native(self) -> bool:
        """Whether a plain encoder of transformers is published."""
        return self.format == "native"

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
    sentence-transformers, ONNX graphs, results, figures, and the card.

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
        ValueError: if the checkpoint is incomplete, the results belong to other weights or to other settings, a
            granularity is not available, a file is a link out of the folder or holds a token, a Python file differs
            from this package's, or an extra is missing.
        OSError: if a file cannot be read or written.
    """
    options = options or Options()
    if isinstance(source, Adapter):
        left_out = _lay_out_adapter(source, folder, repo_id, options, results, previous)
    elif options.standalone:
        left_out = _lay_out_standalone(source, folder, repo_id, options, results, previous)
    else:
        left_out = _lay_out_encoder(source, folder, repo_id, options, results, previous)
    refuse_tokens(folder, token)
    return Publication(folder, repo_id, left_out)


def _lay_out_encoder(
    checkpoint: Checkpoint,
    folder: Path,
    repo_id: str,
    options: Options,
    results: GridResults | None,
    previous: str | None,
) -> dict[str, str]:
    """[`prepare`] an encoder. Returns the files that are left out, with the reason."""
    files = dict(checkpoint.files())
    full = options.granularity or checkpoint.full
    misfit = checkpoint.quantizer_misfit(full) if options.granularity is not None or options.native else None
    if misfit is not None:
        own = checkpoint.quantizer_code()
        files |= {name: misfit for name in files if name in own or Path(name).parent.name == QUANTIZER_FOLDER}
    outside = [str(g) for g in options.onnx if g.layer > full.layer or g.dim > full.dim]
    if outside:
        raise ValueError(f"onnx={', '.join(outside)} is outside of the published model, whose full size is {full}.")
    if options.onnx and (options.quantize or checkpoint.quantized):
        raise ValueError("onnx needs weights in full precision: publish without quantize.")
    if results is not None and options.quantize:
        raise ValueError("The results belong to the weights before quantize: evaluate the quantised ones instead.")
    if results is not None and options.native and state_only(checkpoint, full.layer):
        logger.warning(
            f"The scores of depth {full.layer} are left out: they are of an exit that reads the static table, which a "
            "native export lacks. Evaluate the folder of `m3bert export --format native`."
        )
        results = None
    if results is not None:
        lost: Collection[int] = ()  # layers whose exits the published model does not have
        if options.native:
            lost = lost_layers(checkpoint, full)
        elif full.layer < checkpoint.full.layer:
            lost = {*checkpoint.depths.exits} - {full.layer}
        results = results_of(checkpoint, results, repo_id).within(full, lost)
        results = without_learned_codes(results) if misfit is not None else results
    published = [name for name, why in files.items() if why is None]
    if options.native:
        export_native(checkpoint, folder, options.granularity)
    elif options.granularity is None and not options.quantize:
        for name in published:
            link_or_copy(checkpoint.folder / name, folder / name)
    else:
        rebuild(checkpoint, folder, published, granularity=options.granularity, quantize=options.quantize)
    complete(checkpoint, folder, results)
    if not options.own_code and (other := Checkpoint(folder).other_code()):
        raise ValueError(
            f"{', '.join(other)} in {checkpoint.folder} differs from the code of this package: remove it to publish "
            "the package's, or read it and pass own_code (--own_code)."
        )
    written = checkpoint.folder / CARD
    if previous is None and written.is_file():
        previous = written.read_text(encoding="utf-8")
    cut = f"{full} of {checkpoint.full}" if options.granularity is not None or options.native else None
    describe(Checkpoint(folder), repo_id, options, results, previous, cut)
    return {name: why for name, why in files.items() if why is not None}


def _lay_out_standalone(
    checkpoint: Checkpoint,
    folder: Path,
    repo_id: str,
    options: Options,
    results: GridResults | None,
    previous: str | None,
) -> dict[str, str]:
    """[`prepare`] a model of sentence-transformers without an encoder at its root. An existing card is kept."""
    if results is not None:
        raise ValueError(f"results are scores of the encoder, not of a {options.format}: push that without results.")
    size = options.granularity
    if options.format == "router":
        export_router(checkpoint, folder, size)
    elif size is not None and size.layer != 0:
        raise ValueError(f"format='static' publishes layer 0, not {size}.")
    else:
        export_static(checkpoint, folder, None if size is None else size.dim)
    card = ModelCard(previous) if previous is not None else ModelCard((folder / CARD).read_text(encoding="utf-8"))
    if previous is None:
        card.text = card.text.replace("user/name", repo_id)
    said = options.statements
    stated = {"license": said.license, "language": list(said.languages), "datasets": list(said.datasets)}
    stated |= {"base_model": said.base_model, "tags": [*(card.data.tags or ()), *said.tags]}
    for name, value in stated.items():
        if value:
            setattr(card.data, name, value)
    replace_text(folder / CARD, str(card))
    why = f"not a part of a {options.format}"
    return {name: why for name, _ in checkpoint.files() if not (folder / name).exists()}


def _lay_out_adapter(
    adapter: Adapter,
    folder: Path,
    repo_id: str,
    options: Options,
    results: GridResults | None,
    previous: str | None,
) -> dict[str, str]:
    """[`prepare`] an adapter of peft, as it is."""
    if results is not None or replace(options, statements=Statements(), data=None) != Options():
        raise ValueError(
            f"{adapter.folder} holds only an adapter, which is published as it is: for results, granularity, format, "
            "quantize and onnx, merge it (m3bert train --merge_adapter, or merge_and_unload)."
        )
    return export_adapter(adapter, folder, repo_id, options.statements, previous)


def describe(
    checkpoint: Checkpoint,
    repo_id: str,
    options: Options,
    results: GridResults | None = None,
    previous: str | None = None,
    cut: str | None = None,
) -> None:
    """
    Write results, figures, ONNX graphs and the card into the folder of a checkpoint.

    Args:
        checkpoint ([`Checkpoint`]): The checkpoint in its published form.
        repo_id (`str`): The repository, `user/model`.
        options ([`Options`]): Graphs to export, and statements for the card.
        results ([`GridResults`], *optional*): Its evaluation, or that of the larger checkpoint it was taken from.
        previous (`str`, *optional*): The existing card, whose edits are kept.
        cut (`str`, *optional*): Which part of which size it is, `"4x64 of 12x768"`.
    """
    folder = checkpoint.folder
    figures: dict[str, str] = {}
    if results is not None:
        results = results.within(checkpoint.full)
        if cut is not None:  # a cut model has other weights than the one that was scored, and the same scores
            results.weights = checkpoint.weights_fingerprint
        results.save(folder / RESULTS)
        write_eval_results(folder, eval_results(results, checkpoint.full, repo_id))
        drawn = draw_all(results, folder / FIGURES)
        figures = {f"{FIGURES}/{file.name}": caption(file.stem) for file in drawn}
    graphs = None
    if options.onnx:
        int8, fp16 = options.onnx_int8, options.onnx_fp16
        graphs = write_graphs(checkpoint.encoder(), options.onnx, folder, int8=int8, fp16=fp16, data=options.data)
    content = CardSource(repo_id, checkpoint, results, options.statements, figures, graphs, cut)
    replace_text(folder / CARD, str(render_card(content, previous)))


def results_of(checkpoint: Checkpoint, results: GridResults, repo_id: str) -> GridResults:
    """
    The results, with the repository as the name of the model.

    Raises:
        ValueError: if they belong to other weights or settings, or do not say to which weights.
    """
    if results.weights is None:
        raise ValueError("The results do not say which weights they belong to: evaluate the checkpoint again.")
    if results.weights != checkpoint.weights_fingerprint:
        raise ValueError(f"The results do not belong to the weights in {checkpoint.folder}: evaluate these.")
    if (checkpoint.folder / MODULES_FILE).is_file():
        for name, known in (("pooling", checkpoint.pooling), ("prompts", checkpoint.prompts)):
            if (used := results.settings.get(name, known)) != known:
                raise ValueError(
                    f"The results were measured with {name}={used!r}; the checkpoint is published with {known!r}."
                )
    learned = [code for code in results.granularities.codes if CODES[code].learned]
    own = checkpoint.quantizer.fingerprint if learned and checkpoint.quantizer is not None else None
    if learned and results.settings.get("quantizer") != own:
        raise ValueError(
            f"The results have scores of {', '.join(learned)} by another quantizer than that of {checkpoint.folder}: "
            "evaluate the checkpoint again."
        )
    renamed = copy.copy(results)
    renamed.model = repo_id
    return renamed


def caption(stem: str) -> str:
    """The title of a figure, from the name of its file."""
    if stem.startswith("heat_map_"):
        return f"{title_of(stem.removeprefix('heat_map_'))} by layer and dim"
    if stem.startswith("variances_"):
        return "variance of each dim over texts"
    if stem == "quality_by_code":
        return "quality against bytes per vector, by precision"
    if stem == "asymmetric_search":
        return "search with queries and documents at different layers"
    return stem.replace("_and_", " against ").replace("_", " ")


@contextmanager
def laid_out(
    source: Path,
    repo_id: str,
    options: Options | None = None,
    results: GridResults | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    dry_run: bool = False,
) -> Iterator[Publication]:
    """
    [`prepare`] a checkpoint or an adapter in a temporary folder. Edits of the card on the Hub are kept, or else those
    of the card in the checkpoint's folder.

    Args:
        source (`Path`): Folder of the checkpoint.
        repo_id (`str`): The repository, `user/model`.
        options ([`Options`], *optional*): How to publish it.
        results ([`GridResults`], *optional*): Its evaluation. Default: the results in the checkpoint's folder, if they
            belong to these weights.
        revision (`str`, *optional*): As for [`~Publication.upload`].
        token (`str`, *optional*): As for [`~Publication.upload`].
        dry_run (`bool`, *optional*, defaults to `False`): Nothing will be uploaded, so carry on if the Hub cannot be
            reached.

    Yields:
        [`Publication`], whose folder is removed when the context ends.

    Raises:
        ValueError: as [`prepare`], or if `repo_id` has no owner.
        OSError: as [`prepare`], or if the card on the Hub cannot be read.
    """
    options = options or Options()
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"repo_id={repo_id!r} names no owner; write user/{repo_id}.")
    given = Adapter(source, options.statements.base_model) if is_adapter(source) else Checkpoint(source)
    own = (source / RESULTS).is_file() and not options.quantize and not options.standalone
    if results is None and isinstance(given, Checkpoint) and own:
        found = GridResults.load(source / RESULTS)
        results = found if found.weights == given.weights_fingerprint else None
    with tempfile.TemporaryDirectory() as folder:
        try:
            previous = published_card(repo_id, revision, token)
        except OSError as error:
            if not dry_run:
                raise
            logger.warning(f"{error} The new card is based on the one in {source}, if there is one.")
            previous = None
        yield prepare(given, Path(folder), repo_id, options, results, previous, token)


def publish(
    source: Path,
    repo_id: str,
    options: Options | None = None,
    results: GridResults | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    **upload: Any,
) -> CommitInfo:
    """Lay out a checkpoint ([`laid_out`]), upload it ([`~Publication.upload`]), and return the commit."""
    with laid_out(source, repo_id, options, results, revision=revision, token=token) as publication:
        return publication.upload(revision=revision, token=token, **upload)


def write_card(folder: Path, repo_id: str, options: Options, results: GridResults | None = None) -> None:
    """Write the card of a checkpoint, results and figures into its folder. Keeps edits of an existing card, but not of
    an adapter's, which peft writes again whenever it saves."""
    if is_adapter(folder):
        write_adapter_card(Adapter(folder, options.statements.base_model), folder, repo_id, options.statements)
        return
    checkpoint, card = Checkpoint(folder), folder / CARD
    if results is not None:
        results = results_of(checkpoint, results, repo_id)
    describe(checkpoint, repo_id, options, results, card.read_text(encoding="utf-8") if card.is_file() else None)
