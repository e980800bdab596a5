"""
Export an encoder at one granularity to one ONNX file, in float32, float16 or 8 bits. The graph holds the layers up to
it, truncation to its dims, pooling, and normalisation. Needs the extra `onnx`.
"""

from __future__ import annotations

import copy
import io
import json
import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from ..encode.encoder import GridEncoder
from ..encode.granularity import Granularity, Grid
from ..encode.states import TextStates, nested_states, truncate, unwrap_encoder
from ..utils.extras import require_extra


if TYPE_CHECKING:
    from onnxruntime import InferenceSession


INPUTS, OUTPUTS = ["input_ids", "attention_mask"], ["last_hidden_state", "sentence_embedding"]
TOLERANCE = 1e-4
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
# Batches of one, three and four texts, padded to different lengths. None has the size that is traced.
CHECKED = (
    ["how do I join two paths"],
    ["", "a man is playing a guitar on a stage in front of a crowd", "rain"],
    ["word " * 300, "the capital of the country with the most islands", "42", "What is a list, and what is a tuple?"],
)


class TextEmbedder(nn.Module):
    """The exported module: token ids in, one vector per token and one embedding per text out."""

    def __init__(self, encoder: GridEncoder, granularity: Granularity, normalize: bool, project_tokens: bool = False):
        super().__init__()
        self.model, self.projection, self.pooling = encoder.model, encoder.projection, encoder.pooling
        self.granularity, self.normalize, self.looks_up = granularity, normalize, encoder.looks_up
        self.project_tokens = project_tokens

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """
        From `input_ids` and `attention_mask` `(batch, tokens)` to hidden states and embeddings `(batch, dim)`. The
        hidden states are `(batch, tokens, dim)`; before a projection, which needs all of them, they are `(batch,
        tokens, hidden_size)`, unless `project_tokens` applies it to each.
        """
        layer, dim = self.granularity.layer, self.granularity.dim
        if self.looks_up:
            static = unwrap_encoder(self.model).static_states(input_ids, attention_mask)
            vector = static[:, 0] if self.projection is None else self.projection(static[:, 0])
            return static.expand(-1, input_ids.shape[1], -1), truncate(vector, dim, self.normalize)
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        states: TextStates = nested_states(self.model, inputs, [layer])
        if self.projection is None:
            tokens = truncate(states.layers[layer], dim)
        else:
            tokens, states = states.layers[layer], states.projected(layer, self.projection)
            if self.project_tokens:
                tokens = truncate(self.projection(tokens), dim)
        return tokens, truncate(states.pooled(layer, self.pooling), dim, self.normalize)


def export_onnx(
    encoder: GridEncoder,
    granularity: Granularity,
    file: Path,
    *,
    normalize: bool | None = None,
    project_tokens: bool = False,
) -> Path:
    """
    Write an encoder at one granularity to an ONNX file, after checking that the graph gives the same embeddings as
    torch.

    The graph takes `input_ids` and `attention_mask`, int64 of shape `(batch, tokens)`. It returns
    `last_hidden_state`, float32 of shape `(batch, tokens, dim)`, for clients that pool themselves, and
    `sentence_embedding`, float32 of shape `(batch, dim)`: the embeddings of [`GridEncoder.encode`] at this
    granularity. Batch and tokens are dynamic, weights are in float32, and later layers are left out. If the encoder
    has a projection, the hidden states are those before it, at all dims, as sentence-transformers expects them.

    Prompts are not in the graph. The metadata of the file holds `granularity`, `pooling`, `normalized`, `max_length`
    and `prompts`.

    Args:
        encoder ([`GridEncoder`]): An encoder of any supported architecture. It is not changed.
        granularity ([`Granularity`]): Any granularity of the model, whether or not it is in the encoder's grid.
        file (`Path`): File to write; missing folders are created.
        normalize (`bool`, *optional*): Whether the graph L2-normalises the embeddings. Default: as the encoder does.
        project_tokens (`bool`, *optional*): Whether to project the hidden states, so that their mean is the embedding.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: if the extra is missing, the granularity is not legal, or the graph differs from torch by more
            than 1e-4. No file is written in these cases.

    ```python
    >>> export_onnx(encoder, Granularity(4, 64), Path("runs/onnx/onnx/model_4x64.onnx"))  # doctest: +SKIP
    ```
    """
    require_onnx()
    exported = _as_exported(encoder, granularity)
    normalized = encoder.normalize if normalize is None else normalize
    embedder = TextEmbedder(exported, granularity, normalized, project_tokens).eval()
    metadata = {
        "granularity": str(granularity),
        "pooling": encoder.pooling,
        "normalized": str(embedder.normalize).lower(),
        "max_length": str(encoder.max_length),
        "prompts": json.dumps(dict(encoder.prompts)),
    }
    with _quiet(), torch.no_grad():
        content = _trace(embedder, metadata)
        difference = _largest_difference(embedder, exported, content)
    if not difference <= TOLERANCE:  # also where it is NaN
        raise ValueError(
            f"The ONNX graph of {granularity} differs from torch by {difference:.1e}; the limit is {TOLERANCE}."
        )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def _as_exported(encoder: GridEncoder, granularity: Granularity) -> GridEncoder:
    """A copy of an encoder, ready for export: one granularity, no roles, not normalised, in float32 on the CPU, and
    with eager attention, which gives no NaN for an empty text."""
    model, projection = copy.deepcopy((encoder.model, encoder.projection))
    model = model.to("cpu", torch.float32).eval()
    unwrap_encoder(model).set_attn_implementation("eager")
    exported = replace(
        encoder,
        model=model,
        grid=Grid((granularity,)),
        prompts={},
        max_lengths={},
        normalize=False,  # the graph may not normalise
        dtype=torch.float32,
        compute_dtype=None,
        projection=projection and projection.to("cpu", torch.float32),
    )
    if exported.looks_up and projection is None:  # the graph holds the columns that it reads
        table = unwrap_encoder(model).elastic.table
        table.weight = nn.Parameter(table.weight[:, : granularity.dim].contiguous())
    return exported


def _trace(embedder: TextEmbedder, metadata: dict[str, str]) -> bytes:
    """The content of the file of an embedder, with a dynamic batch and a dynamic number of tokens."""
    from onnx.helper import set_model_props
    from onnx_ir.passes.common import ClearMetadataAndDocStringPass

    axes = {0: "batch", 1: "tokens"}
    # Two different tensors: the same tensor twice would become a single input.
    example = tuple(torch.ones(2, 5, dtype=torch.long) for _ in INPUTS)
    embedder(*example)  # what is found out about an encoder when it first runs cannot be traced
    with redirect_stderr(io.StringIO()):  # torch prints the partial trace if it fails
        program: Any = torch.onnx.export(
            embedder,
            example,
            dynamo=True,
            input_names=INPUTS,
            output_names=OUTPUTS,
            dynamic_shapes=(axes, axes),
            opset_version=18,
            verbose=False,
        )
    ClearMetadataAndDocStringPass()(program.model)  # notes that name source files of this machine
    model = program.model_proto
    set_model_props(model, metadata)
    return model.SerializeToString()


def _largest_difference(embedder: TextEmbedder, encoder: GridEncoder, content: bytes) -> float:
    """The largest difference between the outputs of a graph and of its encoder, on texts of several lengths."""
    session, differences = open_session(content), []
    for texts in CHECKED:
        inputs = tokenize(encoder, texts)
        embeddings = encoder.encode(texts).at(embedder.granularity, normalize=embedder.normalize)
        tokens, _ = embedder(**{name: torch.from_numpy(value) for name, value in inputs.items()})
        states, vectors = session.run(OUTPUTS, inputs)
        real = inputs["attention_mask"].astype(bool)  # the states of padding mean nothing, and round differently
        differences += [np.abs(states - tokens.numpy())[real].max(), np.abs(vectors - embeddings.numpy()).max()]
    return float(np.max(differences))


def quantize_onnx(file: Path, output: Path) -> Path:
    """Quantise the weights of a file of [`export_onnx`] to 8 bits, with one scale per channel, and return the new
    file, `output`. Activations are quantised as the graph runs."""
    require_onnx()
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(file)
    model.graph.ClearField("value_info")  # inferred again; the quantizer transposes some weights and keeps old shapes
    with _quiet():
        # Weights use only 7 of the 8 bits: with 8, sums overflow on processors without VNNI.
        quantize_dynamic(model, output, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
    return output


def halve_onnx(file: Path, output: Path) -> Path:
    """Convert the weights and the arithmetic of a file of [`export_onnx`] to float16, and return the new file,
    `output`. Inputs and outputs keep their types."""
    require_onnx()
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    with _quiet():
        onnx.save(convert_float_to_float16(onnx.load(file), keep_io_types=True), output)
    return output


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress warnings. Those of the exporter concern its internals and operators that no encoder has."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def tokenize(encoder: GridEncoder, texts: Sequence[str]) -> dict[str, np.ndarray]:
    """The inputs of a graph for one batch of texts. Prompts are not added."""
    tokens = encoder.tokenizer(
        list(texts), padding=True, truncation=True, max_length=encoder.max_length, return_tensors="np"
    )
    return {name: tokens[name].astype(np.int64) for name in INPUTS}


def embed(session: InferenceSession, encoder: GridEncoder, texts: Sequence[str]) -> np.ndarray:
    """Embed one batch of texts in onnxruntime, without prompts: float32 `(texts, dim)`."""
    return session.run(["sentence_embedding"], tokenize(encoder, texts))[0]


def open_session(model: Path | bytes, threads: int | None = None) -> InferenceSession:
    """Open a file or its content as an `onnxruntime.InferenceSession` on the CPU. With `threads`, idle threads sleep
    between two calls; onnxruntime's own wait actively."""
    from onnxruntime import InferenceSession, SessionOptions

    options = SessionOptions()
    if threads is not None:
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")
    return InferenceSession(model, options, providers=["CPUExecutionProvider"])


def require_onnx() -> None:
    """Raise a ValueError if a package of the extra is not installed."""
    for name in PACKAGES:
        require_extra(name, "onnx", "ONNX export")
