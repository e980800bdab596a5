"""The console command `m3bert`: what it prints, what it imports, and how it fails."""

import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from benchmarks.mistakes import MISTAKES, write_files
from m3bert.cli import COMMANDS, main
from tests.snippets import read


ROOT = Path(__file__).resolve().parents[2]
# Runs commands and prints the top-level packages that they imported, after a mark.
IMPORTS = """
import sys
from m3bert.cli import main
for line in sys.argv[1:]:
    try:
        main(line.split())
    except SystemExit as end:
        if end.code and end.code is not True:
            print(end.code)
print("LOADED", *{name.partition(".")[0] for name in sys.modules})
"""


def process(*arguments: object, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=folder, capture_output=True, text=True, timeout=300
    )


def run_and_list(*lines: str, folder: Path = ROOT) -> tuple[str, set[str]]:
    """What commands printed, and the packages that they imported."""
    done = process("-c", IMPORTS, *lines, folder=folder)
    assert done.returncode == 0, done.stderr
    printed, _, loaded = done.stdout.rpartition("LOADED")
    return printed, set(loaded.split())


def test_the_installed_script_is_this_function():
    (script,) = entry_points(group="console_scripts", name="m3bert")
    assert script.load() is main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help_under_its_name(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", sys.argv)  # which the command line changes
    arguments = [name, *(["contrastive"] if name == "train" else []), "--help"]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert not end.value.code
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: m3bert {name} ")
    examples, _, options = printed.partition("\noptions:\n")
    assert f"m3bert {name}" in examples.partition("\n\n")[2] and "-h, --help" in options
    assert "(default: None)" not in printed


def test_help_lists_every_command(capsys):
    for arguments in ([], ["--help"], ["-h"], ["help"]):
        main(arguments)
        printed = capsys.readouterr().out
        assert printed.startswith("usage: m3bert COMMAND")
        listed = [line.split()[0] for line in printed.splitlines() if line.startswith("  ")]
        assert listed == list(COMMANDS)


def test_the_documentation_explains_every_command():
    """The table of commands names a page for each, which shows how it is called."""
    table = read("docs/index.md").partition("| command |")[2].partition("\n\n")[0]
    pages = {}
    for row in table.splitlines():
        names, *_, page = row.strip("| ").split("|")
        pages |= dict.fromkeys(re.findall(r"`(\w+)`", names), re.findall(r"\(([\w-]+\.md)", page))
    assert pages.keys() == COMMANDS.keys()
    for name, linked in pages.items():
        assert any(re.search(rf"\bm3bert {name}\b", read(f"docs/{page}")) for page in linked or ["index.md"]), name


HEAVY = {"torch", "datasets", "accelerate", "pyarrow", "matplotlib", "faiss"}


def test_what_needs_no_model_imports_no_torch(tmp_path):
    helps = [f"{name} --help" for name in ("train", "choose", "convert", "push")]
    lines = ["--help", "--version", "recipes", "recipes mic_bert", *helps, "fly"]
    printed, loaded = run_and_list(*lines, "choose missing.json --documents 1000", folder=tmp_path)
    assert printed.count("usage: m3bert") == 4 and "\nMethods: " in printed
    assert "mic_bert" in printed and "unknown command 'fly'" in printed
    assert printed.endswith("error: missing.json: No such file or directory\n")
    assert not loaded & HEAVY


def test_an_error_is_one_line_and_no_traceback(tmp_path):
    done = process("-m", "m3bert", "recipes", "poetry")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: poetry is neither a recipe nor a file; recipes: baseline_espresso_bert, ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_before_a_model_is_imported(line, tmp_path):
    write_files(tmp_path)
    printed, loaded = run_and_list(line, folder=tmp_path)
    assert printed.startswith(f"error: {MISTAKES[line]}") and printed.count("\n") == 1
    assert not loaded & HEAVY
    assert sorted(file.name for file in tmp_path.glob("[!.]*")) == [
        "columns.jsonl", "cut.jsonl", "empty.txt", "pairs.jsonl", "trained",
    ]  # fmt: skip
