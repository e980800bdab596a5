"""Encode texts once for all granularities of a grid."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from tqdm.auto import tqdm
from transformers import PreTrainedTokenizerBase

from ..modeling.configuration_elastic import Elasticity
from ..modeling.files_elastic import Source
from ..models.auto import load_model
from ..models.settings import EmbeddingSettings, load_tokenizer
from ..utils.columns import Role
from ..utils.hashing import fingerprint_of
from .coding import require_quantizer
from .device import ComputeArguments, autocast, place
from .embedding_store import EmbeddingStore
from .embeddings import GridEmbeddings
from .granularity import EncoderConfig, Granularity, Grid
from .identity import encoder_parts
from .padded_batches import TOKENS_PER_TEXT, PassCost, tokenized_chunks
from .precisions import precision_of
from .projection import Projection
from .quantizer import quantizer_of
from .ranks import rank
from .states import (
    NestedStates,
    Pooling,
    check_pooling,
    longest_text,
    nested_states,
    shared_layers,
    truncate,
    unwrap_encoder,
)


if TYPE_CHECKING:
    from ..modeling.quantization_m3bert import M3BertQuantizer

logger = logging.getLogger(__name__)
# Batches that are tokenised together, and stored together in a folder.
BATCHES_PER_BLOCK = 16


@dataclass(frozen=True)
class GridEncoder:
    """
    An encoder with its settings. One forward pass gives the hidden states of every layer of a grid; every dim is a
    prefix.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): A model of a supported type, with or without a head.
            It runs in eval mode; its mode is restored afterwards.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]): Tokenizer of the model.
        grid ([`Grid`]): Granularities. Their codes are for an evaluation: texts are encoded once, in float.
        pooling (`str`, *optional*, defaults to `"mean"`): `"mean"`, `"cls"` or `"lasttoken"`.
        batch_size (`int`, *optional*, defaults to 64): Number of texts of 128 tokens to encode at a time: more shorter
            texts, fewer longer ones. A CPU encodes at most 4,096 tokens at a time.
        max_length (`int`, *optional*): Maximum length of a text in tokens; longer texts are truncated. Default: the
            smaller one of the limits of tokenizer and model.
        prompts (`dict[str, str]`, *optional*): Name -> prompt; `"query"` and `"document"` are for texts of this role.
        default_prompt_name (`str`, *optional*): Name of the prompt of texts without a role.
        max_lengths (`dict[str, int]`, *optional*): Role (`"query"`, `"document"`) -> maximum length of its texts in
            tokens, with the prompt. Default: `max_length`.
        dtype (`torch.dtype`, *optional*, defaults to `torch.float32`): Type of the stored embeddings, or float16.
        projection ([`Projection`], *optional*): Projection of pooled embeddings of the last layer, and of exits into
            its space. The dims of the grid are then dims of the projection.
        compute_dtype (`torch.dtype`, *optional*): Type of the matrix products. Default: the type of the weights.
        quantizer ([`M3BertQuantizer`], *optional*): Quantizer of the precisions `qama-*`, which reads all dims.
        normalize (`bool`, *optional*, defaults to `False`): Whether the model L2-normalises truncated embeddings.
        similarity (`str`, *optional*, defaults to `"cosine"`): How the model's embeddings are compared, for MTEB.

    [`~GridEncoder.from_pretrained`] takes the settings that a model was published with.

    Raises:
        ValueError: if a granularity is outside the model, a precision lacks its quantizer, a maximum length is beyond
            the limit, or the pooling is not a legal value.

    ```python
    >>> encoder = GridEncoder.from_pretrained("runs/elastic", grid="2,4,6x32,384")  # doctest: +SKIP
    >>> encoder.encode(["one text", "another"]).at(Granularity(4, 32)).shape  # doctest: +SKIP
    torch.Size([2, 32])
    ```
    """

    model: Any
    tokenizer: PreTrainedTokenizerBase
    grid: Grid
    pooling: Pooling = "mean"
    batch_size: int = 64
    max_length: int | None = None
    prompts: Mapping[str, str] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    projection: Projection | None = None
    max_lengths: Mapping[Role, int] = field(default_factory=dict)
    compute_dtype: torch.dtype | None = None
    quantizer: M3BertQuantizer | None = None
    normalize: bool = False
    similarity: str = "cosine"
    default_prompt_name: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        grid: Grid | str | None = None,
        revision: str | None = None,
        trust_remote_code: bool = False,
        compute: ComputeArguments | None = None,
        model_kwargs: Mapping[str, Any] = {},
        **changes: Any,
    ) -> GridEncoder:
        """
        Load an encoder with the settings that it was published with: at the full size it embeds queries and documents
        as `encode_query` and `encode_document` of `SentenceTransformer` do.

        Args:
            name_or_path (`str`): Folder or Hub id.
            grid ([`Grid`] or `str`, *optional*): Granularities. Default: all layers at 16, 32, 64, ... dims and the
                hidden size; of a model with a projection, its full size.
            revision (`str`, *optional*): Branch, tag or commit on the Hub.
            trust_remote_code (`bool`, *optional*, defaults to `False`): Run code that comes with the model.
            compute ([`ComputeArguments`], *optional*): Where and how it computes. Default: on the CPU, in the type of
                the weights.
            model_kwargs (`dict`, *optional*): Further arguments of [`~transformers.AutoModel.from_pretrained`].
            changes: Arguments of [`GridEncoder`] that replace what the model was published with; in `prompts`, single
                prompts.

        Raises:
            ValueError: as [`GridEncoder`] and [`EmbeddingSettings.find`].
        """
        options = {"revision": revision, "trust_remote_code": trust_remote_code, **model_kwargs}
        source = Source.at(name_or_path, options).with_settings()
        settings = EmbeddingSettings.of_source(source)
        model = load_model(name_or_path, **{**options, **source.options}).eval()
        tokenizer = load_tokenizer(source, settings, config=model.config)
        published = cls.arguments_of(settings or EmbeddingSettings(), model.config, tokenizer)
        prompts = {**published["prompts"], **changes.get("prompts", {})}
        changes["prompts"] = {role: prompt for role, prompt in prompts.items() if prompt}
        projection = changes.get("projection", published["projection"])
        if compute is not None:
            model = place(model, compute)
            published["compute_dtype"] = compute.autocast_dtype
        published["quantizer"] = quantizer_of(source)
        grid = Grid.parse(grid) if isinstance(grid, str) and grid else grid
        return cls(model, tokenizer, grid or default_grid(model.config, projection), **{**published, **changes})

    @staticmethod
    def arguments_of(
        settings: EmbeddingSettings, config: EncoderConfig, tokenizer: PreTrainedTokenizerBase
    ) -> dict[str, Any]:
        """The arguments of [`GridEncoder`] that settings stand for, for an encoder of this config."""
        return {
            "pooling": settings.pooling,
            "projection": Projection.of(settings.projection),
            "normalize": settings.normalize,
            "similarity": settings.similarity,
            "prompts": {name: prompt for name, prompt in settings.prompts.items() if prompt},
            "default_prompt_name": settings.default_prompt_name,
            "max_length": longest_text(config, tokenizer, settings.max_length),
        }

    @property
    def settings(self) -> EmbeddingSettings:
        """The settings to publish this encoder with."""
        return EmbeddingSettings(
            pooling=self.pooling,
            projection=self.projection,
            normalize=self.normalize,
            prompts=self.prompts,
            default_prompt_name=self.default_prompt_name,
            max_length=self.max_length,
            similarity=self.similarity,
        )

    def __post_init__(self) -> None:
        config = unwrap_encoder(self.model).config
        self.grid.sizes.validate(config)
        if self.projection is not None:
            self.projection.validate_grid(self.grid.sizes, config)
        require_quantizer(self.quantizer, self.grid, self.full_width)
        check_pooling(self.pooling, config)
        limit = longest_text(config, self.tokenizer)
        lengths = {"": self.max_length, **{f"{role}_": length for role, length in self.max_lengths.items()}}
        for role, length in lengths.items():
            if length is not None and not 0 < length <= limit:
                raise ValueError(f"{role}max_length={length} must be within 1..{limit}, the model's limit.")
        object.__setattr__(self, "max_length", self.max_length or limit)

    def require_cosine(self) -> None:
        """Raise a ValueError if the model compares its embeddings by something that does not rank as the cosine."""
        if self.similarity not in ("cosine", *(("dot", "euclidean") if self.normalize else ())):
            raise ValueError(
                f"The model compares embeddings by similarity={self.similarity!r}, and this compares them by cosine: "
                "set similarity='cosine' to do so all the same."
            )

    @property
    def full_width(self) -> int:
        """Dims of the whole embedding."""
        return self.projection.out_features if self.projection else unwrap_encoder(self.model).config.hidden_size

    @cached_property
    def encoded_grid(self) -> Grid:
        """The sizes that are encoded: the grid, and all dims where a precision needs the quantizer."""
        layers = {member.layer for member in self.grid if precision_of(member.code).learned}
        return Grid(tuple({*self.grid.sizes, *(Granularity(layer, self.full_width) for layer in layers)}))

    @cached_property
    def widths(self) -> dict[int, int]:
        """Layer -> dims that are encoded: the largest ones of the layer."""
        return {layer: self.encoded_grid.dims_of(layer)[-1] for layer in self.encoded_grid.layers}

    @property
    def looks_up(self) -> bool:
        """Whether the static table alone gives the embeddings: no layer runs, and there is nothing to pool."""
        return self.encoded_grid.layers == [0] and 0 in Elasticity.of(unwrap_encoder(self.model).config).table

    def prompt_of(self, role: Role | None) -> str:
        """Prompt before the texts of a role."""
        return self.prompts.get(role or self.default_prompt_name or "", "")

    def max_length_of(self, role: Role | None) -> int:
        """Maximum length in tokens of the texts of a role."""
        longest = self.max_length if role is None else self.max_lengths.get(role, self.max_length)
        assert longest is not None  # set by __post_init__
        return longest

    def encode(
        self,
        texts: Sequence[str],
        *,
        role: Role | None = "query",
        folder: Path | None = None,
        description: str | None = None,
    ) -> GridEmbeddings:
        """
        Embed texts at every granularity. An empty text is encoded as an empty sequence.

        Args:
            texts (`Sequence[str]`): Texts.
            role (`str`, *optional*, defaults to `"query"`): Role of the texts, which selects their prompt and their
                maximum length. `None` is the default prompt and `max_length`.
            folder (`Path`, *optional*): Folder for memory-mapped embeddings, which is completed if it is incomplete,
                by all ranks together. `None` keeps the embeddings in memory.
            description (`str`, *optional*): Text before the progress bar; `None` shows no bar.

        Raises:
            ValueError: if the folder has other embeddings, or `texts` is one text.
        """
        if isinstance(texts, str):
            raise ValueError("texts must be a list of texts, and is a single one: pass [text].")
        prompt = self.prompt_of(role)
        texts = [prompt + text for text in texts]
        grid, widths = self.encoded_grid, self.widths
        # Texts of similar length are tokenised together. The longest come first, so that a batch that does not fit in
        # memory fails immediately.
        order = sorted(range(len(texts)), key=lambda index: len(texts[index]), reverse=True)
        block = self.batch_size * BATCHES_PER_BLOCK
        blocks = [order[start : start + block] for start in range(0, len(texts), block)]
        if folder is None:
            memory = {layer: torch.empty((len(texts), width), dtype=self.dtype) for layer, width in widths.items()}
            for _, rows, vectors in self._run(texts, dict(enumerate(blocks)), role, description):
                for layer in widths:
                    memory[layer][rows] = vectors[layer]
            return GridEmbeddings(grid, memory, self.normalize)

        arrays = {f"layer_{layer}": width for layer, width in widths.items()}
        with EmbeddingStore(folder, self.manifest(texts, role), arrays, blocks, self.dtype) as store:
            missing = {block: blocks[block] for block in store.missing()}
            for block, _, vectors in self._run(texts, missing, role, description):
                store.write(block, {f"layer_{layer}": part for layer, part in vectors.items()})
            stored = store.read()
        return GridEmbeddings(
            grid, {layer: torch.from_numpy(stored[f"layer_{layer}"]) for layer in widths}, self.normalize
        )

    @torch.no_grad()
    def _run(
        self, texts: Sequence[str], blocks: Mapping[int, list[int]], role: Role | None, description: str | None
    ) -> Iterator[tuple[int, list[int], dict[int, torch.Tensor]]]:
        """Yield the number of each block of texts, its rows, and its embeddings (layer -> tensor)."""
        device = next(self.model.parameters()).device
        cost = PassCost.on(device).limited(self.batch_size * TOKENS_PER_TEXT)
        was_training, filled, longest, widths = self.model.training, 0, self.max_length_of(role), self.widths
        if was_training:  # visiting all modules takes longer than a look-up in the static table
            self.model.eval()
        silent, total = description is None or rank() > 0, sum(map(len, blocks.values()))
        bar = tqdm(total=total, desc=description, unit=" texts", leave=False, disable=silent)
        try:
            for number, rows in blocks.items():
                vectors = {layer: torch.empty((len(rows), dim), dtype=self.dtype) for layer, dim in widths.items()}
                for chunk, inputs in tokenized_chunks(self.tokenizer, [texts[row] for row in rows], longest, cost):
                    if inputs["attention_mask"].shape[1] >= longest:
                        filled += int((inputs["attention_mask"].sum(dim=1) >= longest).sum())
                    for layer, pooled in self.pooled(inputs.to(device)).items():
                        vectors[layer][chunk] = pooled.to("cpu", self.dtype)
                    bar.update(len(chunk))
                yield number, rows, vectors
        finally:
            bar.close()
            if was_training:
                self.model.train()
        if filled:
            logger.warning(
                f"{filled} of {len(texts)} texts reach the maximum of {longest} tokens; longer texts were truncated."
            )

    def pooled(self, inputs: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Layer -> embeddings of a batch at the largest encoded dim of the layer."""
        widths, projection = self.widths, self.projection
        if self.looks_up and projection is None:
            static = unwrap_encoder(self.model).static_states
            vectors = static(inputs["input_ids"], inputs["attention_mask"], dim=widths[0])[:, 0]
            return {0: truncate(vectors, widths[0], self.normalize)}
        states = self.states(inputs, widths)
        pooled = {layer: states.pooled(layer, self.pooling) for layer in widths}
        if projection is not None:
            projection = projection.to(inputs["input_ids"].device)
            pooled = {layer: projection(vectors) for layer, vectors in pooled.items()}
        return {layer: truncate(vectors, widths[layer], self.normalize) for layer, vectors in pooled.items()}

    def states(self, inputs: Mapping[str, torch.Tensor], layers: Iterable[int]) -> NestedStates:
        """[`nested_states`] of a batch, computed in the encoder's type. Poolings stay in float32."""
        with autocast(unwrap_encoder(self.model).device, self.compute_dtype):
            return nested_states(self.model, inputs, layers)

    def manifest(self, texts: Sequence[str], role: Role | None = "query") -> dict[str, Any]:
        """Everything that the embeddings of texts (with prompts) depend on: texts, [`~GridEncoder.identity`], sizes,
        type."""
        identity = self.identity()
        return {
            "texts": len(texts),
            "text_fingerprint": fingerprint_of(texts),
            "weights_fingerprint": identity["weights"],
            **{name: identity[name] for name in ("config", "tokenizer", "pooling", "normalize")},
            "grid": str(self.encoded_grid),
            "max_length": self.max_length_of(role),
            "batch_size": self.batch_size,
            "dtype": str(self.dtype).removeprefix("torch."),
            "compute_dtype": self.compute_type,
        }

    @property
    def compute_type(self) -> str:
        """Name of the type that hidden states are computed in."""
        return str(self.compute_dtype or unwrap_encoder(self.model).dtype).removeprefix("torch.")

    def identity(self) -> dict[str, Any]:
        """Everything that vectors depend on, beside the text, the size and the precision: digests of `weights`,
        `config` and `tokenizer` ([`encoder_parts`]), and how texts are read."""
        return {
            **encoder_parts(self.model, self.tokenizer, self.projection),
            "pooling": self.pooling,
            "normalize": self.normalize,
            "prompts": self.settings.used_prompts,
            "max_length": self.max_length,
            "max_lengths": dict(self.max_lengths),
        }


def default_grid(config: EncoderConfig, projection: nn.Linear | None) -> Grid:
    """The grid of an encoder if none is named. One with a projection has all dims of the projection only."""
    if projection is None:
        return Grid.of(config)
    return Grid.product(shared_layers(config), [projection.out_features])
