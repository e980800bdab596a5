"""
A native export needs neither this package nor its code: transformers 4.57 and sentence-transformers 5, in a virtual
environment of their own, give the same vectors. An m3BERT needs transformers 5, and says so there.
"""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from m3bert.exits.fit import fit_exits
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.hub_cards.onnx_graphs import write_graphs
from m3bert.trainers import Granularity, Grid
from tests.conftest import save
from tests.ecosystem.conftest import LONGEST


pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REQUIREMENTS = ("transformers==4.57.*", "sentence-transformers==5.*", "optimum-onnx[onnxruntime]")
TEXTS = ["One text.", "", "Remove a whole directory tree.", "wörds that no vocabulary has", "too long, " * 300]
SIZES = [Granularity(4, 64), Granularity(6, 384)]


@pytest.fixture(scope="module")
def older_python(tmp_path_factory) -> Path:
    """Python with the older libraries, and without this project."""
    folder = tmp_path_factory.mktemp("older")
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    (pinned,) = (line for line in constraints if line.startswith("torch=="))
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for packages in ([pinned], [pinned, *REQUIREMENTS]):
        command = [folder / "bin" / "pip", "install", "--quiet", *packages]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1200)
        if done.returncode != 0:
            pytest.skip(f"no package registry: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin" / "python"


@pytest.fixture
def run_older(older_python, tmp_path) -> Callable[[str], subprocess.CompletedProcess]:
    """Run code with the older libraries in the test's folder."""

    def run(code: str) -> subprocess.CompletedProcess:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        return subprocess.run(
            [older_python, "-I", "-c", textwrap.dedent(code)],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    return run


def expected_vectors(folder: Path, granularities: list[Granularity]) -> dict[str, torch.Tensor]:
    """By name: each text on its own in float32, and all in one padded batch in float64."""
    encoder, expected = Checkpoint(folder).encoder(Grid(tuple(granularities))), {}
    for granularity in granularities:
        expected[f"{granularity} alone"] = torch.cat([encoder.encode([text]).at(granularity) for text in TEXTS])
    encoder.model.double()
    for granularity in granularities:
        expected[f"{granularity} batch"] = encoder.encode(TEXTS).at(granularity)
    return expected


def test_native_exports_give_the_same_vectors(published, tmp_path, run_older):
    """
    Of 4x64 with an exit and of the full size, by SentenceTransformer.

    In float32 the vector of a text depends on the texts that share its batch, by up to 1e-6 on some processors. So
    float32 compares texts on their own, and a padded batch is compared in float64.
    """
    model, tokenizer = AutoModel.from_pretrained(published), AutoTokenizer.from_pretrained(published)
    words = json.loads((published / "tokenizer.json").read_text())["model"]["vocab"]
    lines = [" ".join(list(words)[start : start + 12]) for start in range(2000, 8000, 12)]
    fit_exits(model, tokenizer, {"words": lines}, layers=[4])
    save(tmp_path / "elastic", model, tokenizer, max_length=LONGEST)
    for size in SIZES:
        export_native(Checkpoint(tmp_path / "elastic"), tmp_path / str(size), size)
    save_file(expected_vectors(tmp_path / "elastic", SIZES), tmp_path / "expected.safetensors")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    done = run_older(
        """
        import json
        import importlib.util
        import sentence_transformers, torch, transformers
        from safetensors.torch import load_file

        assert transformers.__version__.startswith("4.57.") and sentence_transformers.__version__.startswith("5.")
        assert not any(importlib.util.find_spec(name) for name in ("m3bert", "modeling_m3bert", "trainers"))
        texts = json.load(open("texts.json"))
        for name, vectors in load_file("expected.safetensors").items():
            size, batch = name.split()
            model = sentence_transformers.SentenceTransformer(size, device="cpu")
            if batch == "batch":
                model.double()
            found = model.encode(texts, convert_to_tensor=True, batch_size=len(texts) if batch == "batch" else 1)
            torch.testing.assert_close(found.float(), vectors, atol=1e-6, rtol=0)
            print("EQUAL", name, (found - vectors).abs().max().item())
        """
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert done.stdout.count("EQUAL") == 4 and "newly initialized" not in done.stderr


def test_sentence_transformers_runs_the_graphs_of_a_native_export(published, tmp_path, run_older):
    """Of 4x64: its graph returns the states, and sentence-transformers applies pooling and the Dense module."""
    native = export_native(Checkpoint(published), tmp_path / "native", SIZES[0])
    write_graphs(native.encoder(), [], tmp_path / "native")
    (tmp_path / "texts.json").write_text(json.dumps(TEXTS))
    done = run_older(
        """
        import json
        import torch
        from sentence_transformers import SentenceTransformer

        texts, vectors = json.load(open("texts.json")), {}
        for backend, options in (("torch", {}), ("onnx", {"file_name": "onnx/model.onnx"})):
            model = SentenceTransformer("native", backend=backend, device="cpu", model_kwargs=options)
            vectors[backend] = model.encode(texts, convert_to_tensor=True)
        torch.testing.assert_close(vectors["onnx"], vectors["torch"], atol=1e-4, rtol=0)
        print("EQUAL", tuple(vectors["onnx"].shape), (vectors["onnx"] - vectors["torch"]).abs().max().item())
        """
    )
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    assert "EQUAL (5, 64)" in done.stdout


def test_an_m3bert_says_what_it_needs(published, tmp_path, run_older):
    shutil.copytree(published, tmp_path / "elastic")
    done = run_older(
        'from transformers import AutoModel\nAutoModel.from_pretrained("elastic", trust_remote_code=True)'
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("ImportError: m3BERT needs transformers 5.0 or later, and 4.57.")
    assert "m3bert export --format native" in last
