"""
The ONNX graphs of a checkpoint, under the names that the Hub's clients or vLLM's semantic router look for, how much
quality the smaller number formats lose, and graphs as runtimes whose latency is measured beside that of torch.
"""

from __future__ import annotations

import copy
import json
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import numpy as np
import torch
from tokenizers import Tokenizer

from ..data.stdlib_docs import topic_pairs
from ..encode.encoder import GridEncoder, Role
from ..encode.granularity import Granularity
from ..encode.states import longest_text, shared_layers, unwrap_encoder
from ..evaluation.evaluators import Evaluator
from ..evaluation.readers import load_task
from ..evaluation.tasks import find_tasks
from ..utils.durable import remove_files
from .checkpoint import full_size
from .onnx_export import PACKAGES, embed, export_onnx, halve_onnx, open_session, quantize_onnx
from .tables import markdown


if TYPE_CHECKING:
    from onnxruntime import InferenceSession


QUALITY = "onnx/quality.json"
SUFFIXES = {"float32": "", "int8": "_quantized", "float16": "_fp16"}
NUM_PAIRS = 128  # of a title and a text of Python's help topics
LOWEST_FLOAT16_COSINE = 0.999  # a graph that overflows in float16 is far below
DEFAULT_TASK = "stsb"


def graph_name(granularity: Granularity | None = None, weights: str = "float32") -> str:
    """The path of a graph in a repository: `onnx/model_4x64_quantized.onnx`. The full size is not named."""
    size = f"_{granularity}" if granularity is not None else ""
    return f"onnx/model{size}{SUFFIXES[weights]}.onnx"


@dataclass(frozen=True)
class Graph:
    """
    One graph and its measured quality.

    Args:
        file (`str`): Its path in the repository.
        granularity (`str`): Its granularity.
        weights (`str`): `"float32"`, `"int8"` or `"float16"`.
        bytes (`int`): Size of the file.
        mean_cosine (`float`, *optional*): Mean cosine of its embeddings and those of the float32 graph of the same
            granularity; `None` for the float32 graph.
        lowest_cosine (`float`, *optional*): The lowest of these cosines.
        scores (`dict[str, float]`): Task -> its main metric.
    """

    file: str
    granularity: str
    weights: str
    bytes: int
    mean_cosine: float | None = None
    lowest_cosine: float | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GraphReport:
    """
    What is in `onnx/quality.json`.

    Args:
        date (`str`): Date of the measurement, ISO 8601.
        machine (`str`): Processor type and number of cores. The rounding of 8 bits differs between processors.
        versions (`dict[str, str]`): Package -> version.
        texts (`str`): The texts of the cosines.
        metrics (`dict[str, str]`): Task -> its metric.
        graphs (`list[Graph]`): The graphs.
    """

    date: str
    machine: str
    versions: Mapping[str, str]
    texts: str
    metrics: Mapping[str, str]
    graphs: Sequence[Graph]

    def table(self) -> str:
        """One row per graph: its file, granularity, size, cosine to float32, and scores in percent."""
        metrics = [f"{task} ({metric})" for task, metric in self.metrics.items()]
        header = ["file", "granularity", "weights", "MB", "cosine to float32", "lowest", *metrics]
        rows = []
        for graph in self.graphs:
            cosines = ["" if value is None else f"{value:.4f}" for value in (graph.mean_cosine, graph.lowest_cosine)]
            scores = [f"{100 * graph.scores[task]:.2f}" for task in self.metrics]
            size = f"{graph.bytes / 1e6:.1f}"
            rows.append([f"`{graph.file}`", graph.granularity, graph.weights, size, *cosines, *scores])
        return markdown(header, rows, words=3)


def write_graphs(
    encoder: GridEncoder,
    granularities: Sequence[Granularity],
    folder: Path,
    *,
    int8: bool = False,
    fp16: bool = False,
    normalize: bool | None = None,
    tasks: Sequence[str] = (),
    data: Path | None = None,
) -> GraphReport:
    """
    Write the graphs of an encoder and `quality.json` into the folder `onnx` of a checkpoint.

    `model.onnx` is the full size and `model_quantized.onnx` the same in 8 bits, the format that browsers load by
    default. Every other granularity is `model_4x64.onnx` and the like.

    Args:
        encoder ([`GridEncoder`]): The encoder.
        granularities (`Sequence[Granularity]`): Granularities besides the full size.
        folder (`Path`): Folder of the checkpoint.
        int8 (`bool`, *optional*, defaults to `False`): Write each granularity also in 8 bits.
        fp16 (`bool`, *optional*, defaults to `False`): Write each graph also in float16.
        normalize (`bool`, *optional*): Whether the graphs L2-normalise the embeddings. Default: as the encoder does.
        tasks (`Sequence[str]`, *optional*): Tasks to score each graph on. Default: STS-B, if it is in `data`.
        data (`Path`, *optional*): Folder of local data sets.

    Returns:
        [`GraphReport`]

    Raises:
        ValueError: as [`export_onnx`], or if a graph cannot be computed in float16.
    """
    if not tasks and data is not None and (data / DEFAULT_TASK).is_dir():
        tasks = [DEFAULT_TASK]
    evaluators = {task.name: load_task(task, data) for task in find_tasks(tasks)}
    full = full_size(unwrap_encoder(encoder.model).config, encoder.projection)
    graphs = []
    for granularity in dict.fromkeys([full, *granularities]):
        name = None if granularity == full else granularity
        file = export_onnx(encoder, granularity, folder / graph_name(name), normalize=normalize)
        variants = {"float32": file}
        if int8 or name is None:
            variants["int8"] = quantize_onnx(file, folder / graph_name(name, "int8"))
        if fp16:
            variants["float16"] = halve_onnx(file, folder / graph_name(name, "float16"))
        graphs += measure(encoder, granularity, variants, evaluators)
    report = GraphReport(
        date=date.today().isoformat(),
        machine=f"{platform.machine()}, {os.cpu_count()} cores",
        versions={name: version(name) for name in (*PACKAGES, "torch")},
        texts=f"{2 * NUM_PAIRS} titles and texts of Python's help topics",
        metrics={name: evaluator.main_metric for name, evaluator in evaluators.items()},
        graphs=graphs,
    )
    (folder / QUALITY).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return report


def write_encoder_files(encoder: GridEncoder, folder: Path) -> None:
    """Write what clients read besides the graphs: config, tokenizer, and the modules of sentence-transformers. A
    quantizer needs torch and is left out."""
    config = copy.deepcopy(unwrap_encoder(encoder.model).config)
    max_length = longest_text(config, encoder.tokenizer, encoder.max_length)
    if config.model_type != "m3bert":  # without the files of an elastic repository, it is the native encoder
        for name in ("elastic", "auto_map"):
            config.__dict__.pop(name, None)
    config.save_pretrained(folder)
    tokenizer = copy.deepcopy(encoder.tokenizer)
    tokenizer.model_max_length = max_length  # the only limit that transformers.js reads
    tokenizer.save_pretrained(folder)
    replace(encoder.settings, max_length=max_length).write(folder, width=full_size(config).dim)


def write_semantic_router(
    encoder: GridEncoder, granularities: Sequence[Granularity], folder: Path, stale: Sequence[str]
) -> list[int]:
    """
    Write an encoder that exits early as vLLM's semantic router reads it: config, tokenizer, a graph for each number of
    layers (`onnx/layer-4/model.onnx`), and `onnx/model_config.json`, which lists them. Returns the layers: those of
    the granularities, by default each in the space of the last layer, and the last. Files that match `stale` are
    removed first. ValueError as [`export_onnx`], or, before that, if the router would make other embeddings.

    The router (`onnx-binding` at 3d48f8c, 2026-08-22: its sources were read, not run) tokenises with `tokenizer.json`,
    takes the mean of `last_hidden_state` over the tokens, truncates it, and L2-normalises it. It adds no prompts.
    """
    config = unwrap_encoder(encoder.model).config
    full = full_size(config, encoder.projection)
    if encoder.pooling != "mean":
        raise ValueError(f"pooling={encoder.pooling!r}: the semantic router takes the mean over the tokens.")
    if not encoder.tokenizer.is_fast:
        raise ValueError(f"{type(encoder.tokenizer).__name__} has no tokenizer.json, which the semantic router reads.")
    for g in granularities:
        if g.layer == 0 or g.dim != full.dim:
            legal = f"1x{full.dim} to {full}"
            raise ValueError(f"{g}: the semantic router reads {legal}, and truncates the embeddings itself.")
    layers = sorted({g.layer for g in granularities} or {*shared_layers(config)} - {0})
    layers += [full.layer] * (full.layer not in layers)
    remove_files(folder, stale)
    write_encoder_files(encoder, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()  # the router pads, and takes each token of the tokenizer for a real one
    tokenizer.enable_truncation(longest_text(config, encoder.tokenizer, encoder.max_length))
    tokenizer.save(str(folder / "tokenizer.json"))
    for layer in layers:
        file = folder / "onnx" / f"layer-{layer}" / "model.onnx"
        export_onnx(encoder, Granularity(layer, full.dim), file, project_tokens=True)
    listed = {"total_layers": full.layer, "hidden_size": full.dim, "available_layers": layers}
    (folder / "onnx" / "model_config.json").write_text(json.dumps(listed, indent=1) + "\n", encoding="utf-8")
    return layers


def measure(
    encoder: GridEncoder, granularity: Granularity, files: Mapping[str, Path], evaluators: Mapping[str, Evaluator]
) -> list[Graph]:
    """Measure the graphs of one granularity. `files` are by type of weights, float32 first; `evaluators` have the
    texts and gold labels of tasks."""
    texts = [text for pair in islice(topic_pairs(), NUM_PAIRS) for text in (pair.summary, pair.body)]
    graphs: list[Graph] = []
    reference = None
    for weights, file in files.items():
        session = open_session(file)
        vectors = embed_all(session, encoder, texts)
        cosines: dict[str, float] = {}
        if reference is None:
            reference = vectors
        else:
            each = torch.cosine_similarity(vectors, reference)
            cosines = {"mean_cosine": round(each.mean().item(), 6), "lowest_cosine": round(each.min().item(), 6)}
            if weights == "float16" and not cosines["lowest_cosine"] >= LOWEST_FLOAT16_COSINE:  # also where it is NaN
                raise ValueError(
                    f"{granularity} cannot be computed in float16: the cosine to float32 is only "
                    f"{cosines['lowest_cosine']:.3f}; the limit is {LOWEST_FLOAT16_COSINE}."
                )
        scores = {}
        for name, evaluator in evaluators.items():
            parts = {
                part: embed_all(session, encoder, read, evaluator.read_as(evaluator.role(part), encoder))
                for part, read in evaluator.texts.items()
            }
            scores[name] = round(evaluator.score(parts)[evaluator.main_metric], 6)
        path = file.relative_to(file.parent.parent).as_posix()
        graphs.append(Graph(path, str(granularity), weights, file.stat().st_size, **cosines, scores=scores))
    return graphs


def embed_all(
    session: InferenceSession, encoder: GridEncoder, texts: Sequence[str], role: Role | None = "query"
) -> torch.Tensor:
    """The embeddings `(texts, dim)` of any number of texts in onnxruntime, with the prompt of their role."""
    texts = [encoder.prompt_of(role) + text for text in texts]
    order = np.argsort([len(text) for text in texts], kind="stable")  # texts of similar length share a batch
    parts = [order[start : start + encoder.batch_size] for start in range(0, len(texts), encoder.batch_size)]
    vectors = np.concatenate([embed(session, encoder, [texts[row] for row in part]) for part in parts])
    return torch.from_numpy(vectors[np.argsort(order)])


def onnx_engines(encoder: GridEncoder, layers: Iterable[int]) -> dict[str, dict[int, Callable[[str], np.ndarray]]]:
    """
    Export an encoder at some layers, and open the graphs with as many threads as torch has.

    Args:
        encoder ([`GridEncoder`]): The encoder. It is not changed.
        layers (`Iterable[int]`): Layers of its grid, each at the layer's largest dim. Two graphs per layer stay in
            memory, each with all token embeddings.

    Returns:
        `dict[str, dict[int, Callable]]`: runtime (`"ONNX float32"`, `"ONNX int8"`) -> layer -> function that encodes a
        query, given with its prompt, on the CPU. These are the `engines` of `measure_latency`.
    """
    queries = replace(encoder, max_length=encoder.max_length_of("query"))
    engines: dict[str, dict[int, Callable[[str], np.ndarray]]] = {"ONNX float32": {}, "ONNX int8": {}}

    def engine(file: Path) -> Callable[[str], np.ndarray]:
        session = open_session(file, threads=torch.get_num_threads())
        return lambda text: embed(session, queries, [text])

    with TemporaryDirectory() as folder:
        for layer in layers:
            granularity = Granularity(layer, encoder.grid.dims_of(layer)[-1])
            file = export_onnx(queries, granularity, Path(folder, f"{layer}.onnx"))
            engines["ONNX float32"][layer] = engine(file)
            engines["ONNX int8"][layer] = engine(quantize_onnx(file, Path(folder, f"{layer}_quantized.onnx")))
    return engines
