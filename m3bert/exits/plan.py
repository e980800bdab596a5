"""The plan of a fit: its options, settled and checked before any text is read."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..data.teacher import TeacherEmbeddings
from ..encode.granularity import EncoderConfig
from ..encode.projection import Projection
from ..encode.states import Pooling, check_pooling, longest_text
from ..modeling.configuration_elastic import Elasticity
from ..models.settings import EmbeddingSettings
from ..utils.hashing import weights_fingerprint
from .layer_lists import candidates_of
from .token_features import check_tokenizer
from .tokenized_texts import TokenizedTexts


BASES = ("last_layer", "principal")
Sources = Mapping[str, Iterable[str]]  # name -> texts


def by_name(texts: Iterable[str] | Sources) -> Sources:
    """Texts as sources with names."""
    return texts if isinstance(texts, Mapping) else {"texts": texts}


@dataclass(frozen=True)
class FitOptions:
    """
    Options of [`fit_exits`] and [`fit`].

    Args:
        layers (`Sequence[int]`, *optional*): Depths that run the first layers, below the last. With a static table,
            depth 0 is always among them. Default: none if there are `paths` or `depths`, else all of them.
        paths (`Mapping[int, Sequence[int]]`, *optional*): Depth -> its layers, counted from 1, the last of which is
            the model's.
        depths (`Sequence[int]`, *optional*): Depths whose layers are chosen. Depth 1 runs the first layer.
        pooling (`str`, *optional*): `"mean"`, `"cls"` or `"lasttoken"`. Default: as the model was published, else the
            mean.
        static (`bool`, *optional*, defaults to `True`): Whether the exits read a static table, too. It needs a fast
            tokenizer, and a pass over its vocabulary.
        basis (`str`, *optional*, defaults to `"last_layer"`): Basis of the common space. `"last_layer"` leaves the
            last layer as it is. `"principal"` rotates it to the principal components of its embeddings; full-size
            cosines do not change, and the rotation is stored as the exit of the last layer.
        projection ([`Projection`], *optional*): Projection of the last layer that the model was published with. In an
            m3BERT it becomes the exit of the last layer. In any other encoder it stays what it is, and the exits map
            into the space in front of it.
        teacher ([`TeacherEmbeddings`], *optional*): Embeddings of the texts by another encoder, to predict in place of
            the last layer's; the last layer gets an exit, too. They are looked up by text. Embeddings wider than the
            model are reduced to their principal components, and `to_target` of the result maps back.
        teacher_name (`str`, *optional*, defaults to `"teacher"`): Name of the teacher, for the record.
        max_length (`int`, *optional*): Maximum length of a text in tokens. Default: as the model was published, else
            its limit.
        prompts (`Sequence[str]`, *optional*): Prompts that are put before the texts in turn, for encoders that were
            trained with prompts. Default: the prompts that the model was published with, else none.
        batch_size (`int`, *optional*, defaults to 64): Number of texts of 128 tokens to encode at a time: more shorter
            texts, fewer longer ones. A CPU encodes at most 4,096 tokens at a time.
        compute_dtype (`torch.dtype`, *optional*): Type of the encoder's matrix products: `torch.bfloat16` or
            `torch.float16` (mixed precision). Default: the type of the weights. The fit itself is in float64.
        cache_dir (`str` or `Path`, *optional*): Folder that keeps finished parts, such as the embeddings of the
            vocabulary's tokens, for when an interrupted fit is called again and for the next one. A part is used for
            the same encoder, tokenizer, texts, targets and options only. Default: nothing is kept.
        description (`str`, *optional*): Text before the progress bar; `None` shows no bar.
    """

    layers: Sequence[int] | None = None
    paths: Mapping[int, Sequence[int]] | None = None
    depths: Sequence[int] = ()
    pooling: Pooling | None = None
    static: bool = True
    basis: str = "last_layer"
    projection: Projection | None = None
    teacher: TeacherEmbeddings | None = None
    teacher_name: str = "teacher"
    max_length: int | None = None
    prompts: Sequence[str] | None = None
    batch_size: int = 64
    compute_dtype: torch.dtype | None = None
    cache_dir: str | Path | None = None
    description: str | None = None


@dataclass(frozen=True)
class FitPlan:
    """
    What a fit does: its options, with what a model was published with in place of those that are not set.

    Args:
        options ([`FitOptions`]): The options.
        config ([`~transformers.PreTrainedConfig`]): Config of the encoder.
        settings ([`EmbeddingSettings`]): What the model was published with.
        max_length (`int`): Maximum length of a text in tokens.
        longest (`int`): The longest text that the model embeds without truncation.
    """

    options: FitOptions
    config: EncoderConfig
    settings: EmbeddingSettings
    max_length: int
    longest: int

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, options: FitOptions) -> FitPlan:
        """The plan of a fit. ValueError for options that are not legal, or do not fit the model or each other."""
        encoder = model.base_model
        settings = EmbeddingSettings.of(encoder, late=True) or EmbeddingSettings()
        if settings.is_late:
            options = replace(options, static=False)
        longest = longest_text(encoder.config, tokenizer, settings.max_length)
        max_length = longest if options.max_length is None else options.max_length
        plan = cls(options, encoder.config, settings, max_length, longest)
        plan._check(tokenizer)
        return plan

    def _check(self, tokenizer: PreTrainedTokenizerBase) -> None:
        options = self.options
        check_pooling(self.pooling)
        if options.basis not in BASES:
            raise ValueError(f"basis={options.basis!r} is unknown; legal values: {', '.join(BASES)}.")
        if options.teacher is not None and self.settings.projection is not None and not self.is_m3bert:
            raise ValueError(
                "The projection of the model stays behind its exits, so they cannot predict a teacher: convert the "
                "model first (m3bert convert)."
            )
        if outside := [depth for depth in options.depths if not 0 <= depth < self.last]:
            raise ValueError(
                f"depths={outside} must be within 0..{self.last - 1}: the model has {self.last} layers, which is the "
                "full depth."
            )
        if self.settings.token_widths is not None:
            self._check_late(self.settings.token_widths[0])
        paths = self.paths | {depth: [*candidates_of(depth, self.last)[0]] for depth in self.chosen}
        Elasticity(paths, self.prefixes, [0] if options.static else []).validate(self.config)
        if options.static:
            check_tokenizer(tokenizer, self.config.vocab_size)
        if self.max_length < 1:
            raise ValueError(f"max_length={self.max_length} must be at least 1.")
        if self.staying is not None and options.basis != "last_layer":
            raise ValueError(
                f"basis={options.basis!r} rotates the last layer, which the projection of the model reads as it is: "
                "use 'last_layer'."
            )

    def _check_late(self, reads: int) -> None:
        """Raise a ValueError for what late interaction does not have; `reads` are the dims that the Dense reads."""
        options, width = self.options, self.config.hidden_size
        if reads != width:
            raise ValueError(f"The Dense module of the model reads {reads} dims, and its encoder gives {width}.")
        named = {name: getattr(options, name) is not None for name in ("pooling", "projection", "teacher")}
        named["basis"] = options.basis != "last_layer"
        if given := [name for name, is_given in named.items() if is_given]:
            raise ValueError(f"{given[0]} is for embeddings of texts: an encoder for late interaction has none.")
        if self.is_m3bert:
            raise ValueError("The model is an m3BERT: only the encoders of transformers fit late interaction.")
        if self.prefixes or not (self.chosen or self.paths):
            legal = f"2..{self.last - 1}" if self.last > 2 else "none"
            raise ValueError(
                f"depths={self.prefixes}: an encoder for late interaction has paths alone, which skip layers; "
                f"legal depths: {legal}."
            )

    @property
    def last(self) -> int:
        """The number of layers."""
        return self.config.num_hidden_layers

    @property
    def is_m3bert(self) -> bool:
        """Whether the model is an m3BERT, whose projection can become an exit."""
        return self.config.model_type == "m3bert"

    @property
    def pooling(self) -> Pooling:
        """Pooling of the hidden states of tokens."""
        return self.options.pooling or self.settings.pooling

    @property
    def prompts(self) -> list[str]:
        """Prompts that are put before the texts in turn."""
        if self.options.prompts is not None:
            return [*self.options.prompts]
        return list(dict.fromkeys(self.settings.prompts.values())) or [""]

    @property
    def query_prompt(self) -> str:
        """The prompt of queries: the first one that was passed, else the published one."""
        if self.options.prompts is not None:
            return [*self.options.prompts, ""][0]
        return self.settings.prompts.get("query", "")

    @cached_property
    def projection(self) -> Projection | None:
        """The projection of the last layer that is part of the target."""
        if self.options.teacher is not None:
            return None
        return self.options.projection or Projection.of(self.settings.projection)

    @property
    def staying(self) -> Projection | None:
        """The projection that stays behind the exits; `None` if there is none, or it becomes an exit."""
        return None if self.is_m3bert else self.projection

    @property
    def paths(self) -> dict[int, list[int]]:
        """Depth -> its layers, of the depths that skip layers which were passed."""
        paths = {depth: [*layers] for depth, layers in sorted((self.options.paths or {}).items())}
        return {depth: layers for depth, layers in paths.items() if layers != [*range(1, depth + 1)]}

    @property
    def chosen(self) -> list[int]:
        """Depths whose layers are chosen."""
        open_depths = sorted({*self.options.depths} - {*(self.options.paths or {})})
        return [depth for depth in open_depths if candidates_of(depth, self.last)]

    @property
    def prefixes(self) -> list[int]:
        """Depths with an exit that run the first layers, and 0 with a static table."""
        options = self.options
        asked = [*options.depths, *(options.paths or {})]
        layers = options.layers
        if layers is None:
            layers = [] if asked else range(1, self.last)
        every = {*layers, *asked, *([0] if options.static else [])}
        return sorted(every - {*self.paths, *self.chosen, self.last})

    def tokenize(self, texts: Iterable[str] | Sources, tokenizer: PreTrainedTokenizerBase) -> TokenizedTexts:
        """The texts with their prompts, as token ids. ValueError if there are fewer than dims."""
        tokenized = TokenizedTexts(by_name(texts), tokenizer, self.max_length, self.prompts)
        width = self.config.hidden_size
        if len(tokenized) < width:
            raise ValueError(
                f"{len(tokenized)} texts are too few to fit exits of {width} dims: {width} texts are the minimum, and "
                f"{20 * width} or more are better."
            )
        return tokenized

    def target_fingerprint(self, texts: TokenizedTexts) -> str:
        """Digest of what makes the targets: the teacher's embeddings, or the projection. ValueError if a text has no
        embedding by the teacher, or one that is zero or not finite."""
        teacher = self.options.teacher
        if teacher is None:
            return weights_fingerprint([] if self.projection is None else self.projection.state_dict().items())
        # Group by group, so that memory does not grow with the number of texts.
        return weights_fingerprint(("", teacher.checked([text.text for text in group])) for group in texts)
