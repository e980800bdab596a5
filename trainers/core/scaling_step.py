"""The memory, communication and time of a training step of m3BERT, added up from the equations in `scaling.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from modeling_m3bert import M3BertConfig

from ..losses.candidates import TILE_SIZES
from . import scaling


GATHER, RING = "gather", "ring"
DDP, FSDP = "ddp", "fsdp"
STRATEGIES, CANDIDATES = (DDP, FSDP), (GATHER, RING)


@dataclass(frozen=True)
class Stage:
    """
    A stage of pretraining.

    Args:
        batch (`int`): Rows per step, on all GPUs: pairs, or single texts.
        columns (`int`): Texts per row.
        layers (`tuple[int, ...]`): Layers of the grid.
        dims (`tuple[int, ...]`): Dims of the grid.
        length (`int`): Tokens of the longest text, which determine memory.
        tokens (`float`): Mean tokens of a text, which determine time.
        masked (`float`, *optional*, defaults to 0.0): Share of tokens that a masked-LM head predicts; 0 for a
            contrastive stage.
    """

    batch: int
    columns: int
    layers: tuple[int, ...]
    dims: tuple[int, ...]
    length: int
    tokens: float
    masked: float = 0.0

    @property
    def contrastive(self) -> bool:
        """Whether the stage contrasts pairs, rather than predicting masked tokens."""
        return not self.masked


MASKED_LM = Stage(2**17, 1, (4, 8, 12), (32, 64, 128, 768), 512, 512, masked=0.15)
# Of m3BERT (2605.19568, sections 2.3 and 4.1). Stage 3 reads 2 trillion tokens of 10 billion pairs, which is 100 per
# text if it reads each pair once. Appendix B truncates at 1,024 tokens, but the base model has 512 positions.
STAGES = {1: MASKED_LM, 2: MASKED_LM, 3: Stage(2**20, 2, (4, 12), (32, 64, 128), 512, 100)}


@dataclass(frozen=True)
class Hardware:
    """
    A GPU and its connections.

    Args:
        compute (`float`, *optional*, defaults to 312e12): Peak operations per second of the encoder's products; the
            default is that of an A100 in bfloat16.
        float32 (`float`, *optional*, defaults to 19.5e12): Peak operations per second in float32, for similarities.
        utilisation (`float`, *optional*, defaults to 0.4): Share of these peaks that is reached.
        node_bandwidth (`float`, *optional*, defaults to 300e9): Bytes per second that a GPU sends inside a node.
        bandwidth (`float`, *optional*, defaults to 25e9): Bytes per second that a GPU sends between nodes.
        node_gpus (`int`, *optional*, defaults to 8): GPUs of a node.

    Raises:
        ValueError: if a value is not above 0, or the utilisation is above 1.
    """

    compute: float = 312e12
    float32: float = 19.5e12
    utilisation: float = 0.4
    node_bandwidth: float = 300e9
    bandwidth: float = 25e9
    node_gpus: int = 8

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value <= 0:
                raise ValueError(f"{name}={value} must be above 0.")
        if self.utilisation > 1:
            raise ValueError(f"utilisation={self.utilisation} must be at most 1.")

    def bandwidth_of(self, gpus: int) -> float:
        """Bytes per second that a GPU sends, limited by the slower connection if there are several nodes."""
        return self.node_bandwidth if gpus <= self.node_gpus else self.bandwidth


@dataclass(frozen=True)
class Step:
    """
    One optimizer step.

    Args:
        config ([`M3BertConfig`]): Sizes of the encoder.
        stage ([`Stage`]): What is trained.
        gpus (`int`): Number of GPUs.
        mini_batch (`int`): Texts that a GPU encodes at a time: with cached gradients in a contrastive stage, as one
            accumulated batch in a masked-LM stage.
        strategy (`str`, *optional*, defaults to `"ddp"`): `"ddp"` or `"fsdp"`.
        candidates (`str`, *optional*, defaults to `"gather"`): `"gather"` or `"ring"`.
        checkpointing (`bool`, *optional*, defaults to `False`): Gradient checkpointing of the layers.
        cached (`bool`, *optional*, defaults to `True`): Whether a contrastive stage caches gradients.
        compute_bytes (`int`, *optional*, defaults to 2): Bytes per number of the products: 2, or 4 without autocast.
        fused_norms (`bool`, *optional*, defaults to `True`): Whether a norm is one kernel, as on GPUs.
        tile_size (`tuple[int, int]`, *optional*): Anchors and candidates of a tile. Default: those of GPUs.
        hardware ([`Hardware`], *optional*): What the time is for.

    Raises:
        ValueError: if a value is unknown or out of range, the grid is outside the model, or the batch cannot be
            divided over the GPUs.
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
    hardware: Hardware = field(default_factory=Hardware)

    def __post_init__(self) -> None:
        for name, legal in (("strategy", STRATEGIES), ("candidates", CANDIDATES)):
            if getattr(self, name) not in legal:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; legal values: {', '.join(legal)}.")
        for name in ("gpus", "mini_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be 1 or more.")
        if self.stage.batch < 1 or self.stage.batch % self.gpus:
            raise ValueError(f"A batch of {self.stage.batch} rows cannot be divided over {self.gpus} GPUs.")
        deepest, widest = max(self.stage.layers), max(self.stage.dims)
        if deepest > self.config.num_hidden_layers or widest > self.config.hidden_size:
            raise ValueError(
                f"The grid reads {deepest} layers and {widest} dims, but the model has "
                f"{self.config.num_hidden_layers} x {self.config.hidden_size}."
            )
        if self.stage.length > self.config.max_position_embeddings:
            raise ValueError(
                f"length={self.stage.length} is above the model's {self.config.max_position_embeddings} positions."
            )

    @property
    def parameters(self) -> int:
        """Trained parameters."""
        head = 0 if self.stage.contrastive else scaling.head_parameters(self.config)
        return scaling.encoder_parameters(self.config) + head

    @property
    def rows(self) -> int:
        """Rows of one GPU."""
        return self.stage.batch // self.gpus

    @property
    def texts(self) -> int:
        """Texts of one GPU."""
        return self.rows * self.stage.columns

    @property
    def texts_at_a_time(self) -> int:
        """Texts of one GPU whose activations exist together. The mini-batches of a step are about equally large."""
        if self.stage.contrastive and not self.cached:
            return self.texts
        mini_batches = -(-self.texts // self.mini_batch)
        return -(-self.texts // mini_batches)

    @property
    def candidates_per_gpu(self) -> int:
        """Candidates of one GPU: all texts but the anchors."""
        return self.rows * (self.stage.columns - 1)

    @property
    def block(self) -> float:
        """Bytes of the candidates of one GPU."""
        return scaling.block_bytes(self.candidates_per_gpu, max(self.stage.dims))

    @property
    def caches(self) -> bool:
        """Whether texts are encoded twice, once for their embeddings and once for the gradients."""
        return self.stage.contrastive and self.cached and self.texts > self.mini_batch

    @property
    def one_pass(self) -> bool:
        """Whether all texts of a GPU are in one pass, so that no gradients exist before its backward pass."""
        return self.texts <= self.texts_at_a_time

    @property
    def gradient_bytes(self) -> float:
        """Gradients of the parameters that a GPU keeps."""
        return scaling.sharded(scaling.FLOAT * self.parameters, self.gpus, self.strategy)

    def masked_rows(self, texts: float, tokens: float) -> float:
        """Rows of the masked-LM head: masked tokens times layers."""
        return texts * tokens * self.stage.masked * len(self.stage.layers)

    def kept_bytes(self) -> dict[str, float]:
        """What a GPU holds all through the step, in bytes."""
        size = scaling.FLOAT * self.parameters
        where = (self.gpus, self.strategy)
        texts = self.texts if self.stage.contrastive else self.texts_at_a_time
        return {
            "parameters": scaling.sharded(size, *where),
            "optimizer": scaling.sharded(scaling.optimizer_bytes(self.parameters), *where),
            "gradients": 0.0 if self.one_pass else self.gradient_bytes,
            "buckets": scaling.bucket_bytes(self.parameters, *where),
            "unsharded": scaling.unsharded_bytes(self.config, self.parameters, *where),
            # As collated, and cut into mini-batches.
            "inputs": scaling.input_bytes(texts, self.stage.length, 2 if self.caches else 1),
        }

    def encoder_bytes(self) -> dict[str, float]:
        """What the forward and backward pass of the texts of one pass needs in addition."""
        activations = scaling.activation_bytes(
            self.config,
            self.texts_at_a_time * self.stage.length,
            read_layers=len(self.stage.layers),
            compute_bytes=self.compute_bytes,
            checkpointing=self.checkpointing,
            fused_norms=self.fused_norms,
        )
        casts = scaling.cast_weight_bytes(self.config, self.compute_bytes)
        # Gradients of a single pass come as its activations go. The gradient of the token table is the last one of a
        # pass, when no activations are left.
        last = self.gradient_bytes if self.one_pass else scaling.embedding_gradient_bytes(self.config)
        found = {"activations": max(activations + casts, last)}
        if self.caches:
            found["embeddings"] = scaling.pooled_bytes(self.config, self.texts, len(self.stage.layers))
        return found

    def loss_bytes(self) -> dict[str, float]:
        """What the loss needs in addition, while it is computed."""
        layers = len(self.stage.layers)
        if not self.stage.contrastive:
            rows = self.masked_rows(self.texts_at_a_time, self.stage.length)
            head = scaling.head_bytes(self.config, rows, len(self.stage.dims), self.compute_bytes)
            return {"activations": self.encoder_bytes()["activations"], "head": head}
        ring, total = self.candidates == RING, self.candidates_per_gpu * self.gpus
        in_tile = self.candidates_per_gpu if ring else total
        tile = scaling.tile_bytes(self.rows, in_tile, len(self.stage.dims), self.tile_size)
        # The layers follow each other. Each leaves gradients of pooled embeddings, one more while they are made.
        moments = [{"embeddings": scaling.pooled_bytes(self.config, self.texts, 2 * layers + 1)}]
        for done in range(layers):
            moments.append(
                {
                    "embeddings": scaling.pooled_bytes(self.config, self.texts, layers + done),
                    "candidates": scaling.candidate_bytes(self.block, self.gpus, layers - done, ring),
                    "similarities": tile,
                }
            )
        found = largest(moments)
        return found if self.caches else found | self.encoder_bytes()

    def memory(self) -> dict[str, float]:
        """Part -> bytes per GPU at the peak of the step: while the loss is computed, or while texts are encoded."""
        return self.kept_bytes() | largest([self.loss_bytes(), self.encoder_bytes()])

    def communication(self) -> dict[str, float]:
        """Part -> bytes that a GPU sends in the step."""
        mini_batches = -(-self.texts // self.texts_at_a_time)
        sent = {
            "data parallelism": scaling.parameter_communication(
                self.parameters, self.gpus, self.strategy, mini_batches * (1 + self.caches), mini_batches
            )
        }
        if self.stage.contrastive:
            ids = self.candidates_per_gpu * scaling.IDS_PER_CANDIDATE * scaling.ID
            sent["candidates"] = scaling.candidate_communication(
                self.block, ids, self.gpus, len(self.stage.layers), self.candidates == RING
            )
        return sent

    def operations(self) -> dict[str, float]:
        """Part -> operations of a GPU in the step, with the mean number of tokens per text."""
        tokens = self.texts * self.stage.tokens
        forward = scaling.encoder_operations(self.config, tokens, self.stage.tokens)
        found = {"encoder": forward * scaling.passes(self.caches, self.checkpointing)}
        if not self.stage.contrastive:
            found["head"] = scaling.head_operations(self.config, self.masked_rows(self.texts, self.stage.tokens))
            return found
        candidates = self.candidates_per_gpu * self.gpus
        dim, layers = max(self.stage.dims), len(self.stage.layers)
        return found | {"similarities": scaling.similarity_operations(self.rows, candidates, dim, layers)}

    def seconds(self) -> dict[str, float]:
        """Part -> seconds of the step, if nothing overlaps."""
        speeds = {"similarities": self.hardware.float32}
        bandwidth = self.hardware.bandwidth_of(self.gpus)
        computed = {
            part: scaling.seconds(
                [(number, speeds.get(part, self.hardware.compute))], 0, self.hardware.utilisation, bandwidth
            )
            for part, number in self.operations().items()
        }
        return computed | {"communication": sum(self.communication().values()) / bandwidth}


def largest(moments: Sequence[dict[str, float]]) -> dict[str, float]:
    """The moment at which most bytes are needed."""
    return max(moments, key=lambda parts: sum(parts.values()))
