"""
Every command and every piece of code of the README runs, as text: on small models and data under the same names, and
with two steps of each training.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from huggingface_hub import HfApi, constants

from tests.evaluation_data import write_seeds
from tests.hub_server import HubServer
from tests.snippets import readme, snippets


ROOT = Path(__file__).parent.parent
OWNERS = {"hf_user": "user", "hf_intfloat": "intfloat", "hf_baai": "BAAI"}
# Runs the commands and the code in one process, in the order of the README and in one namespace.
RUN = """
import json, re, runpy, shlex, socket, subprocess, sys, time, urllib.request
from pathlib import Path
import datasets, torch, transformers
from trainers import NestedTrainingArguments

check = NestedTrainingArguments.__post_init__

def of_two_steps(self):
    self.max_steps = 2
    check(self)

NestedTrainingArguments.__post_init__ = of_two_steps

words = open("text.txt").read().split()
texts = sentences = sorted(set(open("text.txt").read().splitlines()))
dataset = datasets.Dataset.from_dict({"text": texts})
pairs = datasets.Dataset.from_json("pairs.jsonl")
namespace = {"texts": texts, "pairs": pairs, "dataset": dataset, "sentences": dataset}

def command(line):
    if line.startswith("make "):
        return
    python, module, name, *arguments = shlex.split(line, comments=True)
    assert (python, module) == ("python", "-m"), line
    if name == "scripts.demo" and "--space" not in arguments:
        return serve(arguments)
    if name == "scripts.choose":
        within_the_budget(arguments[0])
    sys.argv = [name, *arguments]
    try:
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if end.code:
            raise AssertionError(f"{line}: {end.code}") from end
    if "multigranular-mlm" in arguments:
        pretrain("runs/mlm")
    if name == "scripts.mine_negatives" and not open("runs/negatives.jsonl").read():
        # A teacher of random weights, to which all texts are alike, finds no negative.
        others = [row["positive"] for row in pairs][::-1]
        rows = [dict(row, negative=other) for row, other in zip(pairs, others)]
        open("runs/negatives.jsonl", "w").writelines(json.dumps(row) + "\\n" for row in rows)

def within_the_budget(file):
    # However busy this machine is: what a budget leaves is not the README's matter.
    results = json.load(open(file))
    for times in (results["latency"]["encode_ms"], results["latency"]["search_ms"]):
        times.update(dict.fromkeys(times, 1.0))
    json.dump(results, open(file, "w"))

def pretrain(folder):
    # What a long run would learn first: which words are frequent.
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    counts = torch.ones(model.config.vocab_size)
    for word in words:
        counts[tokenizer.convert_tokens_to_ids(word)] += 1
    model.lm_head.weight.data.mul_(0.01)
    model.lm_head.bias.data.copy_((counts / counts.sum()).log())
    model.save_pretrained(folder)

def serve(arguments):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    page = subprocess.Popen([sys.executable, "-m", "scripts.demo", *arguments, "--port", port])
    try:
        for _ in range(120):
            time.sleep(0.5)
            assert page.poll() is None, "the page did not start"
            try:
                return urllib.request.urlopen(f"http://127.0.0.1:{port}").read()
            except OSError:
                pass
        raise AssertionError("the page did not answer")
    finally:
        page.kill()

for language, code, heading in json.load(open("snippets.json")):
    print("##", heading, flush=True)
    if language == "bash":
        for line in re.sub(r"\\\\\\n\\s*", " ", code).splitlines():
            command(line.strip())
        if "scripts.convert" in code:  # what the code below it calls "any encoder in place of an m3BERT"
            namespace["model"] = transformers.AutoModel.from_pretrained("runs/m3bert-from-me5")
            namespace["tokenizer"] = transformers.AutoTokenizer.from_pretrained("runs/m3bert-from-me5")
        continue
    if "mteb.get_tasks" in code:
        import mteb
        from tests.trainers.evaluation.test_mteb_models import similarity_task
        from trainers.evaluation import find_task
        local = find_task("stsb").load(Path("../shared/data"))
        mteb.get_tasks = lambda tasks: [similarity_task(local)]  # the task of the README has its data on the Hub
    exec(compile(code, heading, "exec"), namespace)
print("the end")
"""


@pytest.fixture
def hub(tmp_path):
    with HubServer(tmp_path / "hub", tokens=OWNERS) as hub:
        yield hub


def test_commands_and_code_run_as_they_stand(tmp_path, hub, minilm, tiny_tokenizer, sentences, monkeypatch):
    for extra in ("gradio", "onnxruntime", "onnxscript", "langchain_core", "mteb"):
        pytest.importorskip(extra, reason=f"{extra} is not installed")
    folder = tmp_path / "m3bert"
    folder.mkdir()
    write_seeds(tmp_path / "shared" / "data", sentences)
    write_texts(folder, sentences)
    stand_in(hub, tiny_tokenizer, tmp_path / "models", monkeypatch)
    convert = f"from scripts.convert import convert; convert({minilm!r}, 'runs/quickstart/model')"
    (folder / "snippets.json").write_text(json.dumps(snippets(readme())))
    environment = {
        **os.environ,
        **hub.environment(tmp_path / "cache", "hf_user"),
        "PYTHONPATH": str(ROOT),
        "M3BERT_DATA": "../shared/data",
        "MTEB_CACHE": str(tmp_path / "mteb"),
    }
    for code in (convert, RUN):
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True, timeout=1200
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert done.stdout.rstrip().endswith("the end")
    assert hub.commits("user/model-small") and hub.commits("user/pairs") and not (folder / "mlruns").exists()


def test_targets_of_make_are_there():
    code = "".join(snippet.code for snippet in snippets(readme()) if snippet.language == "bash")
    targets = re.findall(r"^make (\w+)", code, re.MULTILINE)
    assert {"quickstart", "test"} <= set(targets)
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    for target in targets:
        subprocess.run(["make", "--dry-run", target], cwd=ROOT, check=True, capture_output=True)


def write_texts(folder: Path, sentences: list[str]) -> None:
    """The files that the README's commands read: more rows than the largest batch."""
    sentences = [f"{first} {second}" for first in sentences[:13] for second in sentences[20:40]]
    rows = [{"anchor": text, "positive": other} for text, other in zip(sentences, sentences[1:], strict=False)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "text.txt").write_text("".join(f"{text}\n" for text in sentences))
    documents = [{"title": text.split()[0], "text": text} for text in sentences]
    (folder / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in documents))


def stand_in(hub: HubServer, tokenizer, folder: Path, monkeypatch) -> None:
    """Models of the names and the widths and depths that the README speaks of, and of hardly any weights."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    small = {"vocab_size": 99, "intermediate_size": 16, "num_hidden_layers": 12, "num_attention_heads": 12}
    models = {
        ("hf_intfloat", "intfloat/multilingual-e5-base"): transformers.XLMRobertaModel(
            transformers.XLMRobertaConfig(hidden_size=768, max_position_embeddings=50, pad_token_id=1, **small)
        ),
        ("hf_baai", "BAAI/bge-small-en-v1.5"): transformers.BertModel(
            transformers.BertConfig(hidden_size=384, max_position_embeddings=48, pad_token_id=1, **small)
        ),
    }
    for (token, name), model in models.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
        api = HfApi(endpoint=hub.url, token=token)
        api.create_repo(name, private=False)
        api.upload_folder(repo_id=name, folder_path=folder / name)
