"""Files are replaced whole or not at all, and a folder has one writer."""

import os
import signal
from pathlib import Path

import pytest

from m3bert.utils.durable import only_writer, replace_text, replacing, replacing_files
from tests import warm_processes


ROOT = Path(__file__).parents[2]


def run(code: str, *arguments: object) -> tuple[int, str]:
    """Exit code and output of a process."""
    options = {"path": [str(ROOT)], "arguments": [str(argument) for argument in arguments]}
    (done,) = warm_processes.server().run(code, ROOT, [dict(os.environ)], **options)
    return done.returncode, done.stdout + done.stderr


def content(folder: Path) -> dict[str, str]:
    return {str(file.relative_to(folder)): file.read_text() for file in folder.rglob("*") if file.is_file()}


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
    replace_text(file, "one")
    with pytest.raises(KeyboardInterrupt), replacing(file) as draft:
        draft.write_text("tw")
        raise KeyboardInterrupt
    assert file.read_text() == "one" and [*tmp_path.iterdir()] == [file]


def test_files_are_replaced_together_and_others_stay(tmp_path):
    old = {"config.json": "old", "model.safetensors": "old", "tokenizer.json": "old", "README.md": "mine"}
    for name, text in old.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".draft").mkdir()  # of a killed process
    (tmp_path / ".draft" / "half").touch()
    with replacing_files(tmp_path, stale=["tokenizer*.json"]) as draft:
        (draft / "1_Pooling").mkdir()
        for name in ("config.json", "model.safetensors", "1_Pooling/config.json"):
            (draft / name).write_text("new")
        assert {name: (tmp_path / name).read_text() for name in old} == old
    new = {"config.json": "new", "model.safetensors": "new", "1_Pooling/config.json": "new", "README.md": "mine"}
    assert content(tmp_path) == new


def test_files_that_cannot_be_written_leave_the_folder_as_it_was(tmp_path):
    (tmp_path / "config.json").write_text("old")
    for folder in (tmp_path, tmp_path / "new"):
        with pytest.raises(OSError, match=f"{folder} cannot be written; .*No space"), replacing_files(folder) as draft:
            (draft / "config.json").write_text("new")
            raise OSError(28, "No space left on device")
    assert content(tmp_path) == {"config.json": "old"} and [*tmp_path.iterdir()] == [tmp_path / "config.json"]


KILLED = """
import os, signal, sys
from pathlib import Path
from m3bert.utils.durable import replacing_files
folder, replace, calls = Path(sys.argv[1]), os.replace, []

def killed(source, target):
    calls.append(target)
    if len(calls) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)

os.replace = killed
with replacing_files(folder) as draft:
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        (draft / name).write_text("new")
"""


@pytest.mark.parametrize("call", [1, 3])
def test_a_folder_that_is_half_replaced_has_no_config(tmp_path, call):
    (tmp_path / "config.json").write_text("old")
    assert run(KILLED, tmp_path, call)[0] == -signal.SIGKILL
    assert not (tmp_path / "config.json").exists()
    assert run(KILLED, tmp_path, 0)[0] == 0
    assert content(tmp_path) == dict.fromkeys(("model.safetensors", "config.json", "tokenizer.json"), "new")


HOLDS = """
import os, signal, sys
from pathlib import Path
from m3bert.utils.durable import only_writer
try:
    with only_writer(Path(sys.argv[1])):
        print("mine", Path(sys.argv[1]).with_name(".out.lock").is_file())
        if len(sys.argv) > 2:
            os.kill(os.getpid(), signal.SIGKILL)
except ValueError as error:
    print(error)
"""


def test_a_folder_has_one_writer_until_its_process_ends(tmp_path):
    folder = tmp_path / "out"
    with only_writer(folder):
        assert f"Another process writes to {folder}: wait until it ends" in run(HOLDS, folder)[1]
    assert run(HOLDS, folder, "killed")[0] == -signal.SIGKILL
    assert run(HOLDS, folder) == (0, "mine True\n")
    assert not [*tmp_path.iterdir()]
