"""A model card, generated from what is known: the checkpoint, its training record, its evaluation."""

from __future__ import annotations

import yaml
from huggingface_hub import ModelCard, ModelCardData

from ..utils import papers
from . import sizes, words
from .adapter import AdapterCard
from .card_source import CardSource
from .metadata import with_edits
from .scores import card_results
from .sections import generated, join, merge, parse
from .tables import render


def render_card(source: CardSource | AdapterCard, previous: str | None = None) -> ModelCard:
    """
    The card of a checkpoint. Rendering it twice gives the same card. Edits of an existing card are kept: sections that
    a person changed, text between sections, and metadata.

    Args:
        source ([`CardSource`]): What the card is generated from.
        previous (`str`, *optional*): The existing card.

    Returns:
        [`~huggingface_hub.ModelCard`]

    Raises:
        ValueError: if the metadata of the existing card cannot be read.
    """
    name = source.repo_id.split("/")[-1]
    modules = {"words": words, "sizes": sizes, "papers": papers}  # under these names in the template
    sections = generated(render(source.template, card=source, name=name, repo=source.repo_id, **modules))
    metadata = {key: value for key, value in source.metadata.items() if value}
    if isinstance(source, CardSource) and source.results is not None and (scores := card_results(source.results)):
        metadata |= {"model_name": name, "eval_results": scores}
    data = ModelCardData(**metadata)
    if previous is not None:
        try:
            old = ModelCard(previous)
        except (yaml.YAMLError, TypeError) as error:
            raise ValueError("The metadata of the existing card is not valid YAML: fix it first.") from error
        sections = merge(sections, parse(old.text))
        data = ModelCardData(**with_edits(data.to_dict(), old.data.to_dict()))
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{join(sections)}")
