"""m3BERT configuration: the architecture's sizes and switches, and the one rule for which granularities are legal."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from transformers.configuration_utils import PreTrainedConfig


AUTO_MAP = {
    "AutoConfig": "configuration_m3bert.M3BertConfig",
    "AutoModel": "modeling_m3bert.M3BertModel",
    "AutoModelForMaskedLM": "modeling_m3bert.M3BertForMaskedLM",
    "AutoModelForSequenceClassification": "modeling_m3bert.M3BertForSequenceClassification",
    "AutoModelForTokenClassification": "modeling_m3bert.M3BertForTokenClassification",
    "AutoModelForQuestionAnswering": "modeling_m3bert.M3BertForQuestionAnswering",
    "AutoModelForMultipleChoice": "modeling_m3bert.M3BertForMultipleChoice",
}


class M3BertConfig(PreTrainedConfig):
    r"""
    Configuration of an m3BERT encoder ([m3BERT](https://huggingface.co/papers/2605.19568), sections 2.2 and 2.3). The
    defaults are the paper's base model: 305,660,928 parameters.

    A *granularity* is a pair (layer, dim): the state after `layer`, cut to its first `dim` entries. `output_layer` and
    `output_dim` choose one. They mean the same here, in `from_pretrained` and in every `forward`, and go through
    [`~M3BertConfig.resolve_granularity`].

    Args:
        vocab_size (`int`, *optional*, defaults to 250002): Number of tokens (the multilingual-E5 tokenizer).
        hidden_size (`int`, *optional*, defaults to 768): Width of the states.
        intermediate_size (`int`, *optional*, defaults to 3072): Width inside the feed-forward layer.
        num_hidden_layers (`int`, *optional*, defaults to 12): Number of layers.
        num_attention_heads (`int`, *optional*, defaults to 12): Number of attention heads.
        hidden_act (`str`, *optional*, defaults to `"silu"`): Activation of the feed-forward layer.
        mlp_gated (`bool`, *optional*, defaults to `True`): Gate the feed-forward layer (SwiGLU with `"silu"`).
        norm_type (`str`, *optional*, defaults to `"rmsnorm"`): `"rmsnorm"` or `"layernorm"`.
        norm_position (`str`, *optional*, defaults to `"pre"`): `"pre"`, with a final norm, or `"post"`, as in BERT.
        norm_eps (`float`, *optional*, defaults to 1e-5): Added to the variance in every norm.
        embedding_dropout (`float`, *optional*, defaults to 0.1): Dropout on the normed embeddings.
        hidden_dropout (`float`, *optional*, defaults to 0.0): Dropout on the output of attention and feed-forward.
        attention_dropout (`float`, *optional*, defaults to 0.1): Dropout on the attention probabilities.
        attention_bias (`bool`, *optional*, defaults to `False`): Biases in the four attention projections.
        mlp_bias (`bool`, *optional*, defaults to `False`): Biases in the feed-forward projections.
        max_position_embeddings (`int`, *optional*, defaults to 512): Longest sequence.
        position_embedding_type (`str`, *optional*, defaults to `"absolute"`): Learned `"absolute"` or `"rope"`.
        rope_parameters (`dict`, *optional*): RoPE parameters, read with `position_embedding_type="rope"` only.
        initializer_range (`float`, *optional*, defaults to 0.02): Standard deviation of the initial weights.
        tie_word_embeddings (`bool`, *optional*, defaults to `False`): Share the MLM projection with the embeddings.
        sparse_prediction (`bool`, *optional*, defaults to `False`): With labels, project only the labelled tokens; the
            MLM head then returns logits of shape `(num_labelled, vocab_size)`.
        classifier_pooling (`str`, *optional*, defaults to `"mean"`): `"mean"` over real tokens or `"cls"`.
        classifier_dropout (`float`, *optional*, defaults to 0.0): Dropout before a classification head.
        matryoshka_layers (`list[int]`, *optional*): Layers trained to be read, ascending. `None` takes the thirds of
            the depth (the paper's 4, 8, 12); an empty list says that none was trained for it, and then all are legal.
        matryoshka_dims (`list[int]`, *optional*): Prefix dims trained to be read, ascending. `None` takes those of 32,
            64, 128 that are below `hidden_size`, and `hidden_size`; an empty list as for `matryoshka_layers`.
        converted_from (`str`, *optional*): Hub id of the encoder that the weights were converted from.
        output_layer (`int`, *optional*): Layer to read. A model is built with so many layers. `None` is the last one.
        output_dim (`int`, *optional*): Dims to return. `None` is all of them.

    Raises:
        ValueError: if a switch has an unknown value, a matryoshka layer or dim is outside the model, or `output_layer`
            or `output_dim` is not legal; the text names the legal values.

    ```python
    >>> from modeling_m3bert import M3BertConfig, M3BertModel

    >>> model = M3BertModel(M3BertConfig(output_layer=4, output_dim=64))
    >>> len(model.layers)
    4
    ```
    """

    model_type = "m3bert"
    base_model_tp_plan = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
    }
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
    rope_parameters: dict = None  # type: ignore[assignment]  # the base class fills it
    initializer_range: float = 0.02
    tie_word_embeddings: bool = False
    sparse_prediction: bool = False
    classifier_pooling: str = "mean"
    classifier_dropout: float = 0.0
    bos_token_id: int | None = 0
    pad_token_id: int | None = 1
    eos_token_id: int | None = 2
    # Lists from `__post_init__` on.
    matryoshka_layers: list[int] = None  # type: ignore[assignment]
    matryoshka_dims: list[int] = None  # type: ignore[assignment]
    converted_from: str | None = None
    output_layer: int | None = None
    output_dim: int | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        # Derived on the way out (see `to_dict`), so what an old file says about them must not shadow the lists.
        for derived in ("is_matryoshka", "matryoshka_dimensions"):
            kwargs.pop(derived, None)
        # Saving a model registers its own class only; a checkpoint should open with any head.
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        depth, width = self.num_hidden_layers, self.hidden_size
        if self.matryoshka_layers is None:
            self.matryoshka_layers = [depth // 3, 2 * depth // 3, depth] if depth % 3 == 0 else [depth]
        if self.matryoshka_dims is None:
            self.matryoshka_dims = [dim for dim in (32, 64, 128) if dim < width] + [width]
        super().__post_init__(**kwargs)
        self.validate_architecture()
        self.resolve_granularity()

    def validate_architecture(self) -> None:
        """Check the switches and the matryoshka lists. Raises a ValueError that names what is legal."""
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
        for name, values, largest in (
            ("matryoshka_layers", self.matryoshka_layers, self.num_hidden_layers),
            ("matryoshka_dims", self.matryoshka_dims, self.hidden_size),
        ):
            if sorted(set(values)) != list(values) or any(not 1 <= value <= largest for value in values):
                raise ValueError(f"{name}={values} must be ascending and within 1..{largest}.")

    @property
    def is_matryoshka(self) -> bool:
        """Whether some granularity below the full one was trained to be read."""
        below_depth = any(layer < self.num_hidden_layers for layer in self.matryoshka_layers)
        return below_depth or any(dim < self.hidden_size for dim in self.matryoshka_dims)

    @property
    def matryoshka_dimensions(self) -> list[int]:
        """`matryoshka_dims` up to `output_dim`, under the name that serving engines read."""
        widest = self.output_dim or self.hidden_size
        return [dim for dim in self.matryoshka_dims if dim <= widest]

    @property
    def legal_layers(self) -> list[int]:
        """Layers that may be read: the trained ones and the last; every layer where none was trained for it."""
        return _legal(self.matryoshka_layers, self.num_hidden_layers)

    @property
    def legal_dims(self) -> list[int]:
        """Dims that may be read: the trained ones and the full width; every dim where none was trained for it."""
        return _legal(self.matryoshka_dims, self.hidden_size)

    def resolve_granularity(self, output_layer: int | None = None, output_dim: int | None = None) -> tuple[int, int]:
        """
        The granularity that is meant: the arguments, else the config's own values, else the full size.

        Args:
            output_layer (`int`, *optional*): Layer to read.
            output_dim (`int`, *optional*): Dims to keep.

        Returns:
            `tuple[int, int]`: layer in 1..depth, dim in 1..hidden_size.

        Raises:
            ValueError: for a value that is not legal, naming the legal ones.
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

    def cut(self) -> M3BertConfig:
        """This config with `output_layer` layers and no more: what a model is built from and saved with."""
        depth, _ = self.resolve_granularity()
        if depth == self.num_hidden_layers:
            return self
        config = copy.deepcopy(self)
        config.num_hidden_layers = depth
        config.matryoshka_layers = [layer for layer in self.matryoshka_layers if layer <= depth]
        return config

    def to_dict(self) -> dict[str, Any]:
        published = {"is_matryoshka": self.is_matryoshka, "matryoshka_dimensions": self.matryoshka_dimensions}
        return {**super().to_dict(), **published}


def _legal(trained: Iterable[int], largest: int) -> list[int]:
    return sorted({*trained, largest}) if trained else list(range(1, largest + 1))


def _spell(values: list[int]) -> str:
    return f"1..{values[-1]}" if values == list(range(1, values[-1] + 1)) else ", ".join(map(str, values))


M3BertConfig.register_for_auto_class()

__all__ = ["AUTO_MAP", "M3BertConfig"]
