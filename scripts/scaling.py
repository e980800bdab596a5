"""
Compute what a training step of m3BERT needs, before it is run: memory per GPU, bytes that a GPU sends, and time.

    m3bert scaling                                        # stage 3 of the paper, 1 to 512 GPUs
    m3bert scaling --stage 1 --mini_batch 32 --gpus 64
    m3bert scaling --gpus 8 --candidates gather ring --dims 768 --checkpointing --json

Memory is in GB (10^9 bytes). `encoding` is the peak while mini-batches are encoded, `loss` that while the contrastive
loss is computed, `fits` whether the larger one is below --memory_gb. Nothing is measured: docs/scaling.md names what
is assumed, and how far measured memory is from it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, replace
from typing import Any

from .command import argument_parser, run_command


GPUS = [1, 8, 64, 512]
MINI_BATCH = 64
HEADER = ["GPUs", "strategy", "candidates", "encoding GB", "loss GB", "fits", "sent GB", "compute s", "sending s"]


def config_of(name: str | None, revision: str | None) -> Any:
    """
    The sizes of an encoder: the paper's, or those of a checkpoint as `m3bert convert` would convert it.

    Raises:
        ValueError: if the checkpoint cannot be represented as m3BERT.
    """
    from modeling_m3bert import M3BertConfig

    if name is None:
        return M3BertConfig()
    from transformers import AutoConfig

    from modeling_m3bert.conversion_m3bert import m3bert_config, refuse_unrepresentable

    config = AutoConfig.from_pretrained(name, revision=revision)
    if isinstance(config, M3BertConfig):
        return config
    refuse_unrepresentable(config)
    return m3bert_config(config)


def steps_of(options: argparse.Namespace) -> list[Any]:
    """
    The steps to compare, in the order of the table.

    Raises:
        ValueError: as [`Step`], or if a stage has no candidates.
    """
    from trainers.core.scaling_step import GATHER, RING, STAGES, Hardware, Step

    changes = {name: getattr(options, name) for name in ("batch", "length", "tokens") if getattr(options, name)}
    changes |= {name: tuple(getattr(options, name)) for name in ("layers", "dims") if getattr(options, name)}
    if options.length and not options.tokens:
        changes["tokens"] = min(options.length, STAGES[options.stage].tokens)
    stage = replace(STAGES[options.stage], **changes)
    if not stage.contrastive and RING in (options.candidates or []):
        raise ValueError(f"--candidates ring is for contrastive training; stage {options.stage} predicts tokens.")
    hardware = Hardware(
        compute=options.tflops * 1e12,
        float32=options.float32_tflops * 1e12,
        utilisation=options.utilisation,
        node_bandwidth=options.node_bandwidth_gb * 1e9,
        bandwidth=options.bandwidth_gb * 1e9,
    )
    config = config_of(options.model_name_or_path, options.revision)
    return [
        Step(
            config,
            stage,
            gpus,
            options.mini_batch,
            strategy,
            candidates,
            checkpointing=options.checkpointing,
            hardware=hardware,
        )
        for gpus in options.gpus
        for strategy in options.strategy
        for candidates in options.candidates or ([GATHER, RING] if stage.contrastive else [GATHER])
        if gpus > 1 or (strategy == options.strategy[0] and candidates == (options.candidates or [GATHER])[0])
    ]


def numbers_of(step: Any) -> dict[str, Any]:
    """All numbers of a step: bytes of each part at both moments, bytes sent, operations and seconds."""
    kept = step.kept_bytes()
    return {
        "gpus": step.gpus,
        "strategy": step.strategy,
        "candidates": step.candidates if step.stage.contrastive else None,
        "mini_batch": step.mini_batch,
        "checkpointing": step.checkpointing,
        "stage": asdict(step.stage),
        "hardware": asdict(step.hardware),
        "parameters": step.parameters,
        "encoding_bytes": kept | step.encoder_bytes(),
        "loss_bytes": kept | step.loss_bytes(),
        "sent_bytes": step.communication(),
        "operations": step.operations(),
        "seconds": step.seconds(),
    }


def row_of(numbers: dict[str, Any], memory_gb: float) -> list[str]:
    """A row of the table."""
    encoding, loss = (sum(numbers[name].values()) / 1e9 for name in ("encoding_bytes", "loss_bytes"))
    sending = numbers["seconds"]["communication"]
    alone = numbers["gpus"] == 1
    return [
        f"{numbers['gpus']:,}",
        "-" if alone else numbers["strategy"],
        "-" if alone or numbers["candidates"] is None else numbers["candidates"],
        f"{encoding:.1f}",
        f"{loss:.1f}",
        "yes" if max(encoding, loss) <= memory_gb else "no",
        f"{sum(numbers['sent_bytes'].values()) / 1e9:,.1f}",
        f"{sum(numbers['seconds'].values()) - sending:,.1f}",
        f"{sending:,.1f}",
    ]


def title_of(step: Any) -> str:
    """What the table is about."""
    stage, rows = step.stage, "pairs" if step.stage.contrastive else "texts"
    grid = f"{','.join(map(str, stage.layers))}x{','.join(map(str, stage.dims))}"
    return (
        f"{step.parameters:,} parameters, {stage.batch:,} {rows} per step, up to {stage.length} tokens per text "
        f"(mean {stage.tokens:g}), grid {grid}, {step.mini_batch} texts at a time"
        f"{', with gradient checkpointing' if step.checkpointing else ''}."
    )


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--model_name_or_path", help="folder or Hub id of the encoder; default: the paper's base model"
    )
    parser.add_argument("--revision", help="branch, tag or commit of the encoder")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3, help="stage of the paper")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS, help="numbers of GPUs")
    parser.add_argument("--strategy", nargs="+", choices=("ddp", "fsdp"), default=["ddp"], help="data parallelism")
    parser.add_argument(
        "--candidates", nargs="+", choices=("gather", "ring"), help="how ranks see all candidates; default: both"
    )
    parser.add_argument("--mini_batch", type=int, default=MINI_BATCH, help="texts that a GPU encodes at a time")
    parser.add_argument("--checkpointing", action="store_true", help="gradient checkpointing of the layers")
    parser.add_argument("--batch", type=int, help="pairs or texts per step, on all GPUs; default: the stage's")
    parser.add_argument("--length", type=int, help="tokens of the longest text; default: the stage's")
    parser.add_argument("--tokens", type=float, help="mean tokens of a text; default: the stage's")
    parser.add_argument("--layers", type=int, nargs="+", help="layers of the grid; default: the stage's")
    parser.add_argument("--dims", type=int, nargs="+", help="dims of the grid; default: the stage's")
    parser.add_argument("--memory_gb", type=float, default=80, help="memory of a GPU, in GB")
    parser.add_argument(
        "--tflops", type=float, default=312, help="peak TFLOP/s of the encoder's products, in bfloat16"
    )
    parser.add_argument("--float32_tflops", type=float, default=19.5, help="peak TFLOP/s of similarities, in float32")
    parser.add_argument("--utilisation", type=float, default=0.4, help="share of the peak that is reached, up to 1")
    parser.add_argument(
        "--node_bandwidth_gb", type=float, default=300, help="GB/s that a GPU sends, for up to 8 GPUs (one node)"
    )
    parser.add_argument("--bandwidth_gb", type=float, default=25, help="GB/s that a GPU sends, for several nodes")
    parser.add_argument("--json", action="store_true", help="print all numbers as JSON instead of the table")
    options = parser.parse_args(arguments)
    steps = steps_of(options)
    numbers = [numbers_of(step) for step in steps]
    if options.json:
        print(json.dumps(numbers, indent=1))
        return
    from hub_cards.tables import markdown

    print(f"{title_of(steps[0])}\n")
    print(markdown(HEADER, [row_of(each, options.memory_gb) for each in numbers], words=3))


if __name__ == "__main__":
    run_command(main)
