"""
Export an encoder to ONNX, one file per granularity, with pooling, truncation and normalisation in the graph:

    m3bert export --model_name_or_path runs/model --granularities 2x64 6x384 --output_dir runs/onnx

writes `model_2x64.onnx` and `model_6x384.onnx`, and with --int8 also `model_2x64_int8.onnx` and so on. Each file is
checked: onnxruntime must give what torch gives. Prompts are not in the graph: prepend them to the texts. Needs the
extra `onnx`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from hub_cards.onnx_export import CHECKED, OPSETS, embed, export_onnx, largest_difference, open_session, quantize_onnx
from trainers.evaluation import GridEncoder

from .command import parse_options, run_command
from .encoder import EncoderArguments, load_encoder


FORMATS = ("onnx",)


@dataclass
class ExportArguments:
    """What to export, and where to."""

    format: str = field(default="onnx", metadata={"help": f"Format of the export: {', '.join(FORMATS)}."})
    granularities: list[str] = field(
        default_factory=list, metadata={"help": "Granularities to export, one file each: 2x64 6x384."}
    )
    output_dir: str = field(default="runs/onnx", metadata={"help": "Folder for the files."})
    normalize: bool = field(default=True, metadata={"help": "L2-normalise the embeddings."})
    opset: int = field(default=18, metadata={"help": "Version of the ONNX operator set, 18 to 23."})
    int8: bool = field(default=False, metadata={"help": "Also write each file with 8-bit weights."})


def lowest_cosine(encoder: GridEncoder, file: Path, other: Path) -> float:
    """The lowest cosine between the embeddings of two files for the same text, over a few texts."""
    sessions = [open_session(part) for part in (file, other)]
    cosines = []
    for texts in CHECKED:
        first, second = (torch.from_numpy(embed(session, encoder, texts)) for session in sessions)
        cosines.append(torch.cosine_similarity(first, second).min().item())
    return min(cosines)


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, ExportArguments), __doc__, arguments)
    if options.format not in FORMATS:
        raise ValueError(f"--format {options.format} is not known; legal values: {', '.join(FORMATS)}.")
    if bool(options.granularities) == bool(encoding.grid):
        raise ValueError("Pass either --granularities 2x64 6x384 or --grid 2,6x64,384.")
    if options.opset not in OPSETS:
        raise ValueError(f"--opset {options.opset} must be within {OPSETS[0]}..{OPSETS[-1]}.")
    encoding.grid = encoding.grid or ",".join(options.granularities)
    encoder = load_encoder(encoding)
    for granularity in encoder.grid:
        file = Path(options.output_dir) / f"model_{granularity}.onnx"
        export_onnx(encoder, granularity, file, normalize=options.normalize, opset=options.opset)
        difference = largest_difference(encoder, file)
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, differs from torch by {difference:.1e} at most")
        if options.int8:
            small = quantize_onnx(file, file.with_name(f"{file.stem}_int8.onnx"))
            cosine = lowest_cosine(encoder, file, small)
            print(f"{small}: {small.stat().st_size / 1e6:.1f} MB, cosine to float32 {cosine:.4f} or more")


if __name__ == "__main__":
    run_command(main)
