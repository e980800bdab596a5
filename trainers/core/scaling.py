"""
What a training step needs before it is run: memory, communication and time, one equation each, in bytes, bytes sent
per GPU, and operations. [`Step`] adds them up.

Conventions: parameters, gradients and both moments of AdamW are float32. Products of the encoder run in
`compute_bytes` per number (2 for bfloat16 autocast, 4 without), the residual stream and pooled embeddings in float32.
Attention keeps no probabilities (flash or memory-efficient kernels). Bytes sent are those of ring algorithms, as in
NCCL and gloo. `texts` are all texts that are encoded, `pairs` rows of them.
"""

from __future__ import annotations

from collections.abc import Sequence

from modeling_m3bert import M3BertConfig


FLOAT, ID = 4, 8
ADAM_MOMENTS = 2
IDS_PER_CANDIDATE = 2
TILE_COPIES = 2  # of a tile: unscaled products, and scores


# Parameters


def norm_parameters(config: M3BertConfig) -> int:
    """Parameters of a norm."""
    return config.hidden_size * (1 if config.norm_type == "rmsnorm" else 2)


def layer_matrix_parameters(config: M3BertConfig) -> int:
    """Entries of the matrices of a layer: four of attention, two of the feed-forward layer, or three if gated."""
    width, inner = config.hidden_size, config.intermediate_size
    return 4 * width * width + (3 if config.mlp_gated else 2) * width * inner


def layer_parameters(config: M3BertConfig) -> int:
    """Parameters of a layer: matrices, biases and two norms."""
    width, inner = config.hidden_size, config.intermediate_size
    biases = 4 * width * config.attention_bias + ((1 + config.mlp_gated) * inner + width) * config.mlp_bias
    return layer_matrix_parameters(config) + biases + 2 * norm_parameters(config)


def embedding_parameters(config: M3BertConfig) -> int:
    """Entries of the table of tokens, and of that of positions if they are learned."""
    positions = config.max_position_embeddings if config.position_embedding_type == "absolute" else 0
    return (config.vocab_size + positions) * config.hidden_size


def exit_parameters(config: M3BertConfig) -> int:
    """Parameters of the exits, an affine map each, of those that read the static table, and of this table."""
    width, joints = config.hidden_size, [layer for layer in config.static_layers if layer > 0]
    maps = len([layer for layer in config.exit_layers if layer > 0 or 0 not in config.static_layers])
    table = config.vocab_size * width if config.static_layers else 0
    return (maps + len(joints)) * (width**2 + width) + len(joints) * width**2 + table


def encoder_parameters(config: M3BertConfig) -> int:
    """Parameters of an m3BERT encoder."""
    norms = (2 if config.norm_position == "pre" else 1) * norm_parameters(config)
    layers = config.num_hidden_layers * layer_parameters(config)
    return embedding_parameters(config) + layers + norms + exit_parameters(config)


def head_parameters(config: M3BertConfig) -> int:
    """Parameters that a masked-LM head adds: its matrix unless it is tied to the embeddings, and its bias."""
    return config.vocab_size * (1 + (0 if config.tie_word_embeddings else config.hidden_size))


# Memory of one GPU, in bytes


def optimizer_bytes(parameters: int) -> int:
    """Both moments of AdamW."""
    return ADAM_MOMENTS * FLOAT * parameters


def sharded(size: float, gpus: int, strategy: str) -> float:
    """Bytes per GPU of parameters, gradients or moments: all of them with DDP, a share with FSDP."""
    return size / gpus if strategy == "fsdp" else size


def bucket_bytes(parameters: int, gpus: int, strategy: str) -> int:
    """DDP's buckets, which gradients are copied into to be reduced."""
    return FLOAT * parameters if strategy == "ddp" and gpus > 1 else 0


def unsharded_bytes(config: M3BertConfig, parameters: int, gpus: int, strategy: str) -> int:
    """What FSDP holds gathered at a time: all that is outside of the layers, with its gradient, and two layers, one of
    which is on its way, with the gradient of one."""
    if strategy != "fsdp" or gpus == 1:
        return 0
    layer = layer_parameters(config)
    return FLOAT * (2 * (parameters - config.num_hidden_layers * layer) + 3 * layer)


def cast_weight_bytes(config: M3BertConfig, compute_bytes: int) -> int:
    """Copies of the layers' matrices that autocast keeps for the backward pass."""
    copies = config.num_hidden_layers * layer_matrix_parameters(config)
    return compute_bytes * copies if compute_bytes < FLOAT else 0


def layer_activation_bytes(config: M3BertConfig, compute_bytes: int, fused_norms: bool = True) -> int:
    """
    Activations of one layer and token that the backward pass reads: the inputs of two norms (and, if a norm is not one
    kernel, as on CPUs, their normalised values), the inputs of matrices (autocast casts them once for each matrix),
    queries, keys, values and output of attention with a log-sum-exp per head, and the values in the feed-forward
    layer: gate, its activation, the other branch, and their product.
    """
    width, inner = config.hidden_size, config.intermediate_size
    norms = 2 * (width * (1 if fused_norms else 2) + 1) * FLOAT
    inputs = (2 if compute_bytes == FLOAT else 4 + config.mlp_gated) * width * compute_bytes
    attention = 4 * width * compute_bytes + config.num_attention_heads * FLOAT
    feed_forward = (4 if config.mlp_gated else 2) * inner * compute_bytes
    return norms + inputs + attention + feed_forward


def backward_bytes(config: M3BertConfig, compute_bytes: int) -> int:
    """Gradients of one token that exist together in the backward pass of a layer, beyond the activations that are
    freed by then: two of the residual stream, and two inside the feed-forward layer."""
    return 2 * config.hidden_size * FLOAT + 2 * config.intermediate_size * compute_bytes


def output_bytes(config: M3BertConfig, read_layers: int, fused_norms: bool = True) -> int:
    """Activations of one token outside of the layers: the embedding before and after its norm, and the normalised
    state of each layer that is read."""
    copies = 1 if fused_norms else 2
    read = read_layers if config.norm_position == "pre" else 0  # a post-norm layer's output is normalised already
    return FLOAT * config.hidden_size * (1 + copies + read * copies)


def activation_bytes(
    config: M3BertConfig,
    tokens: float,
    *,
    read_layers: int,
    compute_bytes: int = 2,
    checkpointing: bool = False,
    fused_norms: bool = True,
) -> float:
    """
    Peak of the activations of one pass, forward and backward. With gradient checkpointing, a layer keeps only its
    input, and one layer at a time is computed again.

    Args:
        config ([`M3BertConfig`]): Sizes of the encoder.
        tokens (`float`): Tokens of the pass, padding included.
        read_layers (`int`): Number of layers whose states are read.
        compute_bytes (`int`, *optional*, defaults to 2): Bytes per number of the products.
        checkpointing (`bool`, *optional*, defaults to `False`): Whether layers are checkpointed.
        fused_norms (`bool`, *optional*, defaults to `True`): Whether a norm is one kernel, as on GPUs.
    """
    layer = layer_activation_bytes(config, compute_bytes, fused_norms)
    layers = config.num_hidden_layers * (config.hidden_size * FLOAT if checkpointing else layer)
    recomputed = layer if checkpointing else 0
    ends = output_bytes(config, read_layers, fused_norms)
    return tokens * (layers + recomputed + ends + backward_bytes(config, compute_bytes))


def embedding_gradient_bytes(config: M3BertConfig) -> int:
    """The dense gradient of the token table of one pass, before it is added to that of the step."""
    return FLOAT * config.vocab_size * config.hidden_size


def input_bytes(texts: float, length: int, copies: int) -> float:
    """Token ids and masks of texts that are padded to `length`."""
    return copies * 2 * ID * texts * length


def pooled_bytes(config: M3BertConfig, texts: float, read_layers: int) -> float:
    """Pooled embeddings of texts at some layers, or their gradients."""
    return FLOAT * texts * config.hidden_size * read_layers


def block_bytes(candidates: float, dim: int) -> float:
    """The candidates of one GPU, at the widest dim of the grid."""
    return FLOAT * candidates * dim


def candidate_bytes(block: float, gpus: int, layers: int, ring: bool) -> float:
    """
    Candidates and gradients in the backward pass of one layer, for pairs. Gathered, each layer that is still to come
    keeps the candidates of all GPUs, and this one has their gradients and those of its anchors. In a ring there are
    two blocks of candidates, one of which is on its way, and the gradients of one of them and of the anchors.

    Args:
        block (`float`): Bytes of the candidates of one GPU ([`block_bytes`]).
        gpus (`int`): Number of GPUs.
        layers (`int`): Number of layers whose backward pass is not over, this one included.
        ring (`bool`): Whether candidates go around in a ring.
    """
    return 4 * block if ring and gpus > 1 else ((layers + 1) * gpus + 1) * block


def tile_bytes(anchors: float, candidates: float, dims: int, tile_size: tuple[int, int], masked: bool = True) -> float:
    """Similarities in memory at a time in the backward pass of InfoNCE: products, scores and the gradient of each dim;
    with masks, a comparison per id and the mask."""
    entries = min(anchors, tile_size[0]) * min(candidates, tile_size[1])
    return entries * (FLOAT * (TILE_COPIES + dims) + (IDS_PER_CANDIDATE + 1 if masked else 0))


def head_bytes(
    config: M3BertConfig, rows: float, dims: int, compute_bytes: int, block_scores: int = 2**21, smallest: int = 256
) -> float:
    """Peak of the masked-LM head for some rows (masked tokens times layers): states with their gradients and casts, a
    log-sum-exp per row, dim and vocabulary block, the scores of a block at each dim, the gradient of the matrix."""
    block = max(smallest, block_scores // max(1, int(rows)))
    states = rows * config.hidden_size * (2 * FLOAT + compute_bytes)
    log_sums = FLOAT * rows * dims * -(-config.vocab_size // block)
    return states + log_sums + FLOAT * rows * block * (1 + dims) + embedding_gradient_bytes(config)


# Communication of one GPU and step, in bytes sent


def all_reduce_bytes(size: float, gpus: int) -> float:
    """An all-reduce of `size` bytes: a reduce-scatter, and an all-gather of the sums."""
    return 2 * size * (gpus - 1) / gpus


def all_gather_bytes(size: float, gpus: int) -> float:
    """An all-gather whose result has `size` bytes, or a reduce-scatter of as many."""
    return size * (gpus - 1) / gpus


def parameter_communication(parameters: int, gpus: int, strategy: str, forwards: int, backwards: int) -> float:
    """
    What data parallelism sends in a step. DDP reduces the gradients once. FSDP gathers the parameters in each forward
    and each backward pass of a mini-batch, and reduces the gradients of each.
    """
    size = FLOAT * parameters
    if strategy == "ddp":
        return all_reduce_bytes(size, gpus)
    return (forwards + 2 * backwards) * all_gather_bytes(size, gpus)


def candidate_communication(block: float, ids: float, gpus: int, layers: int, ring: bool) -> float:
    """
    What a contrastive loss sends in a step. Gathered: the candidates once, and an all-reduce of the gradients of all,
    at each layer; ids once. In a ring, at each layer: candidates and ids to all other GPUs, twice, and their
    gradients, which also go home.

    Args:
        block (`float`): Bytes of the candidates of one GPU ([`block_bytes`]).
        ids (`float`): Bytes of their ids.
        gpus (`int`): Number of GPUs.
        layers (`int`): Number of layers of the grid.
        ring (`bool`): Whether candidates go around in a ring.
    """
    if gpus == 1:
        return 0.0
    others = gpus - 1
    if ring:
        return layers * (2 * others * (block + ids) + gpus * block)
    return layers * (others * block + all_reduce_bytes(gpus * block, gpus)) + others * ids


# Operations of one GPU and step (a product and a sum are two)


def forward_operations(matrices: float, attention: float, tokens: float, squares: float) -> float:
    """
    A forward pass of some texts: the matrices, and attention between all tokens of a text.

    Args:
        matrices (`float`): Entries of all matrices that a token is multiplied with.
        attention (`float`): Width of attention, summed over layers.
        tokens (`float`): Tokens of the texts, without padding.
        squares (`float`): Sum of the squared lengths of the texts.
    """
    return 2 * matrices * tokens + 4 * attention * squares


def model_operations(
    matrices: float, attention: float, head: float, *, tokens: float, squares: float, labelled: float
) -> float:
    """
    What a training step must compute, for its share of the peak ("model FLOPs",
    [2204.02311](https://huggingface.co/papers/2204.02311), appendix B): a forward pass, and a backward pass of twice
    the cost. Whatever is computed twice to save memory does not count.

    Args:
        matrices (`float`): See [`forward_operations`]; up to the deepest layer that is read.
        attention (`float`): See [`forward_operations`].
        head (`float`): Entries of the masked-LM head's matrix, at the widest dim of each layer, summed over layers:
            the scores of a prefix are part of those of a longer one.
        tokens (`float`): See [`forward_operations`].
        squares (`float`): See [`forward_operations`].
        labelled (`float`): Labelled tokens, which the head reads.
    """
    return 3 * (forward_operations(matrices, attention, tokens, squares) + 2 * head * labelled)


def encoder_operations(config: M3BertConfig, tokens: float, length: float) -> float:
    """A forward pass of an m3BERT, whose texts all have the same length."""
    layers = config.num_hidden_layers
    matrices, attention = layers * layer_matrix_parameters(config), layers * config.hidden_size
    return forward_operations(matrices, attention, tokens, tokens * length)


def passes(cached: bool, checkpointing: bool) -> int:
    """Cost of a step in forward passes: one, a backward pass that costs two, one more with cached gradients, and one
    more with checkpointing."""
    return 3 + cached + checkpointing


def similarity_operations(anchors: float, candidates: float, dim: int, layers: int) -> float:
    """InfoNCE at every layer: the products forward, again backward, and two products for the gradients."""
    return 8 * anchors * candidates * dim * layers


def head_operations(config: M3BertConfig, rows: float) -> float:
    """The masked-LM head: the scores forward, again backward, and two products for the gradients."""
    return 8 * rows * config.vocab_size * config.hidden_size


def seconds(operations: Sequence[tuple[float, float]], sent: float, utilisation: float, bandwidth: float) -> float:
    """
    Time of a step in which nothing overlaps.

    Args:
        operations (`Sequence[tuple[float, float]]`): Pairs of operations and peak operations per second.
        sent (`float`): Bytes that a GPU sends.
        utilisation (`float`): Share of the peak that is reached.
        bandwidth (`float`): Bytes per second that a GPU sends.
    """
    return sum(number / (peak * utilisation) for number, peak in operations) + sent / bandwidth
