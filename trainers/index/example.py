"""The lines that search an index without this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .engines.lines import with_imports
from .index import Index


def example(index: Index, question: str = "your question") -> str:
    """
    Lines of Python that search an index without this package: they embed a query with sentence-transformers, and read
    the files, or ask the server, of the vector store. They set `found`: pairs of id and score, best first.

    Args:
        index ([`Index`]): The index.
        question (`str`, *optional*, defaults to `"your question"`): The query.
    """
    return "\n".join([*_embedding(index, question), with_imports(index.engine.example()), "print(found)"])


def _embedding(index: Index, question: str) -> list[str]:
    """Lines that set `query`, and `quantizer` if there is one."""
    manifest, options = index.manifest, _depth(index.manifest, index.plan.query.layer)
    learned = index.plan.documents.code.startswith("qama-")
    reading = manifest["encoder"]
    prompt = reading["prompts"].get("query")
    arguments = repr(question) if prompt is None else f"{question!r}, prompt={prompt!r}"
    lines = ["from sentence_transformers import SentenceTransformer"]
    if learned:
        lines.append("from transformers import AutoModel")
    lines += [
        "",
        f"model = SentenceTransformer({manifest['model']!r}, trust_remote_code=True{options})",
        # Checkpoints are often published with a smaller limit than that of their tokenizer.
        f"model.max_seq_length = {reading['max_lengths'].get('query', reading['max_length'])}",
        f"query = model.encode({arguments})",
    ]
    if learned:
        lines.append(
            f"quantizer = AutoModel.from_pretrained({manifest['model']!r}, subfolder='quantizer', "
            "trust_remote_code=True)"
        )
    return lines


def _depth(manifest: Mapping[str, Any], layer: int) -> str:
    """Argument of `SentenceTransformer` that truncates the encoder to a layer; empty for all layers."""
    if layer == manifest["model_layers"]:
        return ""
    if manifest.get("elastic", manifest["model_type"] == "m3bert"):
        return f", model_kwargs={{'output_layer': {layer}}}"
    return f", config_kwargs={{'num_hidden_layers': {layer}}}"
