"""Files are replaced whole or not at all."""

from __future__ import annotations

import pytest

from trainers.core.durable import replacing


def test_a_file_is_replaced_at_once(tmp_path):
    file = tmp_path / "a.json"
    for text in ("one", "two"):
        with replacing(file) as draft:
            draft.write_text(text)
            assert not file.exists() or file.read_text() == "one"
        assert file.read_text() == text
    assert [*tmp_path.iterdir()] == [file]


def test_a_failure_leaves_the_file_as_it_was(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("one")
    with pytest.raises(KeyboardInterrupt), replacing(file, mark="mine") as draft:
        assert draft.name == "a.json.mine"
        draft.write_text("tw")
        raise KeyboardInterrupt
    assert file.read_text() == "one" and [*tmp_path.iterdir()] == [file]
