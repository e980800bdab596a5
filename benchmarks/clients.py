"""
One size as a plain folder, read by clients of other makers: the lowest cosine of their vectors to ours.

    python -m benchmarks.clients --others FOLDER

Encoder: all-MiniLM-L6-v2 as an elastic repository with a path of its layers 1, 2, 5 and 6, which is not refitted. The
folder is what `m3bert export --sizes 4` writes, with ONNX graphs. transformers, sentence-transformers and onnxruntime
are those of this environment. `--others` is a virtual environment with `pip install fastembed gguf safetensors
xllamacpp`, in which `npm install @huggingface/transformers` was run. llama.cpp reads a GGUF file that is written here.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import AutoModel

from benchmarks._measure import RESULTS, about
from m3bert.commands import export
from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import default_base
from m3bert.encode.encoder import GridEncoder
from m3bert.modeling.modeling_elastic import make_elastic
from m3bert.models.repository import write_repository


TEXTS = ["One text.", "Remove a whole directory tree.", "wörds that no vocabulary has: 東京", "rather long, " * 40]
OURS = {
    "transformers, mean": """
from transformers import AutoModel, AutoTokenizer
inputs = AutoTokenizer.from_pretrained(folder)(texts, padding=True, return_tensors="pt")
mask = inputs["attention_mask"][..., None]
vectors = (AutoModel.from_pretrained(folder)(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)""",
    "sentence-transformers": """
from sentence_transformers import SentenceTransformer
vectors = SentenceTransformer(folder, device="cpu").encode(texts)""",
    "onnxruntime": """
import onnxruntime
from tokenizers import Tokenizer
read = [Tokenizer.from_file(folder + "/tokenizer.json").encode(text) for text in texts]
feeds = [{"input_ids": [its.ids], "attention_mask": [its.attention_mask]} for its in read]
session = onnxruntime.InferenceSession(folder + "/onnx/model.onnx")
vectors = [session.run(["sentence_embedding"], feed)[0][0] for feed in feeds]""",
}
THEIRS = {
    "FastEmbed": """
from fastembed import TextEmbedding
from fastembed.common.model_description import ModelSource, PoolingType
own = {"pooling": PoolingType.MEAN, "normalization": True, "sources": ModelSource(hf="user/model"), "dim": 384}
TextEmbedding.add_custom_model("user/model", model_file="onnx/model.onnx", **own)
vectors = TextEmbedding("user/model", specific_model_path=folder).embed(texts)""",
    # A token that begins a word has a mark in the file, and one that continues it has none.
    "llama.cpp, GGUF": """
import gguf, xllamacpp
from safetensors.numpy import load_file
config, tokens = (json.load(open(f"{folder}/{name}.json")) for name in ("config", "tokenizer"))
words = sorted(tokens["model"]["vocab"], key=tokens["model"]["vocab"].get)
special, depth = [token["content"] for token in tokens["added_tokens"]], config["num_hidden_layers"]
out = gguf.GGUFWriter(file := folder + "/model.gguf", "bert")
for name, key in {"block_count": "num_hidden_layers", "context_length": "max_position_embeddings",
                  "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
                  "head_count": "num_attention_heads", "layer_norm_eps": "layer_norm_eps",
                  "token_type_count": "type_vocab_size"}.items():
    getattr(out, "add_" + name)(config[key])
out.add_causal_attention(False), out.add_pooling_type(gguf.PoolingType.MEAN), out.add_tokenizer_model("bert")
out.add_token_list([t if t in special else t[2:] if t.startswith("##") else "\\u2581" + t for t in words])
out.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in words])
for name, token in {"bos": "CLS", "cls": "CLS", "eos": "SEP", "seperator": "SEP", "unknown": "UNK"}.items():
    out.add_uint32(f"tokenizer.ggml.{name}_token_id", words.index(f"[{token}]"))
known = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BERT, depth)
for name, tensor in load_file(folder + "/model.safetensors").items():
    if not name.startswith("pooler"):
        out.add_tensor(known.get_name(name, (".weight", ".bias")), tensor)
out.write_header_to_file(), out.write_kv_data_to_file(), out.write_tensors_to_file(), out.close()
options = xllamacpp.CommonParams()
options.model.path, options.embedding, options.n_ctx, options.n_parallel = file, True, 512, 1
answer = xllamacpp.Server(options).handle_embeddings({"input": texts, "model": "size"})
vectors = [row["embedding"] for row in answer["data"]]""",
}
FRAME = "import json, sys\nfolder, texts = json.load(sys.stdin){}\nprint('FOUND', [[*map(float, v)] for v in vectors])"
JAVASCRIPT = """import { env, pipeline } from "@huggingface/transformers"; import { readFileSync } from "node:fs";
const [folder, texts] = JSON.parse(readFileSync(0)), at = folder.lastIndexOf("/") + 1;
env.localModelPath = folder.slice(0, at);
const extractor = await pipeline("feature-extraction", folder.slice(at), { dtype: "fp32", local_files_only: true });
console.log("FOUND", JSON.stringify((await extractor(texts, { pooling: "mean", normalize: true })).tolist()));"""


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--others", type=Path, required=True, help="virtual environment of the other clients")
    others, lowest = parser.parse_args(arguments).others.resolve(), dict[str, float]()
    commands = {name: [sys.executable, "-c", FRAME.format(code)] for name, code in OURS.items()}
    commands |= {name: [str(others / "bin" / "python"), "-c", FRAME.format(code)] for name, code in THEIRS.items()}
    commands["transformers.js"] = ["node", "--input-type=module", "-e", JAVASCRIPT]
    model, refitted = make_elastic(AutoModel.from_pretrained(default_base())), "encoder.layer.1.output.dense.weight"
    model.set_depths(paths={4: ([1, 2, 5, 6], {refitted: model.get_parameter(refitted)})}, fit={})
    with TemporaryDirectory() as temporary:
        write_repository(model, Path(temporary, "elastic"))
        export.main(["--format=native", "--model", f"{temporary}/elastic", "--sizes", "4", "--output_dir", temporary])
        folder = f"{temporary}/4-layers"
        export.main(["--model", folder, "--output_dir", folder])
        encoder = GridEncoder.from_pretrained(Path(temporary, "elastic"), grid="4x384")
        expected = encoder.encode(TEXTS).at(encoder.grid.full)
        for name, command in commands.items():
            request = json.dumps([folder, TEXTS])
            done = subprocess.run(command, input=request, cwd=others, stdout=subprocess.PIPE, text=True, check=True)
            vectors = torch.tensor(json.loads(done.stdout.rpartition("FOUND")[2]))
            lowest[name] = round(torch.cosine_similarity(vectors, expected).min().item(), 6)
            print(f"{name}: {lowest[name]}", flush=True)
    described = about(packages=["sentence-transformers", "onnxruntime"])
    (RESULTS / "clients.json").write_text(json.dumps({**described, "lowest_cosine": lowest}, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main)
