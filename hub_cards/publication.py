"""From a checkpoint on disk to a repository on the Hub: lay it out, upload it."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo
from huggingface_hub.utils import validate_repo_id

from ..evaluation.results import GridResults
from ..utils.durable import replace_text
from .adapter import Adapter, AdapterCard, is_adapter
from .card import render_card
from .checkpoint import Checkpoint
from .files import CARD, RESULTS
from .layout import Options, card_in, prepare, write_card_and_results
from .scores import results_of
from .upload import Publication, published_card


logger = logging.getLogger(__name__)


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
    [`prepare`] the checkpoint or the adapter in the folder `source`, in a temporary folder that is removed when the
    context ends. The arguments are those of [`prepare`] and [`~Publication.upload`]. Default `results`: those in
    `source`, if they belong to these weights. Edits of the card on the Hub are kept, or else those of the card in
    `source`. With `dry_run`, nothing will be uploaded, so that a Hub that cannot be reached is no error.

    Yields:
        [`Publication`]

    Raises:
        ValueError: as [`prepare`] and [`choose_sizes`], or if `repo_id` has no owner.
        OSError: if the card on the Hub cannot be read.
    """
    options = options or Options()
    validate_repo_id(repo_id)
    if "/" not in repo_id:
        raise ValueError(f"repo_id={repo_id!r} names no owner; write user/{repo_id}.")
    given = Adapter(source, options.statements.base_model) if is_adapter(source) else Checkpoint(source)
    scores_hold = not options.quantize and not options.standalone and (source / RESULTS).is_file()
    if results is None and isinstance(given, Checkpoint) and scores_hold:
        results = GridResults.load(source / RESULTS)
        if results.weights != given.weights_fingerprint:
            results = None
    try:
        previous = published_card(repo_id, revision, token)
    except OSError as error:
        if not dry_run:
            raise
        logger.warning(f"{error} The new card is based on the one in {source}, if there is one.")
        previous = None
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "main")
        folder.mkdir()
        yield prepare(given, folder, repo_id, options, results, previous, token)


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
        adapter = Adapter(folder, options.statements.base_model)
        replace_text(folder / CARD, str(render_card(AdapterCard(repo_id, adapter, options.statements))))
        return
    checkpoint = Checkpoint(folder)
    results = results and results_of(checkpoint, results, repo_id)
    write_card_and_results(checkpoint, repo_id, options, results, card_in(folder))
