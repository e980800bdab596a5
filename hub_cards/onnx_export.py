"""
ONNX files of an encoder at one granularity: the layers up to it, pooling, cut and normalisation in one graph. Needs
the extra `onnx`.
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
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.onnx import OnnxExporterError

from trainers import Granularity, Grid, ProjectedStates, nested_states, prefix
from trainers.evaluation import GridEncoder
from trainers.nested import TextStates, unwrap_encoder
from trainers.record import origin_of


INPUTS, OUTPUT = ["input_ids", "attention_mask"], "sentence_embedding"
OPSETS = range(18, 24)  # torch has no translations below 18; 23 is the highest that is tested
TOLERANCE = 1e-4
PACKAGES = ("onnx", "onnxruntime", "onnxscript")
# Batches of one, three and four texts, each padded to a length of its own; none is of the size that is traced.
CHECKED = (
    ["how do I join two paths"],
    ["", "a man is playing a guitar on a stage in front of a crowd", "rain"],
    ["word " * 300, "the capital of the country with the most islands", "42", "What is a list, and what is a tuple?"],
)


class TextEmbedder(nn.Module):
    """
    Token ids in, one embedding a text out: what a file holds.

    Args:
        encoder ([`GridEncoder`]): Its model, pooling and projection.
        granularity ([`Granularity`]): Where the model is read.
        normalize (`bool`): Whether the embeddings are L2-normalised.
    """

    def __init__(self, encoder: GridEncoder, granularity: Granularity, normalize: bool):
        super().__init__()
        self.model, self.projection, self.pooling = encoder.model, encoder.projection, encoder.pooling
        self.granularity, self.normalize = granularity, normalize

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        """`input_ids` and `attention_mask` `(batch, tokens)` to embeddings `(batch, dim)`."""
        layer = self.granularity.layer
        states: TextStates = nested_states(
            self.model, {"input_ids": input_ids, "attention_mask": attention_mask}, [layer]
        )
        if self.projection is not None:
            states = ProjectedStates(states, self.projection, layer)
        return prefix(states.pooled(layer, self.pooling), self.granularity.dim, self.normalize)


def export_onnx(
    encoder: GridEncoder, granularity: Granularity, file: Path, *, normalize: bool = True, opset: int = 18
) -> Path:
    """
    Write an encoder at one granularity as an ONNX file, once its graph is seen to give what torch gives.

    The graph takes `input_ids` and `attention_mask`, int64 of shape `(batch, tokens)`, and gives `sentence_embedding`,
    float32 of shape `(batch, dim)`: what [`GridEncoder.encode`] gives at this granularity. Batch and tokens are
    dynamic, weights are in float32, and layers after the granularity's are left out. Prompts are not in the graph: the
    file's metadata has them, with the granularity, `pooling`, `normalized`, `max_length`, and the Hub id of the source
    where one is known.

    Args:
        encoder ([`GridEncoder`]): Any known family. It is left as it is.
        granularity ([`Granularity`]): One of the model's, in the encoder's grid or not.
        file (`Path`): Where to write; folders are made.
        normalize (`bool`, *optional*, defaults to `True`): Whether the graph L2-normalises the embeddings.
        opset (`int`, *optional*, defaults to 18): Version of ONNX's operators, in 18..23.

    Returns:
        `Path`: the file.

    Raises:
        ValueError: if the extra is missing, the granularity or the opset is not legal, the model cannot be exported or
            needs more than the 2 GiB of one file, or the graph is off by more than 1e-4. Nothing is written then.

    ```python
    >>> export_onnx(encoder, Granularity(4, 64), Path("runs/onnx/model_4x64.onnx"))  # doctest: +SKIP
    ```
    """
    require_onnx()
    if opset not in OPSETS:
        raise ValueError(f"opset={opset} must be within {OPSETS[0]}..{OPSETS[-1]}.")
    exported = as_exported(encoder, granularity)
    with one_line_errors(f"{type(unwrap_encoder(encoder.model)).__name__} cannot be exported to ONNX"):
        model = trace(TextEmbedder(exported, granularity, normalize), opset)
        describe(model, metadata_of(encoder, granularity, normalize))
        content = serialize(model)
        difference = largest_difference(exported, content)
    if not difference <= TOLERANCE:  # also where it is NaN
        raise ValueError(f"The ONNX graph of {granularity} is {difference:.1e} off from torch; legal is {TOLERANCE}.")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def largest_difference(encoder: GridEncoder, model: Path | bytes) -> float:
    """
    How far what [`export_onnx`] wrote is from its encoder, on a few texts of several lengths.

    Args:
        encoder ([`GridEncoder`]): What it was made from.
        model (`Path` or `bytes`): The file, or its content.

    Returns:
        `float`: the largest absolute difference; NaN if one of the two gives NaN.
    """
    session = open_session(model)
    metadata = session.get_modelmeta().custom_metadata_map
    (granularity,) = grid = Grid.parse(metadata["granularity"])
    alone = replace(encoder, grid=grid, prompts={}, dtype=torch.float32)
    differences = []
    for texts in CHECKED:
        with quiet():  # one text is long on purpose, and the encoder says that it was cut
            embeddings = alone.encode(texts)
        expected = embeddings.at(granularity, normalize=metadata["normalized"] == "true").numpy()
        differences.append(np.abs(embed(session, encoder, texts) - expected).max())
    return float(np.max(differences))


def quantize_onnx(file: Path, output: Path) -> Path:
    """
    Write what [`export_onnx`] wrote with weights of 8 bits, in a scale for each channel; activations are rounded on
    the way.

    Args:
        file (`Path`): The file in float32.
        output (`Path`): Where to write.

    Returns:
        `Path`: `output`.
    """
    require_onnx()
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with quiet():
        # Weights use 7 of the 8 bits: on processors without VNNI the sums of all 8 overflow.
        quantize_dynamic(file, output, weight_type=QuantType.QInt8, per_channel=True, reduce_range=True)
    model = onnx.load(output)
    describe(model, {**open_session(file).get_modelmeta().custom_metadata_map, "weights": "int8"})
    output.write_bytes(serialize(model))
    return output


def embed(session: Any, encoder: GridEncoder, texts: Sequence[str]) -> np.ndarray:
    """
    Embed one batch of texts in onnxruntime.

    Args:
        session (`onnxruntime.InferenceSession`): See [`open_session`].
        encoder ([`GridEncoder`]): For its tokenizer and longest text; its prompts are not put before the texts.
        texts (`Sequence[str]`): Texts.

    Returns:
        `np.ndarray` of shape `(texts, dim)`, in float32.
    """
    tokens = encoder.tokenizer(
        list(texts), padding=True, truncation=True, max_length=encoder.max_length, return_tensors="np"
    )
    return session.run([OUTPUT], {name: tokens[name].astype(np.int64) for name in INPUTS})[0]


def open_session(model: Path | bytes) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU, of a file or its content."""
    require_onnx()
    from onnxruntime import InferenceSession

    return InferenceSession(model, providers=["CPUExecutionProvider"])


def require_onnx() -> None:
    """
    Check that the extra is installed.

    Raises:
        ValueError: names the packages that are missing.
    """
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise ValueError(f"ONNX export needs {', '.join(missing)}: pip install 'm3bert[onnx]'.")


def as_exported(encoder: GridEncoder, granularity: Granularity) -> GridEncoder:
    """A copy of an encoder as it is exported: one granularity, no prompts, in float32 on the CPU, and with attention
    in plain operators, which gives no NaN for an empty text."""
    model, projection = copy.deepcopy((encoder.model, encoder.projection))
    model = model.to("cpu", torch.float32).eval()
    unwrap_encoder(model).set_attn_implementation("eager")
    return replace(
        encoder,
        model=model,
        grid=Grid((granularity,)),
        prompts={},
        dtype=torch.float32,
        projection=projection and projection.to("cpu", torch.float32),
    )


def trace(embedder: TextEmbedder, opset: int) -> Any:
    """The `onnx.ModelProto` of an embedder, with a dynamic batch and a dynamic number of tokens."""
    axes = {0: "batch", 1: "tokens"}
    # What torch could trace before it gave up it prints.
    with quiet(), redirect_stderr(io.StringIO()), torch.no_grad():
        return torch.onnx.export(
            embedder.eval(),
            # Two tensors: what is given twice becomes one input.
            tuple(torch.ones(2, 5, dtype=torch.long) for _ in INPUTS),
            dynamo=True,
            input_names=INPUTS,
            output_names=[OUTPUT],
            dynamic_shapes=(axes, axes),
            opset_version=opset,
            verbose=False,
        ).model_proto


def metadata_of(encoder: GridEncoder, granularity: Granularity, normalize: bool) -> dict[str, str]:
    """What a reader of the file has to know."""
    source, _ = origin_of(unwrap_encoder(encoder.model).config)
    return {
        "granularity": str(granularity),
        "pooling": encoder.pooling,
        "normalized": str(normalize).lower(),
        "max_length": str(encoder.max_length),
        "prompts": json.dumps(dict(encoder.prompts)),
        "prompts_in_graph": "false",
        **({"source": source} if source else {}),
    }


def describe(model: Any, metadata: dict[str, str]) -> None:
    """Give an `onnx.ModelProto` metadata, in place of what the exporter notes: lines of source files of this
    machine."""
    from onnx.helper import set_model_props

    clear_notes(model)
    set_model_props(model, metadata)


def clear_notes(message: Any) -> None:
    """Remove doc strings and metadata from a protobuf message and from all messages inside of it."""
    for part, value in message.ListFields():
        if part.name in ("doc_string", "metadata_props"):
            message.ClearField(part.name)
        elif part.message_type is not None:
            for inner in value if part.is_repeated else [value]:
                clear_notes(inner)


def serialize(model: Any) -> bytes:
    """
    The content of a file, checked.

    Raises:
        ValueError: if it is too large for one file.
    """
    from onnx import checker

    size = sum(len(tensor.raw_data) for tensor in model.graph.initializer)
    if size >= checker.MAXIMUM_PROTOBUF:
        raise ValueError(f"its weights take {size / 2**30:.1f} GiB, and one file holds less than 2")
    content = model.SerializeToString()
    checker.check_model(content)
    return content


@contextmanager
def quiet() -> Iterator[None]:
    """Hold back warnings; the exporter's are of operators that no encoder has and of its own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def one_line_errors(beginning: str) -> Iterator[None]:
    """Turn what exporter, checker and runtime raise, pages at times, into a ValueError of one sentence."""
    from onnx import checker
    from onnxruntime.capi import onnxruntime_pybind11_state as runtime

    of_runtime = (runtime.Fail, runtime.InvalidArgument, runtime.InvalidGraph, runtime.NotImplemented)
    try:
        yield
    except (ValueError, OnnxExporterError, checker.ValidationError, *of_runtime) as error:
        reason = str(error.__cause__ or error).strip().partition("\n")[0].rstrip(".")
        raise ValueError(f"{beginning}: {reason}.") from error
