"""
Micro-steps of the papers' recipes on a GPU, at their sizes: time, tokens per second, peak memory, and what the GPU is
asked to do.

    python -m benchmarks.gpu_steps            # five minutes and 80 GB on an H100
    python -m benchmarks.gpu_steps --quick    # small sizes, also on a CPU

- Stage 1 of m3BERT (recipe `m3bert_stage1`): 64 texts of 512 tokens, 15% masked, vocabulary 250,002, 12 layers of 768
  dims in bf16. Multigranular against plain masked-LM training, against a loop over layers and dims with one backward
  pass each, and against the same under `torch.compile`.
- MIPIC and MIC (recipes `mipic_bert`, `mic_bert`): their batches of 256 tokens per text, BERT-base with random weights
  in float32 with TF32, against MRL on the same batch.
- Stage 3 of m3BERT (recipe `m3bert_stage3`): a step with cached gradients in mini-batches of 128 texts of 512 tokens,
  and InfoNCE of the 131,072 pairs of one device.

A micro-step is a forward and backward pass, without the optimizer. The last line printed is a JSON object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import yaml
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertModel

from benchmarks._measure import SEED, Benchmark, Bounds, Run, at_most
from m3bert.commands.command import run_command
from m3bert.commands.recipes import find_recipe
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM, M3BertModel
from m3bert.trainers import Contrastive, ContrastiveConfig, Grid, MICConfig, MIPICConfig, MultigranularMLM, NestedModel
from m3bert.trainers.embedding.info_nce import nested_info_nce


BOUNDS: Bounds = {
    "stage1_vs_plain": None,
    "stage1_vs_loop": at_most(1.0),
    "stage1_compiled_vs_eager": None,
    "stage1_kernels": None,
    "stage1_waits": None,
    "stage1_gb": at_most(80),
    "mipic_vs_mrl": None,
    "mipic_kernels": None,
    "mic_vs_mrl": None,
    "stage3_mini_batch_gb": at_most(80),
    "stage3_info_nce_seconds": None,
    "stage3_info_nce_gb": None,
}
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize")
Step = Callable[[], object]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sizes(quick: bool) -> dict[str, Any]:
    """The sizes of the encoders and batches."""
    small = {"num_hidden_layers": 12, "hidden_size": 768, "intermediate_size": 96, "num_attention_heads": 12}
    return {
        "model": small if quick else {},
        "vocabulary": 5000 if quick else 250_002,
        "texts": 2 if quick else 64,
        "tokens": 16 if quick else 512,
        "pairs": 300 if quick else 131_072,
        "cached": 6 if quick else 512,
        "mini_batch": 2 if quick else 128,
        "rounds": 1 if quick else 5,
    }


def recipe(name: str) -> dict[str, Any]:
    """The settings of a recipe."""
    return yaml.safe_load(find_recipe(name).read_text(encoding="utf-8"))


def finished(step: Step) -> None:
    """Run a step and wait for the GPU."""
    step()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def gigabytes(step: Step) -> float:
    """The peak of the memory that is allocated on the GPU while a step runs, with weights and gradients."""
    if DEVICE.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    finished(step)
    return torch.cuda.max_memory_allocated() / 2**30


def asked(step: Step) -> tuple[int, int]:
    """The kernels that a step starts, and the times that the host waits for the GPU in it."""
    step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        step()
    calls = {event.key: event.count for event in recorded.key_averages()}
    kernels = sum(count for key, count in calls.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel")))
    return kernels, sum(calls.get(key, 0) for key in WAITS)


def step_of(model: nn.Module, inputs: Mapping[str, Any], dtype: torch.dtype | None = None) -> None:
    """A forward and backward pass; gradients are added to those of earlier steps, as in accumulation."""
    with torch.autocast(DEVICE.type, dtype or torch.bfloat16, enabled=dtype is not None):
        loss = model(**inputs)["loss"]
    loss.backward()


def loop(model: Any, grid: Grid, batch: Mapping[str, torch.Tensor]) -> None:
    """The same losses with one product, cross-entropy and backward pass for every layer and dim."""
    inputs, masked = {name: batch[name] for name in ("input_ids", "attention_mask")}, batch["labels"] >= 0
    with torch.autocast(DEVICE.type, torch.bfloat16):
        states = model.model(**inputs, output_hidden_states=True).hidden_states
        normed = [model.model.norm(state) for state in states[:-1]] + [states[-1]]
        rows = [normed[layer][masked] for layer in grid.layers]
        leaves, targets = [each.detach().requires_grad_() for each in rows], batch["labels"][masked]
        head = model.get_output_embeddings()
        for leaf in leaves:
            for dim in grid.dims:
                logits = functional.linear(leaf[:, :dim], head.weight[:, :dim], head.bias)
                functional.cross_entropy(logits, targets).backward()
    torch.autograd.backward(rows, [leaf.grad for leaf in leaves])


def texts(number: int, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Texts of random tokens."""
    ids = torch.randint(1000, vocabulary, (number, tokens), device=DEVICE)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def stage_1(run: Run) -> dict[str, float]:
    """Masked-LM training at all granularities and at the largest."""
    size, settings = sizes(run.quick), recipe("m3bert_stage1")
    torch.manual_seed(SEED)
    grid = Grid.parse(settings["grid"])
    config = M3BertConfig(vocab_size=size["vocabulary"], sparse_prediction=True, **size["model"])
    model = M3BertForMaskedLM(config).train().to(DEVICE)
    batch = texts(size["texts"], size["tokens"], size["vocabulary"])
    masked = torch.rand(batch["input_ids"].shape, device=DEVICE) < settings["mlm_probability"]
    batch["labels"] = torch.where(masked, batch["input_ids"], -100)
    nested = NestedModel(model, MultigranularMLM(grid))
    compiled = torch.compile(NestedModel(model, MultigranularMLM(grid)))
    modules: dict[str, Any] = {"multigranular": nested, "plain": model, "compiled": compiled}
    steps: dict[str, Step] = {
        name: partial(step_of, module, batch, torch.bfloat16) for name, module in modules.items()
    }
    steps["loop"] = partial(loop, model, grid, batch)
    seconds = run.time(
        "stage 1, micro-step", {name: partial(finished, step) for name, step in steps.items()}, size["rounds"]
    )
    tokens = batch["input_ids"].numel()
    run.record("stage 1", {name: tokens / value for name, value in seconds.items()}, "tokens_per_second")
    memory = run.record("stage 1", {name: gigabytes(step) for name, step in steps.items()}, "gigabytes")
    kernels, waits = asked(steps["multigranular"])
    return {
        "stage1_vs_plain": seconds["multigranular"] / seconds["plain"],
        "stage1_vs_loop": seconds["multigranular"] / seconds["loop"],
        "stage1_compiled_vs_eager": seconds["compiled"] / seconds["multigranular"],
        "stage1_kernels": kernels,
        "stage1_waits": waits,
        "stage1_gb": memory["multigranular"],
    }


def regularizers(run: Run) -> dict[str, float]:
    """MIPIC and MIC on BERT-base, each against MRL on its batch."""
    size, figures = sizes(run.quick), {}
    for name, config_class in (("mipic", MIPICConfig), ("mic", MICConfig)):
        settings = recipe(f"{name}_bert")
        args = config_class(**{**settings, "output_dir": "unused", "save_strategy": "no", "tf32": not run.quick})
        config = BertConfig(vocab_size=size["vocabulary"], **size["model"])
        torch.manual_seed(SEED)
        model = BertModel(config).train().to(DEVICE)
        grid = args.grid_for(config)
        batch = texts(
            settings["per_device_train_batch_size"], min(size["tokens"], args.max_length), size["vocabulary"]
        )
        ids = torch.arange(len(batch["input_ids"]), device=DEVICE)
        columns = {f"view {view}": {**batch, "text_ids": ids} for view in range(2)}
        mrl = ContrastiveConfig(output_dir="unused", report_to="none", pooling=args.pooling).build_objective(grid)
        objectives = {"MRL": mrl, name: args.build_objective(grid)}
        steps = {
            key: partial(step_of, NestedModel(model, objective.to(DEVICE)), columns)
            for key, objective in objectives.items()
        }
        seconds = run.time(
            f"{name}, step", {key: partial(finished, step) for key, step in steps.items()}, size["rounds"]
        )
        run.record(name, {key: gigabytes(step) for key, step in steps.items()}, "gigabytes")
        figures[f"{name}_vs_mrl"] = seconds[name] / seconds["MRL"]
        if name == "mipic":
            figures["mipic_kernels"] = asked(steps[name])[0]
    return figures


def stage_3(run: Run) -> dict[str, float]:
    """The contrastive loss of one device, and mini-batches of the encoder."""
    size, settings = sizes(run.quick), recipe("m3bert_stage3")
    torch.manual_seed(SEED)
    grid = Grid.parse(settings["grid"])
    vectors = [torch.randn(size["pairs"], grid.dims[-1], device=DEVICE, requires_grad=True) for _ in range(2)]

    def loss() -> None:
        losses = nested_info_nce(*vectors, dims=grid.dims, temperature=settings["temperature"])
        torch.autograd.grad(losses.mean(dim=0).sum(), vectors)

    case = f"InfoNCE of {size['pairs']:,} pairs at {len(grid.dims)} dims"
    seconds = run.time(case, {"loss": partial(finished, loss)}, 2)["loss"]
    memory = gigabytes(loss)
    model = M3BertModel(M3BertConfig(vocab_size=size["vocabulary"], **size["model"])).train().to(DEVICE)
    nested = NestedModel(model, Contrastive(grid, temperature=settings["temperature"]), size["mini_batch"])
    columns = {name: texts(size["cached"], size["tokens"], size["vocabulary"]) for name in settings["text_columns"]}
    step = partial(step_of, nested, columns, torch.bfloat16)
    case = f"stage 3, {size['cached']} pairs with cached gradients"
    took = run.time(case, {"step": partial(finished, step)}, 2)["step"]
    run.record("stage 3", {"step": 2 * size["cached"] * size["tokens"] / took}, "tokens_per_second")
    peak = run.record("stage 3", {"InfoNCE": memory, "step": gigabytes(step)}, "gigabytes")
    return {
        "stage3_mini_batch_gb": peak["step"],
        "stage3_info_nce_seconds": seconds,
        "stage3_info_nce_gb": memory,
    }


def measure(run: Run) -> dict[str, float]:
    return {**stage_1(run), **regularizers(run), **stage_3(run)}


# Not in `python -m benchmarks`, which runs without a GPU.
GPU_BENCHMARK = Benchmark("gpu_steps", __doc__, BOUNDS, measure)


if __name__ == "__main__":
    run_command(GPU_BENCHMARK.main)
