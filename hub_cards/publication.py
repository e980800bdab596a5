"""From a checkpoint on disk to a repository on the Hub: what travels, what stays, and how it gets there."""

from __future__ import annotations

import copy
import logging
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, get_token
from huggingface_hub.utils import validate_repo_id

import modeling_m3bert
from trainers import Granularity, Grid
from trainers.embedding_modules import MODULES_FILE, write_modules
from trainers.evaluation import GridResults

from .card import CardSource, render_card
from .checkpoint import Checkpoint
from .figures import TITLES, draw_all
from .metadata import Statements
from .onnx_export import export_onnx
from .upload import CARD, RESULTS, Publication, published_card


logger = logging.getLogger(__name__)
FIGURES, ONNX = "figures", "onnx"
TOKEN = re.compile(r"\bhf_[A-Za-z0-9]{30,}")
BINARY_FILES = (".safetensors", ".onnx", ".png", ".model")


@dataclass(frozen=True)
class Options:
    """
    What to publish of a checkpoint.

    Args:
        granularity ([`Granularity`], *optional*): Publish this part alone, as a small, complete model.
        quantize (`bool`, *optional*, defaults to `False`): Store the linear layers in 8 bits (torchao).
        onnx (`tuple[Granularity, ...]`, *optional*): Export graphs of these granularities too.
        statements ([`Statements`], *optional*): For the card.
    """

    granularity: Granularity | None = None
    quantize: bool = False
    onnx: tuple[Granularity, ...] = ()
    statements: Statements = field(default_factory=Statements)


def prepare(
    checkpoint: Checkpoint,
    folder: Path,
    repo_id: str,
    options: Options | None = None,
    results: GridResults | None = None,
    previous: str | None = None,
    token: str | None = None,
) -> Publication:
    """
    Lay out what will be on the Hub: weights in safetensors, the code that loads them, tokenizer, modules of
    sentence-transformers, graphs, results, figures, card.

    Args:
        checkpoint ([`Checkpoint`]): What to publish.
        folder (`Path`): An empty folder.
        repo_id (`str`): Where it will be, `user/model`.
        options ([`Options`], *optional*): What to publish of it.
        results ([`GridResults`], *optional*): Of its evaluation, over weights of just this checkpoint.
        previous (`str`, *optional*): The card that is there, whose human parts are kept. Default: the checkpoint's.
        token (`str`, *optional*): That must be in no file, beside that of the environment.

    Returns:
        [`Publication`]

    Raises:
        ValueError: if the checkpoint is not complete, the results are of other weights or read otherwise, a
            granularity is not there, a link leads out of the folder, or a file holds a token.
        OSError: if a file cannot be read or written.
    """
    options = options or Options()
    files = dict(checkpoint.files())
    full = options.granularity or checkpoint.full
    outside = [str(g) for g in options.onnx if g.layer > full.layer or g.dim > full.dim]
    if outside:
        raise ValueError(f"No graph of {', '.join(outside)}: what is published has the full size {full}.")
    if options.onnx and (options.quantize or checkpoint.quantized):
        raise ValueError("Graphs are exported from weights in full precision: publish them with those.")
    if results is not None and options.quantize:
        raise ValueError("The results are of the weights before they are quantised: evaluate what is published.")
    if results is not None:
        results = results_of(checkpoint, results, repo_id)
    if options.granularity is None and not options.quantize:
        for name in (name for name, why in files.items() if why is None):
            link_or_copy(checkpoint.folder / name, folder / name)
    else:
        rebuild(checkpoint, folder, options)
    complete(checkpoint, folder, results)
    written = checkpoint.folder / CARD
    if previous is None and written.is_file():
        previous = written.read_text(encoding="utf-8")
    cut = f"{options.granularity} of {checkpoint.full}" if options.granularity is not None else None
    describe(Checkpoint(folder), repo_id, options, results, previous, cut)
    refuse_tokens(folder, token)
    return Publication(folder, repo_id, {name: why for name, why in files.items() if why is not None})


def describe(
    checkpoint: Checkpoint,
    repo_id: str,
    options: Options,
    results: GridResults | None = None,
    previous: str | None = None,
    cut: str | None = None,
) -> None:
    """
    Write beside a checkpoint what speaks of it: results, figures, graphs, and the card.

    Args:
        checkpoint ([`Checkpoint`]): As it is published.
        repo_id (`str`): Where it will be.
        options ([`Options`]): Graphs to export, and statements for the card.
        results ([`GridResults`], *optional*): Of its evaluation, or that of a larger one.
        previous (`str`, *optional*): The card that is there.
        cut (`str`, *optional*): What it is a part of.
    """
    folder = checkpoint.folder
    figures: dict[str, str] = {}
    if results is not None:
        results = results.within(checkpoint.full)
        if cut is not None:  # whose weights are not those that were scored, but give the same numbers
            results.weights = checkpoint.weights_fingerprint
        results.save(folder / RESULTS)
        drawn = draw_all(results, folder / FIGURES)
        figures = {f"{FIGURES}/{file.name}": caption(file.stem) for file in drawn}
    graphs = {g: f"{ONNX}/model_{g}.onnx" for g in options.onnx}
    if graphs:
        encoder = checkpoint.encoder(Grid(options.onnx))
        for g, name in graphs.items():
            (folder / name).parent.mkdir(exist_ok=True)
            export_onnx(encoder, g, folder / name)
    content = CardSource(repo_id, checkpoint, results, options.statements, figures, list(graphs.values()), cut)
    (folder / CARD).write_text(str(render_card(content, previous)), encoding="utf-8")


def results_of(checkpoint: Checkpoint, results: GridResults, repo_id: str) -> GridResults:
    """
    The results under the name that their model has on the Hub.

    Raises:
        ValueError: if they are of other weights, or do not say of which.
    """
    if results.weights is None:
        raise ValueError("The results do not say which weights they are of: run scripts.evaluate again.")
    if results.weights != checkpoint.weights_fingerprint:
        raise ValueError(f"The results are not of the weights in {checkpoint.folder}: evaluate this checkpoint.")
    if (checkpoint.folder / MODULES_FILE).is_file():
        for name, known in (("pooling", checkpoint.pooling), ("prompts", checkpoint.prompts)):
            if (used := results.settings.get(name, known)) != known:
                raise ValueError(f"The results are of {name} {used!r}; the checkpoint is published with {known!r}.")
    renamed = copy.copy(results)
    renamed.model = repo_id
    return renamed


def rebuild(checkpoint: Checkpoint, folder: Path, options: Options) -> None:
    """Save a part of a checkpoint, or the whole in 8 bits, with everything that belongs to it but the weights."""
    wanted = options.granularity
    if checkpoint.quantized:
        raise ValueError(f"The weights in {checkpoint.folder} are quantised already: publish them as they are.")
    if wanted is not None and (not checkpoint.elastic or checkpoint.projection is not None):
        raise ValueError(f"Only an m3BERT without a projection can be cut to {wanted}: convert it first.")
    sizes = {"output_layer": wanted.layer, "output_dim": wanted.dim} if wanted is not None else {}
    loading = {"quantization_config": eight_bits()} if options.quantize else {}
    checkpoint.load(**sizes, **loading).save_pretrained(folder)
    for name, why in checkpoint.files():
        if why is None and not (folder / name).exists() and not name.startswith("model"):
            link_or_copy(checkpoint.folder / name, folder / name)
    if wanted is not None and (folder / MODULES_FILE).is_file():
        write_modules(
            folder, width=wanted.dim, pooling=checkpoint.pooling, causal=checkpoint.causal, **checkpoint.published
        )


def eight_bits() -> object:
    """How transformers stores the weights of linear layers in 8 bits, on any device."""
    try:
        from torchao.quantization import Int8WeightOnlyConfig
    except ImportError as error:
        raise ValueError("Weights in 8 bits need torchao: pip install 'm3bert[quantization]'.") from error
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def complete(checkpoint: Checkpoint, folder: Path, results: GridResults | None) -> None:
    """Add what the checkpoint's folder lacks: tokenizer, code, modules of sentence-transformers."""
    if not (folder / "tokenizer_config.json").is_file():
        raise ValueError(f"{checkpoint.folder} has no tokenizer: save it there, or nobody can use the model.")
    staged = Checkpoint(folder)
    missing = sorted(name for name in staged.requires_code() if not (folder / name).is_file())
    if missing and not staged.elastic:
        raise ValueError(f"The config of {checkpoint.folder} needs {', '.join(missing)}, which is not there.")
    for name in missing:
        shutil.copyfile(Path(modeling_m3bert.__file__).with_name(name), folder / name)
    if staged.head == "AutoModel" and not (folder / MODULES_FILE).is_file():
        settings = results.settings if results is not None else {}
        write_modules(
            folder,
            width=staged.full.dim,
            pooling=settings.get("pooling", "mean"),
            causal=staged.causal,
            prompts=settings.get("prompts", {}),
        )


def link_or_copy(source: Path, target: Path) -> None:
    """The same file in another folder; weights, which nobody changes in place, without a copy where that can be."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.suffix == ".safetensors":
        try:
            target.hardlink_to(source.resolve())
            return
        except OSError:  # another disk
            pass
    shutil.copyfile(source, target)


def caption(stem: str) -> str:
    """What a figure shows."""
    if stem.startswith("heat_map_"):
        return f"{TITLES[stem.removeprefix('heat_map_')]} by layer and dim"
    if stem.startswith("variances_"):
        return "variance of every dim over texts"
    return stem.replace("_and_", " against ").replace("_", " ")


def refuse_tokens(folder: Path, token: str | None = None) -> None:
    """
    Check that no text file holds a token of the Hub.

    Args:
        folder (`Path`): What is published.
        token (`str`, *optional*): Another token than that of the environment.

    Raises:
        ValueError: names the file.
    """
    tokens = [known for known in (token, get_token()) if known]
    for file in (file for file in folder.rglob("*") if file.is_file()):
        if file.suffix not in BINARY_FILES:
            text = file.read_text(encoding="utf-8", errors="replace")
            if TOKEN.search(text) or any(token in text for token in tokens):
                raise ValueError(f"{file.relative_to(folder)} holds a token of the Hub: take it out, and revoke it.")


def found_results(checkpoint: Checkpoint) -> GridResults | None:
    """Results in the checkpoint's own folder, if they are of its weights as they are now."""
    if not (checkpoint.folder / RESULTS).is_file():
        return None
    results = GridResults.load(checkpoint.folder / RESULTS)
    return results if results.weights == checkpoint.weights_fingerprint else None


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
    [`prepare`] a checkpoint in a temporary folder. The card to go on from is the one on the Hub, where there is one;
    the results are those in the checkpoint's folder, where none are given and those are of these weights.

    Args:
        source (`Path`): A checkpoint.
        repo_id (`str`): Where it goes, `user/model`.
        options ([`Options`], *optional*): What to publish of it.
        results ([`GridResults`], *optional*): Of its evaluation.
        revision (`str`, *optional*): As for [`~Publication.upload`].
        token (`str`, *optional*): As for [`~Publication.upload`].
        dry_run (`bool`, *optional*, defaults to `False`): Nothing will be uploaded: do without a Hub that cannot be
            reached.

    Yields:
        [`Publication`], until the context ends.

    Raises:
        ValueError, OSError: as [`prepare`].
    """
    options = options or Options()
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"{repo_id!r} does not say whose it is; name the owner: user/{repo_id}.")
    checkpoint = Checkpoint(source)
    if results is None and not options.quantize:
        results = found_results(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        try:
            previous = published_card(repo_id, revision, token)
        except OSError as error:
            if not dry_run:
                raise
            logger.warning(f"{error} What is laid out goes on from the card in {source}.")
            previous = None
        yield prepare(checkpoint, Path(folder), repo_id, options, results, previous, token)


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
    """What is [`laid_out`], uploaded ([`~Publication.upload`]); returns the commit."""
    with laid_out(source, repo_id, options, results, revision=revision, token=token) as publication:
        return publication.upload(revision=revision, token=token, **upload)


def write_card(folder: Path, repo_id: str, options: Options, results: GridResults | None = None) -> None:
    """Write the card of a checkpoint, with results and figures, into its own folder; a card there is gone on from."""
    checkpoint, card = Checkpoint(folder), folder / CARD
    if results is not None:
        results = results_of(checkpoint, results, repo_id)
    describe(checkpoint, repo_id, options, results, card.read_text(encoding="utf-8") if card.is_file() else None)
