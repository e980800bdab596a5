"""
Compute what a step of contrastive training needs on many GPUs: memory per GPU, bytes that a GPU sends, and time.

    python -m benchmarks.plan --gpus 8 64 512

By default, the step is that of stage 3 of m3BERT. Nothing is run or measured: docs/scaling.md says what is assumed,
and benchmarks/scaling.py measures how far small steps on a CPU are from it.

Parameters, gradients and both moments of AdamW are float32. Products of the encoder run in `compute_bytes` per number
(2 for bfloat16 autocast, 4 without), the residual stream and pooled embeddings in float32. Attention keeps no
probabilities (flash or memory-efficient kernels). Bytes sent are those of ring algorithms, as in NCCL and gloo.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from hub_cards.tables import markdown
from modeling_m3bert import M3BertConfig, M3BertModel
from scripts.command import argument_parser, run_command
from trainers.losses.candidates import TILE_SIZES


# Assumed, per GPU: peak operations per second in bfloat16 and float32 (an A100's), the share of them that is reached,
# bytes sent per second inside a node of 8 GPUs and between nodes, and memory.
PEAK, FLOAT32_PEAK, UTILISATION = 312e12, 19.5e12, 0.4
NODE_GPUS, NODE_BANDWIDTH, BANDWIDTH = 8, 300e9, 25e9
MEMORY = 80e9

FLOAT, ID = 4, 8
TEXTS = 2  # of a pair
IDS_PER_CANDIDATE = 2
TILE_COPIES = 2  # of a tile: unscaled products, and scores
STRATEGIES = DDP, FSDP = "ddp", "fsdp"
CANDIDATES = GATHER, RING = "gather", "ring"
HEADER = ["GPUs", "strategy", "candidates", "encoding GB", "loss GB", "fits", "sent GB", "compute s", "sending s"]


# Memory of one GPU, in bytes


def sharded(size: float, gpus: int, strategy: str) -> float:
    """Bytes per GPU of parameters, gradients or moments: all of them with DDP, a share with FSDP."""
    return size / gpus if strategy == FSDP else size


def bucket_bytes(parameters: int, gpus: int, strategy: str) -> int:
    """DDP's buckets, which gradients are copied into to be reduced."""
    return FLOAT * parameters if strategy == DDP and gpus > 1 else 0


def unsharded_bytes(parameters: int, layer: int, layers: int, gpus: int, strategy: str) -> int:
    """Bytes that FSDP keeps unsharded: parameters and gradients outside of the layers, two layers of `layer`
    parameters (one prefetched), and the gradient of one layer."""
    return FLOAT * (2 * (parameters - layers * layer) + 3 * layer) if strategy == FSDP and gpus > 1 else 0


def layer_activation_bytes(config: M3BertConfig, compute_bytes: int, fused_norms: bool = True) -> int:
    """
    Activations of one layer and token that the backward pass reads: the inputs of two norms (and, if a norm is not one
    kernel, as on CPUs, their normalised values), the inputs of matrices (autocast casts them once for each matrix),
    queries, keys, values and output of attention with a log-sum-exp per head, and the values in the feed-forward
    layer: gate, its activation, the other branch, and their product.
    """
    width, inner = config.hidden_size, config.intermediate_size
    norms = 2 * (width * (1 if fused_norms else 2) + 1) * FLOAT
    inputs = (2 if compute_bytes == FLOAT else 5) * width * compute_bytes
    attention = 4 * width * compute_bytes + config.num_attention_heads * FLOAT
    return norms + inputs + attention + 4 * inner * compute_bytes


def output_bytes(config: M3BertConfig, read_layers: int, fused_norms: bool = True) -> int:
    """Activations of one token outside of the layers: the embedding before and after its norm, and the normalised
    state of each layer that is read."""
    copies = 1 if fused_norms else 2
    return FLOAT * config.hidden_size * (1 + copies + read_layers * copies)


def backward_bytes(config: M3BertConfig, compute_bytes: int) -> int:
    """Gradients of one token that exist together in the backward pass of a layer, beyond the activations that are
    freed by then: two of the residual stream, and two inside the feed-forward layer."""
    return 2 * config.hidden_size * FLOAT + 2 * config.intermediate_size * compute_bytes


def activation_bytes(
    config: M3BertConfig, read_layers: int, compute_bytes: int, checkpointing: bool, fused_norms: bool
) -> int:
    """Peak of the activations of one token, forward and backward. With gradient checkpointing, a layer keeps only its
    input, and one layer at a time is computed again."""
    layer = layer_activation_bytes(config, compute_bytes, fused_norms)
    layers = config.num_hidden_layers * (config.hidden_size * FLOAT if checkpointing else layer)
    recomputed = layer if checkpointing else 0
    return layers + recomputed + output_bytes(config, read_layers, fused_norms) + backward_bytes(config, compute_bytes)


def candidate_bytes(block: float, gpus: int, layers: int, ring: bool) -> float:
    """
    Candidates and gradients in the backward pass of one layer, for pairs. Gathered, each layer that is still to come
    keeps the candidates of all GPUs, and this one has their gradients and those of its anchors. In a ring there are
    two blocks of candidates, one of which is on its way, and the gradients of one of them and of the anchors.

    Args:
        block (`float`): Bytes of the candidates of one GPU, at the widest dim of the grid.
        gpus (`int`): Number of GPUs.
        layers (`int`): Number of layers whose backward pass is not over, this one included.
        ring (`bool`): Whether candidates go around in a ring.
    """
    return 4 * block if ring and gpus > 1 else ((layers + 1) * gpus + 1) * block


def tile_bytes(anchors: float, candidates: float, dims: int, tile_size: tuple[int, int]) -> float:
    """Similarities in memory at a time in the backward pass of InfoNCE: products, scores and the gradient of each dim,
    a comparison per id, and the mask."""
    entries = min(anchors, tile_size[0]) * min(candidates, tile_size[1])
    return entries * (FLOAT * (TILE_COPIES + dims) + IDS_PER_CANDIDATE + 1)


# Communication of one GPU and step, in bytes sent


def all_reduce_bytes(size: float, gpus: int) -> float:
    """An all-reduce of `size` bytes: a reduce-scatter, and an all-gather of the sums."""
    return 2 * size * (gpus - 1) / gpus


def parameter_communication(parameters: int, gpus: int, strategy: str, forwards: int, backwards: int) -> float:
    """What data parallelism sends in a step. DDP reduces the gradients once. FSDP gathers the parameters in each
    forward and each backward pass of a mini-batch, and reduces the gradients of each: each half an all-reduce."""
    whole = all_reduce_bytes(FLOAT * parameters, gpus)
    return whole if strategy == DDP else (forwards + 2 * backwards) * whole / 2


def candidate_communication(block: float, ids: float, gpus: int, layers: int, ring: bool) -> float:
    """What a contrastive loss sends in a step, for `block` and `ids` bytes of candidates per GPU. Gathered: the
    candidates once, and an all-reduce of the gradients of all, at each layer; ids once. In a ring, at each layer:
    candidates and ids to all other GPUs, twice, and the gradients, back to their owner."""
    others = gpus - 1
    if ring and others:
        return layers * (2 * others * (block + ids) + gpus * block)
    return layers * (others * block + all_reduce_bytes(gpus * block, gpus)) + others * ids


# Operations of one GPU and step (a product and a sum are two)


def passes(cached: bool, checkpointing: bool) -> int:
    """Cost of a step in forward passes: one, a backward pass that costs two, one more with cached gradients, and one
    more with checkpointing."""
    return 3 + cached + checkpointing


def similarity_operations(anchors: float, candidates: float, dim: int, layers: int) -> float:
    """InfoNCE at every layer: the products forward, again backward, and two products for the gradients."""
    return 8 * anchors * candidates * dim * layers


@dataclass(frozen=True)
class Stage:
    """
    A stage of contrastive training.

    Args:
        batch (`int`): Pairs per step, on all GPUs.
        layers (`tuple[int, ...]`): Layers of the grid.
        dims (`tuple[int, ...]`): Dims of the grid.
        length (`int`): Tokens of the longest text, which determine memory.
        tokens (`float`): Mean tokens of a text, which determine time.
    """

    batch: int
    layers: tuple[int, ...]
    dims: tuple[int, ...]
    length: int
    tokens: float


# Stage 3 of m3BERT (2605.19568, sections 2.3 and 4.1). It reads 2 trillion tokens of 10 billion pairs, which is 100
# per text if it reads each pair once. Appendix B truncates at 1,024 tokens, but the base model has 512 positions.
PAPER = Stage(2**20, (4, 12), (32, 64, 128), 512, 100)


@dataclass(frozen=True)
class Step:
    """
    One optimizer step.

    Args:
        config ([`M3BertConfig`]): Sizes of the encoder: pre-norm, with a gated feed-forward layer.
        stage ([`Stage`]): What is trained.
        gpus (`int`): Number of GPUs.
        mini_batch (`int`): Texts that a GPU encodes at a time, with cached gradients.
        strategy (`str`, *optional*, defaults to `"ddp"`): `"ddp"` or `"fsdp"`.
        candidates (`str`, *optional*, defaults to `"gather"`): `"gather"` or `"ring"`.
        checkpointing (`bool`, *optional*, defaults to `False`): Gradient checkpointing of the layers.
        cached (`bool`, *optional*, defaults to `True`): Whether gradients are cached.
        compute_bytes (`int`, *optional*, defaults to 2): Bytes per number of the products: 2, or 4 without autocast.
        fused_norms (`bool`, *optional*, defaults to `True`): Whether a norm is one kernel, as on GPUs.
        tile_size (`tuple[int, int]`, *optional*): Anchors and candidates of a tile. Default: those of GPUs.

    Raises:
        ValueError: if the batch cannot be divided over the GPUs, or the grid is outside the model.
    """

    config: M3BertConfig
    stage: Stage
    gpus: int
    mini_batch: int
    strategy: str = DDP
    candidates: str = GATHER
    checkpointing: bool = False
    cached: bool = True
    compute_bytes: int = 2
    fused_norms: bool = True
    tile_size: tuple[int, int] = TILE_SIZES["cuda"]

    def __post_init__(self) -> None:
        if min(self.gpus, self.mini_batch, self.stage.batch) < 1 or self.stage.batch % self.gpus:
            raise ValueError(f"A batch of {self.stage.batch} pairs cannot be divided over {self.gpus} GPUs.")
        deepest, widest = self.config.num_hidden_layers, self.config.hidden_size
        if max(self.stage.layers) > deepest or max(self.stage.dims) > widest:
            raise ValueError(f"The grid is outside the model, which has {deepest} layers and {widest} dims.")

    @cached_property
    def model(self) -> M3BertModel:
        """The encoder, without memory for its weights."""
        with torch.device("meta"):
            return M3BertModel(self.config)

    @property
    def parameters(self) -> int:
        return self.model.num_parameters()

    @property
    def matrices(self) -> int:
        """Entries of the matrices of all layers."""
        return sum(weight.numel() for weight in self.model.layers.parameters() if weight.ndim == 2)

    @property
    def pairs(self) -> int:
        """Pairs of one GPU, and its candidates."""
        return self.stage.batch // self.gpus

    @property
    def texts(self) -> int:
        """Texts of one GPU."""
        return self.pairs * TEXTS

    @property
    def mini_batches(self) -> int:
        return -(-self.texts // self.mini_batch) if self.cached else 1

    @property
    def texts_at_a_time(self) -> int:
        """Texts of one GPU whose activations exist together. The mini-batches of a step are about equally large."""
        return -(-self.texts // self.mini_batches)

    @property
    def caches(self) -> bool:
        """Whether texts are encoded twice, once for their embeddings and once for the gradients."""
        return self.mini_batches > 1

    @property
    def block(self) -> float:
        """Bytes of the candidates of one GPU."""
        return FLOAT * self.pairs * max(self.stage.dims)

    @property
    def gradient_bytes(self) -> float:
        """Gradients of the parameters that a GPU keeps."""
        return sharded(FLOAT * self.parameters, self.gpus, self.strategy)

    def pooled_bytes(self, layers: int) -> float:
        """Pooled embeddings of the texts of a GPU at some layers, or their gradients."""
        return FLOAT * self.texts * self.config.hidden_size * layers

    def kept_bytes(self) -> dict[str, float]:
        """What a GPU holds all through the step, in bytes."""
        size, layer = self.gradient_bytes, sum(weight.numel() for weight in self.model.layers[0].parameters())
        where = (self.gpus, self.strategy)
        return {
            "parameters": size,
            "optimizer": 2 * size,
            # Gradients of a single pass come as its activations go.
            "gradients": size if self.caches else 0.0,
            "buckets": bucket_bytes(self.parameters, *where),
            "unsharded": unsharded_bytes(self.parameters, layer, self.config.num_hidden_layers, *where),
            # Ids and masks, as collated, and cut into mini-batches.
            "inputs": (1 + self.caches) * 2 * ID * self.texts * self.stage.length,
        }

    def encoder_bytes(self) -> dict[str, float]:
        """What the forward and backward pass of the texts of one pass needs in addition."""
        reads = len(self.stage.layers)
        token = activation_bytes(self.config, reads, self.compute_bytes, self.checkpointing, self.fused_norms)
        # Copies of the matrices that autocast keeps for the backward pass.
        casts = self.compute_bytes * self.matrices if self.compute_bytes < FLOAT else 0
        # The gradient of the token table is the last one of a pass, when no activations are left.
        table = FLOAT * self.config.vocab_size * self.config.hidden_size
        last = table if self.caches else self.gradient_bytes
        found = {"activations": max(self.texts_at_a_time * self.stage.length * token + casts, last)}
        return found | ({"embeddings": self.pooled_bytes(reads)} if self.caches else {})

    def loss_bytes(self) -> dict[str, float]:
        """What the loss needs in addition, while it is computed."""
        layers = len(self.stage.layers)
        in_tile = self.pairs if self.candidates == RING else self.stage.batch
        tile = tile_bytes(self.pairs, in_tile, len(self.stage.dims), self.tile_size)
        # The layers follow each other. Each leaves gradients of pooled embeddings, one more while they are made.
        moments = [{"embeddings": self.pooled_bytes(2 * layers + 1)}]
        moments += [
            {
                "embeddings": self.pooled_bytes(layers + done),
                "candidates": candidate_bytes(self.block, self.gpus, layers - done, self.candidates == RING),
                "similarities": tile,
            }
            for done in range(layers)
        ]
        found = max(moments, key=total)
        return found if self.caches else found | self.encoder_bytes()

    def memory(self) -> dict[str, float]:
        """Part -> bytes per GPU at the peak of the step: while the loss is computed, or while texts are encoded."""
        return self.kept_bytes() | max(self.loss_bytes(), self.encoder_bytes(), key=total)

    def communication(self) -> dict[str, float]:
        """Part -> bytes that a GPU sends in the step."""
        forwards, ids = self.mini_batches * (1 + self.caches), self.pairs * IDS_PER_CANDIDATE * ID
        layers = len(self.stage.layers)
        return {
            "data parallelism": parameter_communication(
                self.parameters, self.gpus, self.strategy, forwards, self.mini_batches
            ),
            "candidates": candidate_communication(self.block, ids, self.gpus, layers, self.candidates == RING),
        }

    def seconds(self) -> tuple[float, float]:
        """Seconds of computing and of sending, if nothing overlaps; for texts of the mean length."""
        tokens = self.texts * self.stage.tokens
        attention = self.config.num_hidden_layers * self.config.hidden_size
        forward = 2 * self.matrices * tokens + 4 * attention * tokens * self.stage.tokens
        encoder = forward * passes(self.caches, self.checkpointing)
        dim, layers = max(self.stage.dims), len(self.stage.layers)
        similarities = similarity_operations(self.pairs, self.stage.batch, dim, layers)
        bandwidth = NODE_BANDWIDTH if self.gpus <= NODE_GPUS else BANDWIDTH
        computing = (encoder / PEAK + similarities / FLOAT32_PEAK) / UTILISATION
        return computing, total(self.communication()) / bandwidth


def total(parts: Mapping[str, float]) -> float:
    return sum(parts.values())


def title_of(step: Step) -> str:
    """What the table is about."""
    stage = step.stage
    grid = f"{','.join(map(str, stage.layers))}x{','.join(map(str, stage.dims))}"
    return (
        f"{step.parameters:,} parameters, {stage.batch:,} pairs per step, up to {stage.length} tokens per text "
        f"(mean {stage.tokens:g}), grid {grid}, {step.mini_batch} texts at a time"
        f"{', with gradient checkpointing' if step.checkpointing else ''}."
    )


def row_of(step: Step) -> list[str]:
    """A row of the table."""
    encoding, loss = (total(step.kept_bytes() | found) for found in (step.encoder_bytes(), step.loss_bytes()))
    computing, sending = step.seconds()
    sent, fits = total(step.communication()) / 1e9, "yes" if max(encoding, loss) <= MEMORY else "no"
    memory = [f"{encoding / 1e9:.1f}", f"{loss / 1e9:.1f}", fits]
    others = [f"{value:,.1f}" for value in (sent, computing, sending)]
    return [f"{step.gpus:,}", step.strategy, step.candidates, *memory, *others]


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--gpus", type=int, nargs="+", default=[8, 64, 512], help="numbers of GPUs")
    parser.add_argument("--strategy", nargs="+", choices=STRATEGIES, default=[DDP], help="data parallelism")
    parser.add_argument(
        "--candidates", nargs="+", choices=CANDIDATES, default=CANDIDATES, help="how a GPU sees all candidates"
    )
    parser.add_argument("--mini_batch", type=int, default=64, help="texts that a GPU encodes at a time")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of the layers")
    parser.add_argument("--batch", type=int, default=PAPER.batch, help="pairs per step, on all GPUs")
    parser.add_argument("--length", type=int, default=PAPER.length, help="tokens of the longest text")
    parser.add_argument("--layers", type=int, nargs="+", default=PAPER.layers, help="layers of the grid")
    parser.add_argument("--dims", type=int, nargs="+", default=PAPER.dims, help="dims of the grid")
    options = parser.parse_args(arguments)
    tokens = min(options.length, PAPER.tokens)
    stage = Stage(options.batch, tuple(options.layers), tuple(options.dims), options.length, tokens)
    first = Step(M3BertConfig(), stage, options.gpus[0], options.mini_batch, checkpointing=options.checkpointing)
    steps = [
        replace(first, gpus=gpus, strategy=strategy, candidates=candidates)
        for gpus in options.gpus
        for strategy in options.strategy
        for candidates in options.candidates
    ]
    print(f"{title_of(first)}\n")
    print(markdown(HEADER, [row_of(step) for step in steps], words=3))


if __name__ == "__main__":
    run_command(main)
