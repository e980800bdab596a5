"""Where and how an encoder computes: the only place that chooses a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .help_texts import described


if TYPE_CHECKING:  # the commands print their help without loading torch
    import torch

DTYPES = ("float32", "bfloat16", "float16")
# Name of an attention -> the attribute of a model's class that says whether it has it.
ATTENTIONS = {
    "eager": None,
    "sdpa": "_supports_sdpa",
    "flex_attention": "_supports_flex_attn",
    "flash_attention_2": "_supports_flash_attn",
    "flash_attention_3": "_supports_flash_attn",
}


@described
@dataclass
class ComputeArguments:
    """
    Where and how an encoder computes.

    Args:
        device (`str`, *optional*): Device, such as `cuda`, `cuda:1`, `mps`, `xpu`, `npu` or `cpu`. Default: the
            accelerator of this machine if there is one, else `cpu`.
        compute_dtype (`str`, *optional*, defaults to `"float32"`): Type of the matrix products: `float32`, `bfloat16`
            or `float16` (mixed precision). Weights and stored embeddings keep their own type.
        attn_implementation (`str`, *optional*): Attention of transformers: `eager`, `sdpa`, `flex_attention`,
            `flash_attention_2` or `flash_attention_3`. Default: `sdpa` if the model has it, else `eager`.
        compile (`bool`, *optional*, defaults to `False`): Compile the encoder with torch.compile: the first batches
            take longer, all others less time.

    Raises:
        ValueError: if the device is not there, or the type or the attention is unknown.
    """

    device: str | None = None
    compute_dtype: str = "float32"
    attn_implementation: str | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        device_of(self.device)
        if self.compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype={self.compute_dtype!r} is unknown; legal values: {', '.join(DTYPES)}.")
        if self.attn_implementation not in (None, *ATTENTIONS):
            raise ValueError(
                f"attn_implementation={self.attn_implementation!r} is unknown; legal values: {', '.join(ATTENTIONS)}."
            )

    @property
    def torch_device(self) -> torch.device:
        """The device."""
        return device_of(self.device)

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The type for mixed precision; `None` if all is computed in the type of the weights."""
        import torch

        return None if self.compute_dtype == "float32" else getattr(torch, self.compute_dtype)

    @property
    def uses_cpu(self) -> bool:
        """Whether the device is the CPU."""
        return self.torch_device.type == "cpu"


def has_accelerator() -> bool:
    """Whether this machine has an accelerator (cuda, mps, xpu, npu, ...)."""
    import torch

    return torch.accelerator.is_available()


def device_of(name: str | None = None) -> torch.device:
    """
    The device of a name. Default: the accelerator of this machine (cuda, mps, xpu, npu, ...) if there is one, else
    `cpu`.

    Raises:
        ValueError: if this machine does not have the device.
    """
    import torch

    legal = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if has_accelerator() else None
    if accelerator is not None:
        kind = accelerator.type
        legal = [kind, *(f"{kind}:{index}" for index in range(torch.accelerator.device_count())), "cpu"]
    if name not in (None, *legal):
        raise ValueError(f"device={name!r} is not on this machine; legal values: {', '.join(legal)}.")
    return torch.device(name or legal[0])


def place(model: Any, options: ComputeArguments) -> Any:
    """
    Prepare a model as the options say, in place. Half-precision weights are upcast to float32 (lossless) unless
    another type is set; float32 weights stay float32, see [`autocast`]. Quantised weights keep their type.

    Args:
        model ([`~transformers.PreTrainedModel`] or peft model): The model, with or without a head.
        options ([`ComputeArguments`]): The options.

    Returns:
        The model.

    Raises:
        ValueError: if the model does not have the attention.
    """
    import torch

    from .states import unwrap_encoder

    encoder = unwrap_encoder(model)
    if options.attn_implementation is not None:
        set_attention(encoder, options.attn_implementation)
    quantized = getattr(encoder.config, "quantization_config", None) is not None
    if options.compute_dtype == "float32" and encoder.dtype in (torch.bfloat16, torch.float16) and not quantized:
        model.float()
    model.to(options.torch_device)
    if options.compile:
        encoder.compile(dynamic=True)  # its own call, so that names of weights and wrappers stay as they are
    return model


def set_attention(model: Any, name: str) -> None:
    """
    Choose the attention of a model.

    Args:
        model ([`~transformers.PreTrainedModel`]): The model; changed in place.
        name (`str`): One of `ATTENTIONS`.

    Raises:
        ValueError: if the name is unknown, the model does not have this attention, or a package is missing for it.
    """
    legal = [key for key, flag in ATTENTIONS.items() if flag is None or getattr(model, flag)]
    reason = f"{type(model).__name__} does not have it" if name in ATTENTIONS else "it is unknown"
    if name in legal:
        try:
            model.set_attn_implementation(name)
            return
        except (ImportError, ValueError) as error:
            reason = str(error).splitlines()[0].rstrip(".")
    raise ValueError(f"attn_implementation={name!r} cannot be used: {reason}; legal values: {', '.join(legal)}.")


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """A context in which matrix products are computed in `dtype`; `None` leaves all types as they are."""
    import torch

    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
