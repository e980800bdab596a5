"""A checkout, unusual installations, and the new method of CONTRIBUTING.md."""

import compileall
import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from datasets import Dataset

from m3bert.modeling import M3BertModel
from tests.conftest import save, tiny_config


TEXT = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.fixture
def method(tmp_path) -> Path:
    """The example as a file outside the package: its relative imports become absolute."""
    (code,) = re.findall(r"```python\n(# trainers/whitening\.py\n.*?)```", TEXT, re.DOTALL)
    file = tmp_path / "mine.py"
    file.write_text(
        re.sub(
            r"^from \.", "from m3bert.trainers.", re.sub(r"^from \.\.", "from m3bert.", code, flags=re.M), flags=re.M
        )
    )
    return file


def test_the_example_trains_evaluates_and_gets_a_true_card(method, tmp_path, tiny_tokenizer, sentences):
    from m3bert.commands.train import main
    from m3bert.evaluation import Retrieval, score_grid
    from m3bert.hub_cards.checkpoint import Checkpoint
    from m3bert.hub_cards.publication import Options, write_card

    save(tmp_path / "model", M3BertModel(tiny_config()), tiny_tokenizer)
    pairs = Dataset.from_dict({"anchor": sentences[:16], "positive": sentences[16:32]})
    pairs.to_json(str(tmp_path / "pairs.jsonl"))
    folder = tmp_path / "run"
    options = {
        "model_name_or_path": tmp_path / "model", "train_files": tmp_path / "pairs.jsonl", "output_dir": folder,
        "grid": "2,6x8,32", "max_steps": 2, "max_length": 40, "per_device_train_batch_size": 8,
        "covariance_weight": 0.5, "logging_steps": 1, "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    arguments = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
    main([f"{method}:WhiteningConfig", *arguments, "--use_cpu"])

    record = json.loads((folder / "training.json").read_text())
    assert record["objective"] == "Whitening" and record["settings"]["covariance_weight"] == 0.5
    encoder = Checkpoint(folder).encoder()
    texts = {"queries": sentences[:4], "documents": sentences[16:32]}
    scores = score_grid(encoder, Retrieval(texts, [{row: 1.0} for row in range(4)]))
    assert [str(g) for g in scores] == ["2x8", "2x32", "6x8", "6x32"]
    write_card(folder, "user/whitening", Options())
    card = (folder / "README.md").read_text()
    assert "Whitening" in card and "mean squared covariance between dims" in card


ROOT = Path(__file__).parent.parent
NAMES = "import m3bert; assert len(m3bert.__all__) > 50; m3bert.Grid; print(m3bert.__file__)"


def run(*arguments: str, folder: Path = ROOT, isolated: bool = True) -> subprocess.CompletedProcess[str]:
    """Python in a folder, without what this process has on its path."""
    return subprocess.run(
        [sys.executable, *(["-I"] if isolated else []), *arguments], cwd=folder, capture_output=True, text=True
    )


@pytest.mark.parametrize("folder", ["trainers", "hub_cards", "modeling_m3bert", "scripts"])
def test_a_second_copy_of_a_package_is_refused(folder):
    done = run("-c", f"import {folder}", isolated=False)
    assert done.returncode == 1 and f"the folder {folder} is a part of the package m3bert" in done.stderr


@pytest.mark.parametrize("kind", ["zip", "bytecode"])
def test_the_package_runs_from_a_zip_and_without_its_source(kind, tmp_path):
    package = tmp_path / "lib" / "m3bert"
    shutil.copytree(ROOT / "m3bert", package, ignore=shutil.ignore_patterns("__pycache__"))
    at = package.parent
    if kind == "bytecode":
        assert compileall.compile_dir(package, quiet=1, legacy=True)
        for file in package.rglob("*.py"):
            file.unlink()
    else:
        at = tmp_path / "m3bert.zip"
        with zipfile.ZipFile(at, "w") as archive:
            for file in package.rglob("*.py"):
                archive.write(file, file.relative_to(package.parent))
    done = run("-c", f"import sys; sys.path.insert(0, {str(at)!r}); {NAMES}", folder=tmp_path)
    assert done.returncode == 0 and str(at) in done.stdout, done.stderr
