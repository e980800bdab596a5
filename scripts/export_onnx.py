"""
Write an encoder as ONNX files, one a granularity, with pooling, cut and normalisation inside:

    python -m scripts.export_onnx --model_name_or_path runs/model --granularities 2x64 6x384 --output_dir runs/onnx

writes `model_2x64.onnx` and `model_6x384.onnx`; with --int8 also `model_2x64_int8.onnx` and so on. A file is written
once onnxruntime gives what torch gives. Prompts are not in it: put them before the texts. Needs the extra `onnx`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import HfArgumentParser

from hub_cards.onnx_export import CHECKED, embed, export_onnx, largest_difference, open_session, quantize_onnx
from scripts._command import HelpFormatter, run_command
from scripts._encoder import EncoderArguments, load_encoder
from trainers.evaluation import GridEncoder


@dataclass
class ExportArguments:
    """What to export, and where to write it."""

    granularities: list[str] = field(default_factory=list, metadata={"help": "One file for each: 2x64 6x384."})
    output_dir: str = field(default="runs/onnx", metadata={"help": "Where the files go."})
    normalize: bool = field(default=True, metadata={"help": "L2-normalise the embeddings."})
    opset: int = field(default=18, metadata={"help": "Version of ONNX's operators, 18 to 23."})
    int8: bool = field(default=False, metadata={"help": "Also write each with weights of 8 bits."})


def lowest_cosine(encoder: GridEncoder, file: Path, other: Path) -> float:
    """Between what two files give for the same text, over a few texts."""
    sessions = [open_session(part) for part in (file, other)]
    return min(
        torch.cosine_similarity(*(torch.from_numpy(embed(session, encoder, texts)) for session in sessions))
        .min()
        .item()
        for texts in CHECKED
    )


def main(arguments: list[str]) -> None:
    parser = HfArgumentParser((EncoderArguments, ExportArguments), description=__doc__, formatter_class=HelpFormatter)
    encoding, options = parser.parse_args_into_dataclasses(arguments)
    if bool(options.granularities) == bool(encoding.grid):
        raise ValueError("Name what to export once: --granularities 2x64 6x384, or --grid 2,6x64,384.")
    encoding.grid = encoding.grid or ",".join(options.granularities)
    encoder = load_encoder(encoding)
    for granularity in encoder.grid:
        file = Path(options.output_dir) / f"model_{granularity}.onnx"
        export_onnx(encoder, granularity, file, normalize=options.normalize, opset=options.opset)
        difference = largest_difference(encoder, file)
        print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, at most {difference:.1e} from torch")
        if options.int8:
            small = quantize_onnx(file, file.with_name(f"{file.stem}_int8.onnx"))
            cosine = lowest_cosine(encoder, file, small)
            print(f"{small}: {small.stat().st_size / 1e6:.1f} MB, cosine to float32 at least {cosine:.4f}")


if __name__ == "__main__":
    run_command(main)
