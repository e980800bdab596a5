"""Encode texts once for every granularity of a grid."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from modeling_m3bert.conversion_m3bert import position_offset

from ..distributed import rank, wait_for_all_ranks, world_size
from ..embedding_folder import EmbeddingFolder, fingerprint_of
from ..granularity import Grid
from ..nested import POOLINGS, Pooling, ProjectedStates, TextStates, nested_states, prefix, unwrap_encoder
from ..projection import Projection
from .embeddings import GridEmbeddings


logger = logging.getLogger(__name__)
Role = Literal["query", "document"]
# What a tokenizer says that was saved without a limit is astronomic.
NO_LIMIT = 10**9


@dataclass(frozen=True)
class GridEncoder:
    """
    An encoder, and how texts become embeddings: one forward gives every layer of a grid, and every dim is a prefix.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): Any known family, with or without a head. Runs in eval
            mode and is left in its own.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Its tokenizer.
        grid ([`Grid`]): Granularities.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` or `"anchor"`.
        batch_size (`int`, *optional*, defaults to 64): Texts at a time, of similar length.
        max_length (`int`, *optional*): Longest text in tokens, what is beyond is cut; `None` is the model's limit.
        prompts (`dict[str, str]`, *optional*): Role (`"query"`, `"document"`) -> words put before such texts, which
            some encoders were trained with.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Of the embeddings that are kept: float32 or
            float16.
        projection ([`Projection`], *optional*): Of the last layer's pooled embedding, where the encoder was published
            with one; the grid is then of its dims.

    Raises:
        ValueError: if a granularity is outside the model, `max_length` beyond its limit, or the pooling or the dtype
            another one.

    ```python
    >>> encoder = GridEncoder(model, tokenizer, Grid.parse("2,4,6x32,384"))  # doctest: +SKIP
    >>> encoder.encode(["one text", "another"]).at(Granularity(4, 32)).shape  # doctest: +SKIP
    torch.Size([2, 32])
    ```
    """

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    grid: Grid
    pooling: Pooling = "mean"
    batch_size: int = 64
    max_length: int | None = None
    prompts: Mapping[Role, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    projection: Projection | None = None

    def __post_init__(self) -> None:
        config = unwrap_encoder(self.model).config
        self.grid.validate(config)
        if self.projection is not None:
            self.projection.validate_grid(self.grid, config)
        if self.pooling not in POOLINGS:
            raise ValueError(f"pooling={self.pooling!r} is unknown; legal values: {', '.join(POOLINGS)}.")
        if self.dtype not in (torch.float32, torch.float16):
            raise ValueError(f"dtype={self.dtype} is not a type to keep embeddings in: float32 or float16.")
        limit = self.tokenizer.model_max_length
        if limit > NO_LIMIT:
            limit = config.max_position_embeddings - position_offset(config)
        if self.max_length is not None and not 0 < self.max_length <= limit:
            raise ValueError(f"max_length={self.max_length} must be within 1..{limit}, the model's limit.")
        object.__setattr__(self, "max_length", self.max_length or limit)

    def encode(
        self,
        texts: Sequence[str],
        *,
        role: Role = "query",
        folder: Path | None = None,
        description: str | None = None,
    ) -> GridEmbeddings:
        """
        Embed texts at every granularity. An empty text is encoded as an empty sequence.

        Args:
            texts (`Sequence[str]`): Texts.
            role (`str`, *optional*, defaults to `"query"`): What they are, where the encoder has prompts.
            folder (`Path`, *optional*): Where to keep the embeddings, memory-mapped; a folder that was filled in part
                is completed. Several processes fill it together. `None` keeps them in memory.
            description (`str`, *optional*): Words before the progress bar; `None` shows no bar.

        Returns:
            [`GridEmbeddings`]

        Raises:
            ValueError: if there is no text, several processes have no folder, or the folder holds something else.
        """
        if not texts:
            raise ValueError("There is no text to encode.")
        if world_size() > 1 and folder is None:
            raise ValueError("Several processes need a folder to encode into.")
        texts = [self.prompts.get(role, "") + text for text in texts]
        widths = {layer: self.grid.dims_of(layer)[-1] for layer in self.grid.layers}
        # Texts of similar length share a batch, so that little of it is padding; the longest come first, so that what
        # has no room in memory says so at once.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        batches = [order[start : start + self.batch_size] for start in range(0, len(texts), self.batch_size)]
        if folder is None:
            memory = {layer: torch.empty((len(texts), width), dtype=self.dtype) for layer, width in widths.items()}
            for _, rows, vectors in self._run(texts, dict(enumerate(batches)), description):
                for layer in widths:
                    memory[layer][rows] = vectors[layer]
            return GridEmbeddings(self.grid, memory)

        names = {layer: f"layer_{layer}" for layer in widths}
        of_arrays = {names[layer]: width for layer, width in widths.items()}
        store = EmbeddingFolder(folder, self.manifest(texts), of_arrays, batches, self.dtype)
        missing = {batch: batches[batch] for batch in store.missing()}
        for batch, _, vectors in self._run(texts, missing, description):
            store.write(batch, {names[layer]: vectors[layer] for layer in widths})
        wait_for_all_ranks()
        arrays = store.read()
        return GridEmbeddings(self.grid, {layer: torch.from_numpy(arrays[names[layer]]) for layer in widths})

    @torch.no_grad()
    def _run(
        self, texts: Sequence[str], batches: Mapping[int, list[int]], description: str | None
    ) -> Iterator[tuple[int, list[int], dict[int, torch.Tensor]]]:
        """Yields batch number, rows, and layer -> embeddings."""
        device = next(self.model.parameters()).device
        was_training, filled = self.model.training, 0
        self.model.eval()
        bar = tqdm(
            total=sum(map(len, batches.values())),
            desc=description,
            unit=" texts",
            disable=description is None or rank() > 0,
            leave=False,
        )
        try:
            for batch, rows in batches.items():
                inputs = self.tokenizer(
                    [texts[row] for row in rows],
                    padding=True,
                    truncation=True,
                    max_length=self.max_length,
                    return_token_type_ids=False,
                    return_tensors="pt",
                )
                filled += int((inputs["attention_mask"].sum(dim=1) >= self.max_length).sum())
                states: TextStates = nested_states(self.model, inputs.to(device), self.grid.layers)
                if self.projection is not None:
                    projection = self.projection.to(device)
                    states = ProjectedStates(states, projection, self.grid.layers[-1])
                vectors = {
                    layer: prefix(states.pooled(layer, self.pooling), self.grid.dims_of(layer)[-1]).to(
                        "cpu", self.dtype
                    )
                    for layer in self.grid.layers
                }
                yield batch, rows, vectors
                bar.update(len(rows))
        finally:
            bar.close()
            self.model.train(was_training)
        if filled:
            logger.warning(
                f"{filled} of {len(texts)} texts fill the maximum of {self.max_length} tokens; "
                "what they had beyond it was cut."
            )

    def manifest(self, texts: Sequence[str]) -> dict[str, Any]:
        """What embeddings of these texts, prompts included, depend on: the texts, the weights and the settings."""
        return {
            "texts": len(texts),
            "text_fingerprint": fingerprint_of(texts),
            "model": unwrap_encoder(self.model).config.name_or_path,
            "weights_fingerprint": self.weights_fingerprint(),
            "grid": str(self.grid),
            "pooling": self.pooling,
            "max_length": self.max_length,
            "batch_size": self.batch_size,
            "dtype": str(self.dtype).removeprefix("torch."),
        }

    def weights_fingerprint(self) -> str:
        """A digest of all weights, by name: whose embeddings, or scores, something is."""
        digest = blake2b(digest_size=16)
        projection = self.projection.state_dict() if self.projection is not None else {}
        for name, tensor in {**unwrap_encoder(self.model).state_dict(), **projection}.items():
            digest.update(name.encode())
            for part in plain_tensors(tensor):
                digest.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        return digest.hexdigest()


def plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor, or what one of a class of its own is made of, such as quantised weights and their scales."""
    if type(tensor) in (torch.Tensor, nn.Parameter):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for name in names:
        yield from plain_tensors(getattr(tensor, name))
