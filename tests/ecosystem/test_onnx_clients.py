"""
Exported graphs in clients of other makers: transformers.js in Node and OpenVINO give the vectors of torch, at the full
size and at 4x64, in float32 and in 8 bits.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub.constants import HF_HOME

from m3bert.commands import export
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.onnx_export import PACKAGES
from m3bert.trainers import Granularity, Grid
from tests.snippets import ROOT


pytestmark = pytest.mark.slow

TRANSFORMERS_JS = "@huggingface/transformers@4.3.1"
# None is longer than the model reads: transformers.js truncates without keeping the last special token.
TEXTS = ["One text.", "", "Remove a whole directory tree.", "wörds that no vocabulary has", "rather long, " * 60]
FULL, SMALL = Granularity(6, 384), Granularity(4, 64)
# Reads a request from standard input: folder, dtype, name of the graph, texts. Answers with the vectors that the
# pipeline pools itself, and with those of the graph.
EMBED = """
import { env, pipeline } from "@huggingface/transformers";
import { readFileSync } from "node:fs";
import { basename, dirname } from "node:path";

const { folder, dtype, name, texts } = JSON.parse(readFileSync(0, "utf8"));
env.allowRemoteModels = false;
env.localModelPath = dirname(folder);
const options = { dtype, model_file_name: name ?? undefined, local_files_only: true };
const extractor = await pipeline("feature-extraction", basename(folder), options);
const answer = { pooled: [], sentence: [] };
for (let start = 0; start < texts.length; start += 16) {
  const batch = texts.slice(start, start + 16);
  answer.pooled.push(...(await extractor(batch, { pooling: "mean", normalize: true })).tolist());
  const inputs = extractor.tokenizer(batch, { padding: true, truncation: true });
  answer.sentence.push(...(await extractor.model(inputs)).sentence_embedding.tolist());
}
console.log(JSON.stringify(answer));
"""


@pytest.fixture(scope="module")
def exported(published, tmp_path_factory) -> Path:
    """The real encoder as an m3BERT, exported by the command."""
    for package in PACKAGES:
        pytest.importorskip(package, reason="needs the extra onnx")
    folder = tmp_path_factory.mktemp("exported") / "minilm"
    names = ["--model_name_or_path", str(published), "--output_dir", str(folder)]
    export.main([*names, "--granularity", str(SMALL), "--fp16"])
    return folder


@pytest.fixture(scope="module")
def expected(published) -> dict[Granularity, np.ndarray]:
    """What torch gives."""
    embeddings = Checkpoint(published).encoder(Grid((SMALL, FULL))).encode(TEXTS)
    return {g: embeddings.at(g, normalize=True).numpy() for g in (FULL, SMALL)}


@pytest.fixture(scope="module")
def run_in_node() -> Callable[..., str]:
    """Run a module with transformers.js, which is installed once per machine; returns what it printed."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node.js and npm are not installed")
    folder = Path(HF_HOME, "m3bert") / TRANSFORMERS_JS.strip("@").replace("/", "-")
    if not (folder / "node_modules" / "@huggingface").is_dir():
        with tempfile.TemporaryDirectory() as new:
            install = [npm, "install", "--ignore-scripts", "--no-audit", "--no-fund", TRANSFORMERS_JS]
            done = subprocess.run(install, cwd=new, capture_output=True, text=True, timeout=600)
            if done.returncode != 0:
                pytest.skip(f"no npm registry: {done.stderr.strip().splitlines()[0]}")
            shutil.copytree(new, folder, symlinks=True, dirs_exist_ok=True)

    def run(code: str, request: str = "") -> str:
        with tempfile.NamedTemporaryFile("w", suffix=".mjs", dir=folder, encoding="utf-8") as script:
            script.write(code)
            script.flush()
            command = [node, script.name]
            done = subprocess.run(command, input=request, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def in_node(run_in_node) -> Callable[..., dict[str, np.ndarray]]:
    """Embed texts with transformers.js."""

    def embed(source: Path, dtype: str, texts: list[str], name: str | None = None) -> dict[str, np.ndarray]:
        request = json.dumps({"folder": str(source), "dtype": dtype, "name": name, "texts": texts})
        answer = json.loads(run_in_node(EMBED, request))
        return {kind: np.array(vectors, np.float32) for kind, vectors in answer.items()}

    return embed


@pytest.mark.parametrize(("granularity", "name"), [(FULL, None), (SMALL, f"model_{SMALL}")], ids=str)
def test_transformers_js_gives_the_vectors_of_torch(exported, expected, in_node, granularity, name):
    found = in_node(exported, "fp32", TEXTS, name)
    for vectors in found.values():
        np.testing.assert_allclose(vectors, expected[granularity], atol=1e-4, rtol=0)
    print("transformers.js", granularity, max(np.abs(v - expected[granularity]).max() for v in found.values()))


def test_the_examples_in_javascript_run(exported, run_in_node, tmp_path):
    """Those of the documentation and of the model card, with a folder in place of the Hub."""
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / "model").symlink_to(exported)
    page, template = (
        (ROOT / "docs" / "serve.md").read_text(),
        (ROOT / "hub_cards" / "usage.md").read_text().replace("{{ repo }}", "user/model"),
    )
    examples = [code for text in (page, template) for code in re.findall(r"```javascript\n(.*?)```", text, re.DOTALL)]
    local = f'env.allowRemoteModels = false; env.localModelPath = "{tmp_path}";'
    for code in examples:
        assert "user/model" in code
        assert run_in_node(f'import {{ env }} from "@huggingface/transformers"; {local}\n{code}').startswith("[")
    assert len(examples) == 2


def test_openvino_gives_the_vectors_of_torch(exported, published, expected):
    openvino = pytest.importorskip("openvino", reason="needs the extra openvino")
    tokens = Checkpoint(published).tokenizer(TEXTS, padding=True, truncation=True, max_length=256, return_tensors="np")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    # The default is bfloat16 on processors that have it.
    options = {"INFERENCE_PRECISION_HINT": "f32"}
    for granularity, file in ((FULL, "model.onnx"), (SMALL, f"model_{SMALL}.onnx")):
        outputs = openvino.Core().compile_model(exported / "onnx" / file, "CPU", options)(inputs)
        np.testing.assert_allclose(outputs["sentence_embedding"], expected[granularity], atol=1e-4, rtol=0)
        states, real = outputs["last_hidden_state"], inputs["attention_mask"][..., None]
        pooled = (states * real).sum(1) / real.sum(1)
        pooled /= np.linalg.norm(pooled, axis=1, keepdims=True)
        np.testing.assert_allclose(pooled, expected[granularity], atol=1e-4, rtol=0)
        print("OpenVINO", granularity, np.abs(outputs["sentence_embedding"] - expected[granularity]).max())
    outputs = openvino.Core().compile_model(exported / "onnx" / "model_quantized.onnx", "CPU", options)(inputs)
    assert ((outputs["sentence_embedding"] * expected[FULL]).sum(1) >= 0.95).all()
