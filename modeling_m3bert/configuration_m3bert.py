"""m3BERT configuration: sizes and switches of the architecture, and the granularities that are legal."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any


try:
    from transformers.configuration_utils import PreTrainedConfig
except ImportError:  # the name is new in version 5
    from transformers import __version__

    raise ImportError(
        f"m3BERT needs transformers 5.0 or later, and {__version__} is installed. Upgrade transformers, or use the "
        "native export of this checkpoint, which every version loads (`m3bert export --format native`)."
    ) from None

AUTO_MAP = {
    "AutoConfig": "configuration_m3bert.M3BertConfig",
    "AutoModel": "modeling_m3bert.M3BertModel",
    "AutoModelForMaskedLM": "modeling_m3bert.M3BertForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_m3bert.M3BertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_m3bert.M3BertForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_m3bert.M3BertForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_m3bert.M3BertForMultipleChoice",
}


BaseConfig: Any = PreTrainedConfig
if not hasattr(PreTrainedConfig, "__post_init__"):

    class BaseConfig(PreTrainedConfig):  # type: ignore[no-redef]
        """A config of transformers 5.0 to 5.3, with the fields and the `__post_init__` that later versions have."""

        def __init__(self, **kwargs: Any):
            for name in type(self).__annotations__:
                setattr(self, name, kwargs.pop(name, getattr(type(self), name)))
            self.__post_init__(**kwargs)

        def __post_init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)


class M3BertConfig(BaseConfig):
    r"""
    Configuration of an m3BERT encoder ([m3BERT](https://huggingface.co/papers/2605.19568), sections 2.2 and 2.3). The
    defaults are the paper's base model: 305,660,928 parameters.

    A *granularity* is a pair (layer, dim): the hidden state after that layer, truncated to its first `dim` dimensions.
    `output_layer` and `output_dim` select one. They have the same meaning in the config, in `from_pretrained` and in
    every `forward`, and [`~M3BertConfig.resolve_granularity`] validates them everywhere.

    Args:
        vocab_size (`int`, *optional*, defaults to 250002): Number of tokens; the default is the multilingual-E5
            tokenizer's.
        hidden_size (`int`, *optional*, defaults to 768): Dims of the hidden states.
        intermediate_size (`int`, *optional*, defaults to 3072): Dims inside the feed-forward layers.
        num_hidden_layers (`int`, *optional*, defaults to 12): Number of layers.
        num_attention_heads (`int`, *optional*, defaults to 12): Number of attention heads per layer.
        hidden_act (`str`, *optional*, defaults to `"silu"`): Activation of the feed-forward layers.
        mlp_gated (`bool`, *optional*, defaults to `True`): Gate the feed-forward layers (SwiGLU with `"silu"`).
        norm_type (`str`, *optional*, defaults to `"rmsnorm"`): `"rmsnorm"` or `"layernorm"`.
        norm_position (`str`, *optional*, defaults to `"pre"`): `"pre"`, with a final norm, or `"post"`, as in BERT.
        norm_eps (`float`, *optional*, defaults to 1e-5): Epsilon of every norm.
        embedding_dropout (`float`, *optional*, defaults to 0.1): Dropout on the normalised embeddings.
        hidden_dropout (`float`, *optional*, defaults to 0.0): Dropout on the output of attention and feed-forward.
        attention_dropout (`float`, *optional*, defaults to 0.1): Dropout on the attention probabilities.
        attention_bias (`bool`, *optional*, defaults to `False`): Biases in the four attention projections.
        mlp_bias (`bool`, *optional*, defaults to `False`): Biases in the feed-forward projections.
        max_position_embeddings (`int`, *optional*, defaults to 512): Maximum sequence length.
        position_embedding_type (`str`, *optional*, defaults to `"absolute"`): `"absolute"` (learned) or `"rope"`.
        rope_parameters (`dict`, *optional*): RoPE parameters. Ignored, and not saved, unless
            `position_embedding_type="rope"`.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of the initial weights.
        tie_word_embeddings (`bool`, *optional*, defaults to `False`): Tie the weight of the MLM head to the token
            embeddings.
        sparse_prediction (`bool`, *optional*, defaults to `False`): Given labels, compute MLM logits for labelled
            tokens only; their shape is then `(labelled tokens, vocab_size)`.
        classifier_pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens or `"cls"`.
        classifier_dropout (`float`, *optional*, defaults to 0.0): Dropout before a classification head.
        matryoshka_layers (`list[int]`, *optional*): Layers trained as output layers, ascending. `None` selects the
            thirds of the depth (4, 8, 12 in the paper), or the last layer if the depth is not a multiple of 3. An
            empty list means that no layer was trained as an output layer; every layer is then legal.
        matryoshka_dims (`list[int]`, *optional*): Prefix dims trained as outputs, ascending. `None` selects
            `hidden_size` and those of 32, 64, 128 below it. An empty list means that no prefix was trained; every dim
            is then legal.
        exit_layers (`list[int]`, *optional*): Layers with an exit, ascending: an affine map from the layer's hidden
            state to the embedding space of the last layer. 0 is the embedding layer. Default: none.
        static_layers (`list[int]`, *optional*): Exit layers that read the static table, ascending: a vector per token
            of the vocabulary, whose mean over a text is the embedding of layer 0, and beside the hidden state the
            input of the exit of a deeper layer. Default: none, and there is no table.
        static_ignored_ids (`list[int]`, *optional*): Token ids that this mean leaves out, ascending. Default: none.
        stitch_layers (`list[int]`, *optional*): Exit layers that are stitched, ascending. A stitched depth l runs l
            layers, too, but not the first l: the first l - k, an affine map from each token's hidden state into what
            the last k layers read, and these. If it is among `static_layers`, the map also reads the token's row of
            the static table. Default: none.
        stitch_top_layers (`list[int]`, *optional*): The number k of last layers of each stitched depth. `None`
            selects `max(1, l // 2)`.
        exit_fit (`dict`, *optional*): How the exits were fitted: pooling, basis, texts, and the quality of each exit.
        converted_from (`str`, *optional*): Hub id of the encoder that the weights were converted from.
        native_model_type (`str`, *optional*): Model type of that encoder, such as `"xlm-roberta"`.
        source_layers (`list[int]`, *optional*): The layers of that encoder that the model was made of, counted from 1,
            if they were chosen. `None` means the first ones.
        output_layer (`int`, *optional*): Output layer. Models are built with this many layers. `None` means the last.
            0, the embedding layer, is legal if it has an exit.
        output_dim (`int`, *optional*): Number of dimensions to return. `None` means all.

    Raises:
        ValueError: if a switch has an unknown value, a matryoshka layer or dim or an exit layer is outside the model,
            or `output_layer` or `output_dim` is not legal. The message names the legal values.

    ```python
    >>> from modeling_m3bert import M3BertConfig, M3BertModel

    >>> model = M3BertModel(M3BertConfig(output_layer=4, output_dim=64))
    >>> len(model.layers)
    4
    ```
    """

    model_type = "m3bert"
    default_theta = 10000.0

    vocab_size: int = 250002
    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    hidden_act: str = "silu"
    mlp_gated: bool = True
    norm_type: str = "rmsnorm"
    norm_position: str = "pre"
    norm_eps: float = 1e-5
    embedding_dropout: float = 0.1
    hidden_dropout: float = 0.0
    attention_dropout: float = 0.1
    attention_bias: bool = False
    mlp_bias: bool = False
    max_position_embeddings: int = 512
    position_embedding_type: str = "absolute"
    rope_parameters: dict = None  # type: ignore[assignment]  # `__post_init__` replaces None
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    sparse_prediction: bool = False
    classifier_pooling: str = "mean"
    classifier_dropout: float = 0.0
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | None = 2
    matryoshka_layers: list[int] = None  # type: ignore[assignment]  # `__post_init__` replaces None
    matryoshka_dims: list[int] = None  # type: ignore[assignment]  # `__post_init__` replaces None
    exit_layers: list[int] = None  # type: ignore[assignment]  # `__post_init__` replaces None
    static_layers: list[int] = None  # type: ignore[assignment]  # `__post_init__` replaces None
    static_ignored_ids: list[int] = None  # type: ignore[assignment]  # `__post_init__` replaces None
    stitch_layers: list[int] = None  # type: ignore[assignment]  # `__post_init__` replaces None
    stitch_top_layers: list[int] = None  # type: ignore[assignment]  # `__post_init__` replaces None
    exit_fit: dict | None = None
    converted_from: str | None = None
    native_model_type: str | None = None
    source_layers: list[int] | None = None
    output_layer: int | None = None
    output_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # `to_dict` writes these properties; the lists, not the values in a file, determine them.
        for derived in ("is_matryoshka", "matryoshka_dimensions"):
            kwargs.pop(derived, None)
        # Saving a model registers only its own class, but a checkpoint should load with every head.
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        depth, width = self.num_hidden_layers, self.hidden_size
        if self.matryoshka_layers is None:
            self.matryoshka_layers = [depth // 3, 2 * depth // 3, depth] if depth % 3 == 0 else [depth]
        for name in ("exit_layers", "static_layers", "static_ignored_ids", "stitch_layers"):
            if getattr(self, name) is None:
                setattr(self, name, [])
        if self.stitch_top_layers is None:
            self.stitch_top_layers = [default_top_layers(layer) for layer in self.stitch_layers]
        if self.matryoshka_dims is None:
            self.matryoshka_dims = [dim for dim in (32, 64, 128) if dim < width] + [width]
        self.base_model_tp_plan = tensor_parallel_plan(self.mlp_gated)
        super().__post_init__(**kwargs)
        if self.position_embedding_type != "rope":
            # They are not saved, so any other value would be lost in a round trip.
            self.rope_parameters = {"rope_type": "default", "rope_theta": self.default_theta}
        self.validate_architecture()
        self.resolve_granularity()

    def validate_architecture(self) -> None:
        """Check the switches and the matryoshka lists; raise a ValueError that names the legal values."""
        choices = {
            "norm_type": ("rmsnorm", "layernorm"),
            "norm_position": ("pre", "post"),
            "position_embedding_type": ("absolute", "rope"),
            "classifier_pooling": ("mean", "cls"),
        }
        for name, legal in choices.items():
            if getattr(self, name) not in legal:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; legal values: {', '.join(legal)}.")
        if self.hidden_size % self.num_attention_heads != 0:
            raise ValueError(
                f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads={self.num_attention_heads}."
            )
        for name, values, smallest, largest in (
            ("matryoshka_layers", self.matryoshka_layers, 0 if 0 in self.exit_layers else 1, self.num_hidden_layers),
            ("matryoshka_dims", self.matryoshka_dims, 1, self.hidden_size),
            ("exit_layers", self.exit_layers, 0, self.num_hidden_layers),
            ("static_ignored_ids", self.static_ignored_ids, 0, self.vocab_size - 1),
        ):
            if sorted(set(values)) != list(values) or any(not smallest <= value <= largest for value in values):
                raise ValueError(f"{name}={values} must be ascending and within {smallest}..{largest}.")
        for name, values in (("static_layers", self.static_layers), ("stitch_layers", self.stitch_layers)):
            if values != [layer for layer in self.exit_layers if layer in values]:
                raise ValueError(f"{name}={values} must be ascending and among exit_layers={self.exit_layers}.")
        tops = self.stitch_top_layers
        if len(tops) != len(self.stitch_layers) or any(
            not 1 <= top <= layer for layer, top in zip(self.stitch_layers, tops, strict=True)
        ):
            raise ValueError(
                f"stitch_top_layers={tops} must have a number of last layers for each of stitch_layers="
                f"{self.stitch_layers}, from 1 to the layer."
            )

    @property
    def is_matryoshka(self) -> bool:
        """Whether any granularity below the full size was trained."""
        below_depth = any(layer < self.num_hidden_layers for layer in self.matryoshka_layers)
        return below_depth or any(dim < self.hidden_size for dim in self.matryoshka_dims)

    @property
    def matryoshka_dimensions(self) -> list[int]:
        """`matryoshka_dims` up to `output_dim`. Inference engines read this name."""
        widest = self.output_dim or self.hidden_size
        return [dim for dim in self.matryoshka_dims if dim <= widest]

    @property
    def is_static(self) -> bool:
        """Whether a model of this config is the static table alone."""
        return self.num_hidden_layers == 0 and 0 in self.static_layers

    @property
    def legal_layers(self) -> list[int]:
        """Legal output layers: the trained ones, those with an exit, and the last; or every layer if none was
        trained. 0 is legal only with an exit."""
        layers = _legal(self.matryoshka_layers, self.num_hidden_layers)
        return sorted({*layers, *self.exit_layers})

    @property
    def legal_dims(self) -> list[int]:
        """Legal output dims: the trained ones and the hidden size, or every dim if none was trained."""
        return _legal(self.matryoshka_dims, self.hidden_size)

    def resolve_granularity(self, output_layer: int | None = None, output_dim: int | None = None) -> tuple[int, int]:
        """
        Return the granularity to output: the arguments, else the config's own values, else the full size.

        Args:
            output_layer (`int`, *optional*): Output layer.
            output_dim (`int`, *optional*): Number of dimensions to return.

        Returns:
            `tuple[int, int]`: layer in 0..num_hidden_layers, dim in 1..hidden_size.

        Raises:
            ValueError: if a value is not legal. The message names the legal values.
        """
        chosen = []
        for name, value, default, legal in (
            ("output_layer", output_layer, self.output_layer, self.legal_layers),
            ("output_dim", output_dim, self.output_dim, self.legal_dims),
        ):
            value = default if value is None else value
            value = legal[-1] if value is None else value
            if isinstance(value, bool) or not isinstance(value, int) or value not in legal:
                raise ValueError(f"{name}={value!r} is not available here; legal values: {_spell(legal)}.")
            chosen.append(value)
        return chosen[0], chosen[1]

    @property
    def stitches(self) -> dict[int, int]:
        """Stitched depth -> its number of last layers."""
        return dict(zip(self.stitch_layers, self.stitch_top_layers, strict=True))

    def declare_exits(
        self,
        layers: Iterable[int],
        static_layers: Iterable[int] = (),
        static_ignored_ids: Iterable[int] = (),
        stitches: Mapping[int, int] | None = None,
    ) -> None:
        """Set `exit_layers`, those of them that read the static table, the ids that it ignores, and `stitches`.
        Without an exit, the embedding layer is no output layer."""
        self.exit_layers, self.static_layers = sorted(layers), sorted(static_layers)
        self.static_ignored_ids = sorted(static_ignored_ids) if self.static_layers else []
        self.stitch_layers = sorted(stitches or {})
        self.stitch_top_layers = [(stitches or {})[layer] for layer in self.stitch_layers]
        if 0 not in self.exit_layers:
            self.matryoshka_layers = [layer for layer in self.matryoshka_layers if layer > 0]

    def cut(self) -> M3BertConfig:
        """
        Reduce the depth to `output_layer`. Models are built from the result and saved with it. A truncated model keeps
        the exit of its last layer and no other, so layers whose exit is gone are no longer legal; it keeps the static
        table if this exit reads it, and the stitch if this depth is stitched. Its layers are then those of
        [`layers_of`].

        Returns:
            [`M3BertConfig`]: a shallower copy, or this config if it has no deeper layers.
        """
        depth, _ = self.resolve_granularity()
        if depth == self.num_hidden_layers:
            return self
        config = copy.deepcopy(self)
        config.num_hidden_layers = depth
        config.exit_layers, config.static_layers, config.stitch_layers = (
            [layer for layer in layers if layer == depth]
            for layers in (self.exit_layers, self.static_layers, self.stitch_layers)
        )
        config.stitch_top_layers = [self.stitches[layer] for layer in config.stitch_layers]
        config.static_ignored_ids = self.static_ignored_ids if config.static_layers else []
        # Between the first layers and the stitch, a state of the cut is not the one of this model.
        gone = {*self.exit_layers, *range(depth - self.stitches.get(depth, 0) + 1, depth)} - {depth}
        # Without lost layers, an empty list goes on meaning that every layer is legal.
        layers = [layer for layer in self.legal_layers if layer not in gone] if gone else self.matryoshka_layers
        config.matryoshka_layers = [layer for layer in layers if layer <= depth]
        config._stored_layers = layers_of(depth, self)
        if self.source_layers is not None:
            config.source_layers = [self.source_layers[index] for index in config._stored_layers]
        return config

    def to_dict(self) -> dict[str, Any]:
        """As in the base class, with the properties that inference engines read and without unused RoPE parameters."""
        values = super().to_dict()
        values.pop("_stored_layers", None)  # only for the model that is built from this config
        if self.position_embedding_type != "rope":
            values.pop("rope_parameters", None)
        if not self.exit_layers:
            del values["exit_layers"], values["exit_fit"]
        if not self.static_layers:
            del values["static_layers"], values["static_ignored_ids"]
        if self.source_layers is None:
            del values["source_layers"]
        if not self.stitch_layers:
            del values["stitch_layers"], values["stitch_top_layers"]
        derived = {"is_matryoshka": self.is_matryoshka, "matryoshka_dimensions": self.matryoshka_dimensions}
        return {**values, **derived}


def tensor_parallel_plan(mlp_gated: bool) -> dict[str, str]:
    """Tensor-parallel style of every projection of an encoder."""
    plan = {f"layers.*.self_attn.{name}_proj": "colwise" for name in "qkv"}
    plan |= {"layers.*.self_attn.o_proj": "rowwise"}
    if mlp_gated:
        plan |= {"layers.*.mlp.gate_proj": "colwise"}
    return plan | {"layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}


def default_top_layers(depth: int) -> int:
    """How many of the layers of a stitched depth are the model's last ones by default."""
    return max(1, depth // 2)


def layers_of(depth: int, config: M3BertConfig) -> list[int]:
    """
    The layers that a depth runs, counted from 0, in their order: the first ones, and if the depth is stitched, the
    first and the last ones.

    Args:
        depth (`int`): In 0..num_hidden_layers.
        config ([`M3BertConfig`]): Config of the model that has the layers.
    """
    top, last = config.stitches.get(depth, 0), config.num_hidden_layers
    return [*range(depth - top), *range(last - top, last)]


def plan_of(depths: Iterable[int], config: M3BertConfig) -> tuple[int, list[int]]:
    """
    How to run several depths at once.

    Args:
        depths (`Iterable[int]`): In 0..num_hidden_layers.
        config ([`M3BertConfig`]): Config of the model.

    Returns:
        `tuple[int, list[int]]`: the number of first layers to run, and the stitched depths whose last layers run after
        them, one depth after another.
    """
    ordered = sorted(set(depths))
    stitched = [depth for depth in ordered if depth in config.stitch_layers]
    return max(depth - config.stitches.get(depth, 0) for depth in ordered), stitched


def _legal(trained: Iterable[int], largest: int) -> list[int]:
    return sorted({*trained, largest}) if trained else list(range(1, largest + 1))


def _spell(values: list[int]) -> str:
    return f"1..{values[-1]}" if values == list(range(1, values[-1] + 1)) else ", ".join(map(str, values))


M3BertConfig.register_for_auto_class()

__all__ = ["AUTO_MAP", "M3BertConfig", "default_top_layers", "layers_of", "plan_of"]
