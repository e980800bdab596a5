"""
Embeddings in two bits or fewer per dim, after QAMA: a nested transform, thresholds per dim, and thermometer codes,
whose Hamming distance is the difference of levels.

This is one file with no import from the rest of the project, because it is published with a checkpoint as remote code:

```python
quantizer = AutoModel.from_pretrained(repo, subfolder="quantizer", trust_remote_code=True)
codes = quantizer.encode(embeddings, "qama-2", dim=64)  # codes.packed: uint8, 24 bytes per vector
scores = quantizer.scores(query_embeddings, codes)  # float queries; quantizer.hamming compares codes with codes
```
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from transformers.configuration_utils import PreTrainedConfig
from transformers.modeling_utils import PreTrainedModel


AUTO_MAP = {
    "AutoConfig": "quantization_m3bert.M3BertQuantizerConfig",
    "AutoModel": "quantization_m3bert.M3BertQuantizer",
}
# Bits of a dim -> the levels of one stored number, and the dims that are reduced to one number before.
LEVELS = {"2": 4, "1.5": 3, "1": 2, "0.5": 2}
DIMS_PER_UNIT = {"2": 1, "1.5": 1, "1": 1, "0.5": 2}
HYBRID = "qama-hybrid"  # a quarter of the dims at each number of bits, most bits first
CODES = ("qama-2", HYBRID, "qama-1.5", "qama-1", "qama-0.5")
SKIPS = ("none", "identity", "principal")
UNSET: Any = None  # default of a field that `__post_init__` replaces
LARGEST_SAMPLE = 65_536  # vectors that thresholds and principal components are computed from


def segments(code: str, dim: int) -> list[tuple[str, int, int]]:
    """Bits, first dim and end of each part of a vector that has its own number of bits. Every part but the last has an
    even number of dims, because `0.5` takes dims in pairs. Raises a ValueError on an unknown code."""
    if code not in CODES:
        raise ValueError(f"{code!r} is not a precision of a quantizer; legal values: {', '.join(CODES)}.")
    if code != HYBRID:
        return [(code.removeprefix("qama-"), 0, dim)]
    ends = [*(2 * round(dim * quarter / 8) for quarter in (1, 2, 3)), dim]
    parts = zip(LEVELS, [0, *ends], ends, strict=False)
    return [(bits, start, end) for bits, start, end in parts if end > start]


def stored_units(bits: str, dims: int) -> int:
    """Numbers that are stored for some dims: one per dim, or one per pair of dims, of which the last may be single."""
    return -(-dims // DIMS_PER_UNIT[bits])


def stored_bits(code: str, dim: int) -> int:
    """Bits of a stored vector, before it is padded to whole bytes: `levels - 1` per stored number. Raises a ValueError
    on an unknown code."""
    return sum((LEVELS[bits] - 1) * stored_units(bits, end - start) for bits, start, end in segments(code, dim))


def pack_bits(bits: torch.Tensor) -> torch.Tensor:
    """Eight bits per byte, first bit highest and the last byte filled with zeros, as `numpy.packbits`: from
    `(vectors, bits)` to `(vectors, ceil(bits / 8))`."""
    padded = nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[-1] % 8))
    weights = torch.tensor([128, 64, 32, 16, 8, 4, 2, 1], dtype=torch.uint8, device=bits.device)
    return (padded.unflatten(-1, (-1, 8)) * weights).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The first `count` bits `(vectors, count)` of each row of [`pack_bits`]."""
    if packed.shape[-1] != -(-count // 8):
        raise ValueError(f"{count} bits take {-(-count // 8)} bytes per vector, not {packed.shape[-1]}.")
    shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(-2)[..., :count].bool()


def quantile_thresholds(numbers: torch.Tensor, levels: int) -> torch.Tensor:
    """Thresholds `(levels - 1, dims)`, ascending, that divide the numbers of each dim `(vectors, dims)` into equally
    frequent levels."""
    at = torch.arange(1, levels, dtype=numbers.dtype, device=numbers.device) / levels
    # torch.quantile reads at most 2^24 numbers at a time.
    parts = numbers.split(max(1, 2**24 // max(1, len(numbers))), dim=1)
    return torch.cat([torch.quantile(part, at, dim=0) for part in parts], dim=1)


def levels_of(numbers: torch.Tensor, thresholds: torch.Tensor) -> torch.Tensor:
    """The level of each number `(vectors, dims)`: how many thresholds `(levels - 1, dims)` of its dim it is above."""
    return (numbers.unsqueeze(1) > thresholds).sum(dim=1)


def level_means(numbers: torch.Tensor, levels: torch.Tensor, count: int) -> torch.Tensor:
    """Mean `(count, dims)` of the numbers `(vectors, dims)` at each level of each dim: the value that a stored level
    stands for. For a level that no vector has, the mean of the whole dim."""
    sums = numbers.new_zeros(count, numbers.shape[1]).scatter_add_(0, levels, numbers)
    sizes = numbers.new_zeros(count, numbers.shape[1]).scatter_add_(0, levels, torch.ones_like(numbers))
    return torch.where(sizes > 0, sums / sizes.clamp(min=1), numbers.mean(dim=0))


@dataclass(frozen=True)
class Codes:
    """
    Quantised embeddings.

    Args:
        packed (`torch.ByteTensor` of shape `(vectors, bytes)`): Packed bits, for a binary index.
        code (`str`): One of [`CODES`].
        dim (`int`): Dims of the vectors.
        fingerprint (`str`): The [`~M3BertQuantizer.fingerprint`] of the quantizer.
    """

    packed: torch.Tensor
    code: str
    dim: int
    fingerprint: str

    def __len__(self) -> int:
        return len(self.packed)

    def __getitem__(self, rows: Any) -> Codes:
        """The codes of some rows."""
        return replace(self, packed=self.packed[rows])

    @property
    def bits(self) -> int:
        """Bits per vector. Bits up to the next whole byte are zero."""
        return stored_bits(self.code, self.dim)

    def save(self, file: str | Path) -> None:
        """Write the codes, with all that [`Codes.load`] needs, to a safetensors file."""
        metadata = {"code": self.code, "dim": str(self.dim), "fingerprint": self.fingerprint}
        save_file({"packed": self.packed.contiguous()}, file, metadata)

    @classmethod
    def load(cls, file: str | Path) -> Codes:
        """Read codes from a file of [`Codes.save`]."""
        with safe_open(file, "pt") as opened:
            metadata = opened.metadata()
            return cls(opened.get_tensor("packed"), metadata["code"], int(metadata["dim"]), metadata["fingerprint"])


class M3BertQuantizerConfig(PreTrainedConfig):
    """
    Configuration of an [`M3BertQuantizer`].

    Args:
        hidden_size (`int`, *optional*, defaults to 384): Dims of the embeddings.
        intermediate_size (`int`, *optional*): Dims inside the feed-forward transform. Default: `2 * hidden_size`; the
            paper's code has `32 * hidden_size`.
        skip (`str`, *optional*, defaults to `"identity"`): What is added to the output of the feed-forward transform.
            `"none"`: nothing, as in the paper. `"identity"`: the embedding. `"principal"`: a trained linear map of the
            embedding that starts as a rotation to principal components, mixed within each nested dim. With a skip, the
            feed-forward transform starts as zero.
        dims (`list[int]`, *optional*): Nested dims, ascending. Default: the hidden size, halved up to three times.
        layers (`list[int]`, *optional*): Layers of the encoder whose embeddings it quantises. Default: none are known.
        momentum (`float`, *optional*, defaults to 0.995): Share of the old thresholds in a moving average.

    Raises:
        ValueError: if a value is out of range.
    """

    model_type = "m3bert_quantizer"

    hidden_size: int = 384
    intermediate_size: int = UNSET
    skip: str = "identity"
    dims: list[int] = UNSET
    layers: list[int] = UNSET
    momentum: float = 0.995

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("auto_map", dict(AUTO_MAP))
        width = self.hidden_size
        if self.intermediate_size is None:
            self.intermediate_size = 2 * width
        if self.dims is None:
            self.dims = sorted({max(1, width // 2**power) for power in range(4)})
        if self.layers is None:
            self.layers = []
        super().__post_init__(**kwargs)
        if self.skip not in SKIPS:
            raise ValueError(f"skip={self.skip!r} is unknown; legal values: {', '.join(SKIPS)}.")

        if not self.dims or self.dims != sorted(set(self.dims)) or self.dims[0] < 1 or self.dims[-1] != width:
            raise ValueError(f"dims={self.dims} must ascend from 1 or more to hidden_size={width}.")


class M3BertQuantizer(PreTrainedModel):
    """
    Quantises embeddings: a nested feed-forward transform, then levels between thresholds per dim.

    `z = normalize(skip(x) + W2 GELU(W1 x))`, x normalised. Levels are read from z, so the bits of the first dims are
    those of a vector that was truncated to them (not for `qama-hybrid`, whose parts depend on the dim). With `0.5`
    bits, two dims are first reduced to one number by a trained weighted sum. Thresholds and level means are buffers,
    not trained by gradient ([`~M3BertQuantizer.calibrate`], [`~M3BertQuantizer.update_thresholds`]).

    Args:
        config ([`M3BertQuantizerConfig`]): Sizes.
    """

    config_class = M3BertQuantizerConfig
    base_model_prefix = "quantizer"
    main_input_name = "vectors"

    def __init__(self, config: M3BertQuantizerConfig):
        super().__init__(config)
        width = config.hidden_size
        self.up = nn.Linear(width, config.intermediate_size)
        self.down = nn.Linear(config.intermediate_size, width)
        self.skip = nn.Linear(width, width, bias=False) if config.skip == "principal" else None
        self.pair_weights = nn.Parameter(torch.empty(stored_units("0.5", width), 2))
        for bits, levels in LEVELS.items():
            units = stored_units(bits, width)
            self.register_buffer(f"thresholds_{named(bits)}", torch.zeros(levels - 1, units))
            self.register_buffer(f"means_{named(bits)}", torch.zeros(levels, units))
        self.register_buffer("calibrated", torch.tensor(False))
        self._hashed: tuple[tuple[Any, ...], str] | None = None
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        width = self.config.hidden_size
        if module is self:
            module.pair_weights.fill_(0.5**0.5)
            for bits in LEVELS:
                module.thresholds(bits).zero_()
                module.means(bits).zero_()
            module.calibrated.fill_(False)
        elif module is self.skip:
            module.weight.copy_(torch.eye(width))
        elif module is self.down and self.config.skip != "none":
            module.weight.zero_()
            module.bias.zero_()
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
            module.bias.zero_()

    def thresholds(self, bits: str) -> torch.Tensor:
        """Thresholds `(levels - 1, units)` for a number of bits per dim: `"2"`, `"1.5"`, `"1"` or `"0.5"`."""
        return self.get_buffer(f"thresholds_{named(bits)}")

    def means(self, bits: str) -> torch.Tensor:
        """The value that each level stands for, `(levels, units)`."""
        return self.get_buffer(f"means_{named(bits)}")

    def forward(self, vectors: torch.Tensor) -> torch.Tensor:
        """
        Transform embeddings.

        Args:
            vectors (`torch.Tensor` of shape `(..., hidden_size)`): Embeddings; need not be normalised.

        Returns:
            `torch.Tensor` of shape `(..., hidden_size)`, L2-normalised, in float32 or wider.
        """
        with torch.autocast(vectors.device.type, enabled=False):  # thresholds are finer than half precision
            vectors = nn.functional.normalize(vectors.to(self.up.weight.dtype), dim=-1)
            transformed = self.down(nn.functional.gelu(self.up(vectors)))
            if self.skip is not None:
                transformed = transformed + self.skip(vectors)
            elif self.config.skip == "identity":
                transformed = transformed + vectors
            return nn.functional.normalize(transformed, dim=-1)

    def reduce(self, transformed: torch.Tensor, bits: str, start: int = 0) -> torch.Tensor:
        """
        The numbers that are stored `(vectors, units)`, of consecutive transformed dims `(vectors, dims)` from `start`
        on: these, or weighted sums of pairs for `"0.5"` bits. The second dim of an incomplete pair counts as zero; its
        thresholds and level means are those of the whole pair.
        """
        if DIMS_PER_UNIT[bits] == 1:
            return transformed
        pairs = nn.functional.pad(transformed, (0, transformed.shape[-1] % 2)).unflatten(-1, (-1, 2))
        first = start // 2
        return (pairs * self.pair_weights[first : first + pairs.shape[-2]]).sum(dim=-1)

    def parts(self, transformed: torch.Tensor, code: str, dim: int) -> Iterator[tuple[str, slice, torch.Tensor]]:
        """Bits, place among their thresholds, and numbers `(vectors, units)` of each part of a precision."""
        for bits, start, end in segments(code, dim):
            first = start // DIMS_PER_UNIT[bits]
            place = slice(first, first + stored_units(bits, end - start))
            yield bits, place, self.reduce(transformed[..., start:end], bits, start)

    def margins(self, transformed: torch.Tensor, code: str, dim: int) -> torch.Tensor:
        """
        Numbers minus thresholds `(vectors, bits)` of transformed embeddings `(vectors, hidden_size)`, with gradient. A
        bit is set if its margin is above 0: the thermometer code of a level, whose highest threshold comes first, so
        that level 2 of 4 is `0, 1, 1`.
        """
        margins = [
            (numbers.unsqueeze(-1) - self.thresholds(bits)[:, place].flip(0).T).flatten(1)
            for bits, place, numbers in self.parts(transformed, code, dim)
        ]
        return torch.cat(margins, dim=1)

    def units(self, vectors: torch.Tensor, code: str, dim: int | None = None) -> torch.Tensor:
        """
        The numbers that a precision quantises, before quantisation: what a float query is compared with.

        Args:
            vectors (`torch.Tensor` of shape `(vectors, hidden_size)`): Embeddings; need not be normalised.
            code (`str`): One of [`CODES`].
            dim (`int`, *optional*): Leading transformed dims. Default: all.

        Returns:
            `torch.Tensor` of shape `(vectors, units)`
        """
        return torch.cat([numbers for _, _, numbers in self.parts(self(vectors), code, self._checked(dim))], dim=-1)

    @torch.no_grad()
    def encode(self, vectors: torch.Tensor, code: str, dim: int | None = None) -> Codes:
        """
        Quantise embeddings. The codes of a vector do not depend on the other vectors of the call.

        Args:
            vectors (`torch.Tensor` of shape `(vectors, hidden_size)`, or `(hidden_size,)`): Embeddings; need not be
                normalised. One vector alone is a call of one row.
            code (`str`): One of [`CODES`].
            dim (`int`, *optional*): Leading transformed dims to keep. Default: all.

        Returns:
            [`Codes`]

        Raises:
            ValueError: if the quantizer has no thresholds, the code is unknown, an embedding is not finite, or a size
                does not fit.
        """
        if not self.calibrated:
            raise ValueError("This quantizer has no thresholds yet: train it, or call calibrate.")
        dim = self._checked(dim)
        vectors = vectors.reshape(-1, vectors.shape[-1])
        if not torch.isfinite(vectors).all():
            raise ValueError("An embedding is not finite.")

        return Codes(pack_bits(self.margins(self(vectors), code, dim) > 0), code, dim, self.fingerprint)

    def signs(self, codes: Codes) -> torch.Tensor:
        """
        Stored bits as 1 and -1, `(vectors, bits)`: the dot product of two vectors is `bits - 2 * Hamming distance`.

        Raises:
            ValueError: if another quantizer made the codes.
        """
        self.require_own(codes)
        return 2.0 * unpack_bits(codes.packed, codes.bits).to(self.pair_weights.dtype) - 1

    def decode(self, codes: Codes) -> torch.Tensor:
        """
        The numbers that stored levels stand for, `(vectors, units)`: the mean of the level in the training data.

        Raises:
            ValueError: if another quantizer made the codes.
        """
        self.require_own(codes)
        bits_of_all, done, decoded = unpack_bits(codes.packed, codes.bits), 0, []
        for bits, start, end in segments(codes.code, codes.dim):
            units, first = stored_units(bits, end - start), start // DIMS_PER_UNIT[bits]
            count = units * (LEVELS[bits] - 1)
            levels = bits_of_all[:, done : done + count].unflatten(1, (units, -1)).sum(dim=2)
            decoded.append(self.means(bits)[:, first : first + units].gather(0, levels))
            done += count
        return torch.cat(decoded, dim=1)

    @torch.no_grad()
    def scores(self, queries: torch.Tensor, codes: Codes) -> torch.Tensor:
        """
        Cosine of float queries and decoded codes. It ranks better than Hamming distance, for as many stored bytes.

        Args:
            queries (`torch.Tensor` of shape `(queries, hidden_size)`): Embeddings; need not be normalised.
            codes ([`Codes`]): Codes of the documents.

        Returns:
            `torch.Tensor` of shape `(queries, documents)`

        Raises:
            ValueError: if another quantizer made the codes.
        """
        units = nn.functional.normalize(self.units(queries, codes.code, codes.dim), dim=1)
        return units @ nn.functional.normalize(self.decode(codes), dim=1).T

    def hamming(self, codes: Codes, others: Codes) -> torch.Tensor:
        """
        Similarity of codes by Hamming distance, `(codes, others)`: `1 - distance / bits`. For large collections, use a
        binary index of faiss on the packed bytes.

        Raises:
            ValueError: if another quantizer made the codes, or they have different codes or dims.
        """
        if (codes.code, codes.dim) != (others.code, others.dim):
            raise ValueError(f"{codes.code} at {codes.dim} dims and {others.code} at {others.dim} cannot be compared.")
        return (1 + self.signs(codes) @ self.signs(others).T / codes.bits) / 2

    def require_own(self, codes: Codes) -> None:
        """Raise a ValueError if another quantizer made some codes."""
        if codes.fingerprint != self.fingerprint:
            raise ValueError(
                f"These codes are from another quantizer ({codes.fingerprint}, this one is {self.fingerprint}): "
                "encode the texts again."
            )

    @property
    def fingerprint(self) -> str:
        """Identifies the weights and thresholds: equal quantizers give equal codes."""
        tensors = sorted(self.state_dict().items())
        # Hashing takes as long as coding a few vectors: done again only if a tensor was changed or replaced.
        versions = (0 if tensor.is_inference() else tensor._version for _, tensor in tensors)
        state = (self.config.skip, *self.config.layers, *(tensor.data_ptr() for _, tensor in tensors), *versions)
        if self._hashed is None or self._hashed[0] != state:
            digest = blake2b(json.dumps([self.config.skip, self.config.layers]).encode(), digest_size=8)
            for name, tensor in tensors:
                digest.update(name.encode())
                digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            self._hashed = state, digest.hexdigest()
        return self._hashed[1]

    @torch.no_grad()
    def initialize(self, vectors: torch.Tensor) -> None:
        """
        Start from a sample of embeddings: the rotation of the skip `"principal"`, then [`~M3BertQuantizer.calibrate`].

        The rotation has the principal components of the sample. Within the dims that one nested dim adds, they are
        mixed by a random rotation, so that each of these dims has about the same variance and deserves the same bits.

        Args:
            vectors (`torch.Tensor` of shape `(vectors, hidden_size)`): Embeddings; need not be normalised.
        """
        if self.skip is not None:
            vectors = vectors[:LARGEST_SAMPLE].to(self.up.weight.dtype)
            centered = nn.functional.normalize(vectors, dim=1)
            centered = (centered - centered.mean(dim=0)).double()
            rotation = torch.linalg.eigh(centered.T @ centered).eigenvectors.flip(1).T
            generator, start = torch.Generator().manual_seed(0), 0
            for end in self.config.dims:
                mixed = torch.randn(end - start, end - start, generator=generator, dtype=torch.float64)
                rotation[start:end] = torch.linalg.qr(mixed).Q.to(rotation.device) @ rotation[start:end]
                start = end
            self.skip.weight.copy_(rotation)
        self.calibrate(vectors)

    @torch.no_grad()
    def calibrate(self, vectors: torch.Tensor) -> None:
        """
        Set thresholds to the quantiles of a sample of embeddings, and level means to the means of their levels.

        Args:
            vectors (`torch.Tensor` of shape `(vectors, hidden_size)`): Embeddings; need not be normalised. At most
                65,536 are read.

        Raises:
            ValueError: if an embedding is not finite.
        """
        transformed = self(vectors[:LARGEST_SAMPLE])
        if not torch.isfinite(transformed).all():
            raise ValueError("An embedding is not finite.")
        self.update_thresholds(transformed, momentum=0.0)
        self.calibrated.fill_(True)

    @torch.no_grad()
    def update_thresholds(self, transformed: torch.Tensor, momentum: float | None = None) -> None:
        """Move thresholds towards the quantiles of the transformed embeddings of a batch `(vectors, hidden_size)`, and
        level means towards the means between these: `momentum * old + (1 - momentum) * new`, by default with the
        config's momentum."""
        momentum = self.config.momentum if momentum is None else momentum
        for bits, levels in LEVELS.items():
            numbers = self.reduce(transformed, bits)
            thresholds = quantile_thresholds(numbers, levels)
            means = level_means(numbers, levels_of(numbers, thresholds), levels)
            for old, new in ((self.thresholds(bits), thresholds), (self.means(bits), means)):
                old.lerp_(new.to(old.dtype), 1 - momentum)

    def _checked(self, dim: int | None) -> int:
        """The dims to keep; all by default."""
        width = self.config.hidden_size
        dim = width if dim is None else dim
        if not 0 < dim <= width:
            raise ValueError(f"dim={dim} must be within 1..{width}, the dims of this quantizer.")
        return dim


def named(bits: str) -> str:
    """A number of bits as a part of a buffer's name."""
    return bits.replace(".", "_")


M3BertQuantizerConfig.register_for_auto_class()
M3BertQuantizer.register_for_auto_class("AutoModel")
