"""Speed of training, for the log: tokens per second, and the share of the devices' peak that the model uses (MFU)."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from .encoding.packed_rows import DOCUMENTS
from .model import NestedModel
from .parallel.ranks import sum_over_ranks, world_size
from .states import transformer_layers, unwrap_encoder


# Words of a device's name -> peak operations per second in bfloat16 and float16, without sparsity, as its maker states
# them. The first entry whose words are all in the name counts.
PEAKS = {
    ("B200",): 2250e12,
    ("GH200",): 990e12,
    ("H200", "NVL"): 835e12,
    ("H200",): 989e12,
    ("H100", "PCIe"): 756e12,
    ("H100", "NVL"): 835e12,
    ("H100",): 989e12,
    ("A100",): 312e12,
    ("A30",): 165e12,
    ("A10",): 125e12,
    ("A10G",): 70e12,
    ("L40S",): 362e12,
    ("L40",): 181e12,
    ("L4",): 121e12,
}


def peak_of(name: str) -> float | None:
    """Peak operations per second of a device in half precision; `None` if its name is unknown, or that of a part of a
    device (MIG)."""
    words = set(re.split(r"[^A-Za-z0-9]+", name))
    if "MIG" in words:
        return None
    return next((peak for known, peak in PEAKS.items() if words.issuperset(known)), None)


def peak_for(model: NestedModel, args: Any) -> float | None:
    """The peak of this process's devices together; `None` if it is unknown, as on a CPU, or if training is in
    float32."""
    half = args.bf16 or args.fp16 or model.backbone.dtype in (torch.bfloat16, torch.float16)
    if not half or args.device.type != "cuda":
        return None
    peak = peak_of(torch.cuda.get_device_name(args.device))
    return None if peak is None else peak * max(1, args.n_gpu)


@dataclass(frozen=True)
class ModelCost:
    """
    What a training step must compute, for its share of the peak ("model FLOPs",
    [2204.02311](https://huggingface.co/papers/2204.02311), appendix B). Whatever is computed twice to save memory does
    not count.

    Args:
        matrices (`int`): Entries of all matrices that a token is multiplied with, up to the deepest layer read.
        attention (`int`): Width of attention, summed over these layers.
        head (`int`, *optional*, defaults to 0): Entries of the masked-LM head's matrix, at the widest dim of each
            layer, summed over layers: the scores of a prefix are part of those of a longer one.
    """

    matrices: int
    attention: int
    head: int = 0

    @classmethod
    def of(cls, model: NestedModel) -> Self | None:
        """The cost of a model up to the deepest layer that its objective reads; `None` if some matrices are not
        trained, as with an adapter, because their backward pass costs less."""
        objective, encoder = model.objective, unwrap_encoder(model.backbone)
        layers = transformer_layers(encoder)[: max(objective.layers)]
        matrices = [part.weight for layer in layers for part in layer.modules() if isinstance(part, nn.Linear)]
        if not matrices or not all(matrix.requires_grad for matrix in matrices):
            return None
        config, head = encoder.config, model.backbone.get_output_embeddings()
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        widest = sum(max(objective.grid.dims_of(layer)) for layer in objective.grid.layers)
        vocabulary = 0 if head is None else head.weight.shape[0]
        return cls(sum(matrix.numel() for matrix in matrices), len(layers) * width, vocabulary * widest)

    def operations(self, tokens: float, squares: float, labelled: float) -> float:
        """
        A forward pass, and a backward pass of twice the cost.

        Args:
            tokens (`float`): Tokens of the texts, without padding.
            squares (`float`): Sum of the squared lengths of the texts, for attention between all tokens of a text.
            labelled (`float`): Labelled tokens, which the head reads.
        """
        return 3 * (2 * self.matrices * tokens + 4 * self.attention * squares + 2 * self.head * labelled)


def text_lengths(column: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Lengths of the texts of a column without padding, in any order; 0 for texts that do not exist."""
    if DOCUMENTS in column:
        numbers = column[DOCUMENTS].long()
        counts = numbers.new_zeros(len(numbers), numbers.shape[1] + 1)
        return counts.scatter_add_(1, numbers, torch.ones_like(numbers))[:, 1:].flatten()
    if "attention_mask" in column:
        return column["attention_mask"].long().sum(dim=1)
    ids = column["input_ids"]
    return torch.full((len(ids),), ids.shape[1], device=ids.device)


def sizes_of(inputs: Mapping[str, Any]) -> torch.Tensor:
    """Number of tokens of a batch without padding, sum of the squared lengths of its texts, and number of labelled
    tokens: `(3,)`, on the device of the batch. The inputs are those of [`NestedModel`]."""
    columns = [value for value in inputs.values() if isinstance(value, Mapping)] or [inputs]
    lengths = torch.cat([text_lengths(column) for column in columns])
    labels = inputs.get("labels")
    labelled = lengths.new_zeros(()) if labels is None else (labels != -100).sum()
    return torch.stack([lengths.sum(), lengths.square().sum(), labelled])


class ThroughputMeter:
    """
    Counts what is trained on, and turns it into rates. The counts stay on the device until [`pop`] reads them.

    Args:
        cost ([`ModelCost`], *optional*): What the model computes; `None` logs no MFU.
        peak (`float`, *optional*): Peak operations per second of each process's devices; `None` logs no MFU.
        clock (`Callable[[], float]`, *optional*): Monotonic clock, in seconds.
    """

    def __init__(
        self, cost: ModelCost | None, peak: float | None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.cost, self.peak, self.clock = cost, peak, clock
        self.sizes: torch.Tensor | None = None
        self.since: float | None = None

    @classmethod
    def of(cls, model: NestedModel, args: Any) -> Self | None:
        """The meter of a run; `None` if `args.report_throughput` is off, or no encoder is trained."""
        if not args.report_throughput or not model.objective.layers:
            return None
        return cls(ModelCost.of(model), peak_for(model, args))

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Count a batch, before it is trained on. The first one starts the clock."""
        if self.since is None:
            self.since = self.clock()
        sizes = sizes_of(inputs)
        self.sizes = sizes if self.sizes is None else self.sizes + sizes

    def pop(self) -> dict[str, float]:
        """
        The rates since the last call, or since the first batch. All ranks must call it together.

        Returns:
            `dict[str, float]`: `tokens_per_second` of all devices together, without padding, and `mfu`, the share of
            their peak, if both the peak and the cost of the model are known. Empty if nothing was counted.
        """
        if self.sizes is None or self.since is None:
            return {}
        tokens, squares, labelled = sum_over_ranks(self.sizes).tolist()  # waits until the device has computed
        now = self.clock()
        seconds, self.sizes, self.since = now - self.since, None, now
        rates = {"tokens_per_second": tokens / seconds}
        if self.cost is not None and self.peak is not None:
            operations = self.cost.operations(tokens, squares, labelled)
            rates["mfu"] = operations / (seconds * self.peak * world_size())
        return rates
