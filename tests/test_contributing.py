"""The new method of CONTRIBUTING.md, from its text to a trained, evaluated encoder with a card."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from datasets import Dataset

from m3bert.modeling import M3BertModel
from tests.conftest import tiny_config


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

    M3BertModel(tiny_config()).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    pairs = Dataset.from_dict({"anchor": sentences[:16], "positive": sentences[16:32]})
    pairs.to_json(str(tmp_path / "pairs.jsonl"))
    folder = tmp_path / "run"
    options = {
        "model_name_or_path": tmp_path / "model",
        "train_files": tmp_path / "pairs.jsonl",
        "output_dir": folder,
        "grid": "2,6x8,32",
        "max_steps": 2,
        "max_length": 40,
        "per_device_train_batch_size": 8,
        "covariance_weight": 0.5,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
    }
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
