"""m3BERT configuration: sizes and switches of the architecture, and the granularities that are legal."""

from __future__ import annotations

from typing import Any


try:
    from transformers.configuration_utils import PreTrainedConfig
except ImportError:  # the name is new in version 5
    from transformers import __version__

    raise ImportError(
        f"m3BERT needs transformers 5.0 or later, and {__version__} is installed. Upgrade transformers, or use the "
        "native export of this checkpoint, which every version loads (`m3bert export --format native`)."
    ) from None

from .configuration_elastic import Elasticity, legal_dims, legal_layers, resolve_size


AUTO_MAP = {
    "AutoConfig": "configuration_m3bert.M3BertConfig",
    "AutoModel": "modeling_m3bert.M3BertModel",
    "AutoModelForMaskedLM": "modeling_m3bert.M3BertForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_m3bert.M3BertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_m3bert.M3BertForTokenClassification",
}
UNSET: Any = None  # default of a field that `__post_init__` replaces


def _with_fields(base: Any) -> Any:
    """The config class of transformers 5.0 to 5.3, with the fields and the `__post_init__` of later versions."""

    class WithFields(base):
        def __init__(self, **kwargs: Any):
            for name in type(self).__annotations__:
                setattr(self, name, kwargs.pop(name, getattr(type(self), name)))
            self.__post_init__(**kwargs)

        def __post_init__(self, **kwargs: Any) -> None:
            super().__init__(**kwargs)

    return WithFields


if not hasattr(PreTrainedConfig, "__post_init__"):
    # Not an assignment: tools that read the fields from the code would follow it.
    globals()["PreTrainedConfig"] = _with_fields(PreTrainedConfig)


class M3BertConfig(PreTrainedConfig):
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
        elastic (`dict`, *optional*): Depths with their exits, paths and static table ([`Elasticity`]). Models of new
            weights have none.
        converted_from (`str`, *optional*): Hub id of the encoder that the weights were converted from.
        native_model_type (`str`, *optional*): Model type of that encoder, such as `"xlm-roberta"`.
        source_layers (`list[int]`, *optional*): The layers of that encoder that the model was made of, counted from 1,
            if they were chosen. `None` means the first ones.
        output_layer (`int`, *optional*): Output layer. Models are built with this many layers. `None` means the last.
            0 selects the static table, if there is one.
        output_dim (`int`, *optional*): Number of dimensions to return. `None` means all.

    Raises:
        ValueError: if a switch has an unknown value, a matryoshka layer or dim or a depth of `elastic` is outside the
            model, or `output_layer` or `output_dim` is not legal. The message names the legal values.

    ```python
    >>> from m3bert.modeling import M3BertConfig, M3BertModel

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
    rope_parameters: dict = UNSET
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    sparse_prediction: bool = False
    classifier_pooling: str = "mean"
    classifier_dropout: float = 0.0
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | None = 2
    matryoshka_layers: list[int] = UNSET
    matryoshka_dims: list[int] = UNSET
    elastic: dict | None = None
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
        if self.matryoshka_dims is None:
            self.matryoshka_dims = [dim for dim in (32, 64, 128) if dim < width] + [width]
        columns = [f"self_attn.{name}_proj" for name in "qkv"] + ["mlp.gate_proj"] * self.mlp_gated + ["mlp.up_proj"]
        self.base_model_tp_plan = {
            **{f"layers.*.{name}": "colwise" for name in columns},
            **{f"layers.*.{name}": "rowwise" for name in ("self_attn.o_proj", "mlp.down_proj")},
        }
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
        depths = Elasticity.of(self)
        depths.validate(self)
        for name, values, smallest, largest in (
            ("matryoshka_layers", self.matryoshka_layers, 0 if 0 in depths.exits else 1, self.num_hidden_layers),
            ("matryoshka_dims", self.matryoshka_dims, 1, self.hidden_size),
        ):
            if sorted(set(values)) != list(values) or any(not smallest <= value <= largest for value in values):
                raise ValueError(f"{name}={values} must be ascending and within {smallest}..{largest}.")

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
    def legal_layers(self) -> list[int]:
        """Legal output layers: trained ones, those of `elastic`, and the last; or every layer if none was trained."""
        return legal_layers(self)

    @property
    def legal_dims(self) -> list[int]:
        """Legal output dims: the trained ones and the hidden size, or every dim if none was trained."""
        return legal_dims(self)

    def resolve_granularity(self, output_layer: int | None = None, output_dim: int | None = None) -> tuple[int, int]:
        """The granularity to output, or a ValueError that names the legal values."""
        return resolve_size(self, output_layer, output_dim)

    def to_dict(self) -> dict[str, Any]:
        """As in the base class, with the properties that inference engines read and without unused RoPE parameters."""
        values = super().to_dict()
        if self.position_embedding_type != "rope":
            values.pop("rope_parameters", None)
        for name in ("elastic", "source_layers"):
            if values[name] is None:
                del values[name]
        derived = {"is_matryoshka": self.is_matryoshka, "matryoshka_dimensions": self.matryoshka_dimensions}
        return {**values, **derived}


M3BertConfig.register_for_auto_class()
