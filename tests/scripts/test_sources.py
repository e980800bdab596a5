"""Where commands find local data."""

from __future__ import annotations

from m3bert.commands import sources


def test_local_data_is_where_the_environment_says(monkeypatch, tmp_path):
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path))
    assert sources.local_data() == sources.data_folder() == tmp_path
    monkeypatch.setenv("M3BERT_DATA", str(tmp_path / "nowhere"))
    assert sources.local_data() == tmp_path / "nowhere"
    monkeypatch.delenv("M3BERT_DATA")
    assert sources.local_data() is None
