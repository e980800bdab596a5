"""Where and how an encoder computes: the only place that chooses a device."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..utils.help_texts import described


if TYPE_CHECKING:  # the commands print their help without loading torch
    import torch

Model = TypeVar("Model", bound="torch.nn.Module")
DTYPES = ("float32", "bfloat16", "float16")


@described
@dataclass
class ComputeArguments:
    """
    Where and how an encoder computes.

    Args:
        device (`str`, *optional*): Device, such as `cuda`, `cuda:1`, `mps`, `xpu`, `npu` or `cpu`. Default: the
            accelerator of this machine if there is one, else `cpu`.
        compute_dtype (`str`, *optional*, defaults to `"float32"`): Type of the matrix products: `float32`, `bfloat16`
            or `float16` (mixed precision). Weights and stored embeddings keep their type.
        attn_implementation (`str`, *optional*): Attention of transformers: `eager`, `sdpa`, `flex_attention`,
            `flash_attention_2`, `_3` or `_4`, or a kernel of the Hub (`kernels-community/flash-attn2`). Default:
            `sdpa` if the model has it, else `eager`.
        compile (`bool`, *optional*, defaults to `False`): Compile the encoder with torch.compile: the first batches
            take longer, all others less time.

    Raises:
        ValueError: if the type is unknown, or not one that the attention computes in.
    """

    device: str | None = None
    compute_dtype: str = "float32"
    attn_implementation: str | None = None
    compile: bool = False

    def __post_init__(self) -> None:
        if self.compute_dtype not in DTYPES:
            raise ValueError(f"compute_dtype={self.compute_dtype!r} is unknown; legal values: {', '.join(DTYPES)}.")
        if self.compute_dtype == "float32" and self.attn_implementation is not None:
            from .states import is_flash

            if is_flash(self.attn_implementation):
                name = self.attn_implementation
                raise ValueError(f"attn_implementation={name!r} needs half precision: set compute_dtype to bfloat16.")

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


def device_of(name: str | None = None) -> torch.device:
    """The device of a name. Default: the accelerator of this machine if there is one, else `cpu`."""
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return torch.device(name or accelerator or "cpu")


def place(model: Model, options: ComputeArguments) -> Model:
    """
    Prepare a model (also of peft, with or without a head) as the options say, in place, and return it.
    Half-precision weights are upcast to float32 (lossless) unless another type is set; float32 weights stay float32,
    see [`autocast`]. Quantised weights keep their type.
    """
    import torch

    from .states import unwrap_encoder

    encoder = unwrap_encoder(model)
    if options.attn_implementation is not None:
        encoder.set_attn_implementation(options.attn_implementation)
    quantized = getattr(encoder.config, "quantization_config", None) is not None
    if options.compute_dtype == "float32" and encoder.dtype in (torch.bfloat16, torch.float16) and not quantized:
        model.float()
    model.to(options.torch_device)
    if options.compile:
        encoder.compile(dynamic=True)  # wraps the call only, so that names of weights and wrappers stay as they are
    return model


def autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[None]:
    """A context in which matrix products are computed in `dtype`; `None` leaves all types as they are."""
    import torch

    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
