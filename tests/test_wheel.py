"""The built wheel: what is in it, and that it works outside the checkout."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest


pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent
SOURCES = ("m3bert", "modeling_m3bert", "trainers", "hub_cards", "scripts", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that nothing is left in the checkout."""
    folder = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"), symlinks=True)
        else:
            shutil.copy(ROOT / name, folder)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", "dist", "."]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (found,) = (folder / "dist").glob("*.whl")
    return found


def test_the_wheel_holds_the_packages_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names}
    assert {name for name in top if not name.endswith(".dist-info")} == {"m3bert"}


def test_the_wheel_holds_every_file_of_the_commands(wheel):
    """Commands and recipes come from the folder `scripts`, the template of cards from `hub_cards`. Scripts for jobs
    are no commands: they install the wheel themselves."""
    names = set(zipfile.ZipFile(wheel).namelist())
    commands = [file.relative_to(ROOT / "scripts") for file in (ROOT / "scripts").rglob("*.[pys]*") if file.is_file()]
    suffixes = (".py", ".yaml", ".sh")
    wanted = {f"m3bert/commands/{file}" for file in commands if file.suffix in suffixes and file.parts[0] != "jobs"}
    assert wanted <= names and not any("/jobs/" in name for name in names) and "m3bert/hub_cards/card.md" in names
    assert "m3bert/py.typed" in names


def test_metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        text = archive.read(name).decode()
    import m3bert

    assert f"\nVersion: {m3bert.__version__}\n" in text and "\nRequires-Python: >=3.11\n" in text
    core = [line for line in text.splitlines() if line.startswith("Requires-Dist:") and "extra ==" not in line]
    assert not [line for line in core if any(extra in line for extra in ("faiss", "scikit", "scipy", "matplotlib"))]


def test_a_strangers_first_commands(wheel, tmp_path, minilm):
    """
    From the wheel, in an empty virtual environment outside the checkout, with a file of ten lines and the encoder of
    the extra `quickstart`: convert, train, embed, evaluate and a dry run of push.
    """
    environment = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "M3BERT_DATA", "VIRTUAL_ENV")
    }
    environment |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    bin_folder = tmp_path / "venv" / "bin"

    def run(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
        return done.stdout + done.stderr

    constraints = ROOT / "constraints.txt"
    (torch,) = (line for line in constraints.read_text().splitlines() if line.startswith("torch=="))
    run(sys.executable, "-m", "venv", "venv")
    run(str(bin_folder / "pip"), "install", "--quiet", torch)
    run(str(bin_folder / "pip"), "install", "--quiet", "-c", str(constraints), f"{wheel}[quickstart]")
    m3bert = str(bin_folder / "m3bert")
    lines = [f"Line {number} says what function number {number} of the module returns." for number in range(10)]
    (tmp_path / "text.txt").write_text("".join(f"{line}\n" for line in lines))

    assert run(m3bert, "--version").strip() == wheel.name.split("-")[1]
    assert "mipic_bert" in run(m3bert, "recipes")
    run(m3bert, "convert", minilm, "elastic")
    training = ["--config", "unsupervised_simcse", "--max_steps", "2", "--per_device_train_batch_size", "4"]
    files = ["--model_name_or_path", "elastic", "--train_files", "text.txt", "--output_dir", "trained"]
    run(m3bert, "train", "simcse", *training, *files, "--use_cpu", "--bf16", "False", "--pooling", "mean")
    run(m3bert, "embed", "--model_name_or_path", "trained", "--files", "text.txt", "--output_dir", "vectors")
    assert list((tmp_path / "vectors").glob("layer_*.npy"))
    scored = ["--tasks", "stdlib", "--grid", "2,6x32,384", "--latency_documents", "1000"]
    run(m3bert, "evaluate", "--model_name_or_path", "trained", *scored, "--output_dir", "evaluation")
    chosen = run(m3bert, "choose", "evaluation/results.json", "--documents", "1000000")
    assert "Deploy 6x384" in chosen
    listing = run(m3bert, "push", "trained", "user/trained", "--results", "evaluation/results.json", "--dry_run")
    assert "Nothing was pushed" in listing and "README.md" in listing


@pytest.mark.parametrize("name", ["train", "evaluate", "embed"])
def test_uv_resolves_a_job_with_a_wheel_that_is_on_no_index(wheel, tmp_path, name):
    """As docs/scale.md says, until the package is on an index. Needs a connection to one for all other packages."""
    uv = shutil.which("uv", path=Path(sys.executable).parent) or shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    script = shutil.copy(ROOT / "scripts" / "jobs" / f"m3bert_{name}.py", tmp_path)
    environment = os.environ | {"UV_FIND_LINKS": str(wheel.parent), "UV_CACHE_DIR": str(tmp_path / "cache")}
    command = [uv, "export", "--script", str(script), "--no-hashes", "--python", sys.executable]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    if "Failed to fetch" in done.stderr:
        pytest.skip("no connection to a package index")
    assert done.returncode == 0, done.stderr
    named = {line.partition("==")[0].partition(" @ ")[0] for line in done.stdout.splitlines()}
    assert {"m3bert", "torch", "transformers"} <= named
