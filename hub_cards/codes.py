"""What a card says about codes: the quantizer of a checkpoint, and what it takes to store a vector."""

from __future__ import annotations

from typing import Any

from trainers.core.codes import CODES, bytes_per_vector
from trainers.evaluation.results import GridResults
from trainers.hub.quantizer import QUANTIZER_FOLDER

from .checkpoint import Checkpoint
from .exits import depths_in_words
from .tables import CODE_NOTE, RESCORED_NOTE, code_table, has_codes, markdown, rescored_size, rescored_table


def quantizer_values(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """
    The template's variables about a quantizer.

    Args:
        checkpoint ([`Checkpoint`]): The checkpoint in its published form.

    Returns:
        `dict`: values of the template, or `None` if the checkpoint has no quantizer.
    """
    config, full = checkpoint.quantizer_config, checkpoint.full
    if config is None:
        return None
    layer = full.layer if full.layer in config.layers or not config.layers else config.layers[-1]
    options = [] if layer == full.layer else [depth_option(checkpoint, layer)]
    options += [] if config.hidden_size == full.dim else [f"truncate_dim={config.hidden_size}"]
    return {
        "folder": QUANTIZER_FOLDER,
        "options": "".join(f", {option}" for option in options),
        "layers": depths_in_words(config.layers) if config.layers else None,
        "width": config.hidden_size,
        "bytes": bytes_per_vector("qama-2", config.hidden_size),
        "table": learned_table(config.hidden_size),
        "record": checkpoint.quantizer_record,
    }


def depth_option(checkpoint: Checkpoint, layer: int) -> str:
    """The argument of `SentenceTransformer` that loads a checkpoint up to a layer."""
    if checkpoint.elastic:
        return f'model_kwargs={{"output_layer": {layer}}}'
    return f'config_kwargs={{"num_hidden_layers": {layer}}}'


def learned_table(dim: int) -> str:
    """One row per precision of a quantizer: what it stores, and bytes per vector, beside float32."""
    shown = [code for code in CODES.values() if code.learned or code.name == "float32"]
    return markdown(
        ["code", "what is stored", "bytes per vector"],
        ([f"`{code.name}`", code.words, str(bytes_per_vector(code.name, dim))] for code in shown),
        words=2,
    )


def code_values(results: GridResults | None) -> dict[str, Any]:
    """The template's variables about measured codes."""
    values: dict[str, Any] = {"code_tables": [], "code_note": CODE_NOTE, "rescored": None}
    if results is not None and has_codes(results):
        types = results.judged_task_types()
        values["code_tables"] = [(name, results.main_metric(name), code_table(results, name)) for name in types]
    if results is not None and results.rescored_searches:
        size = rescored_size(results)
        values["rescored"] = {
            "size": size,
            "metric": results.main_metric("retrieval"),
            "note": RESCORED_NOTE,
            "table": rescored_table(results, size),
        }
    return values


def without_learned_codes(results: GridResults) -> GridResults:
    """
    The results without codes of a quantizer.

    Raises:
        ValueError: if nothing else was scored.
    """
    members = tuple(g for g in results.granularities if not CODES[g.code].learned)
    if not members:
        raise ValueError(f"The results have codes of a quantizer only ({results.grid}), which is not published.")
    return results.only(members)
