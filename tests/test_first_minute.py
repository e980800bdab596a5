"""The first line that a reader types in a terminal: it asks nothing and warns of nothing."""

from __future__ import annotations

import re

import pytest
from datasets import Dataset

from hub_cards.checkpoint import Checkpoint
from hub_cards.native_export import export_native
from hub_cards.onnx_graphs import write_encoder_files
from hub_cards.publication import Options, rebuild
from scripts.convert import convert
from tests.conftest import quiet
from tests.snippets import pages, read, snippets
from trainers import ContrastiveConfig, ContrastiveTrainer, Granularity, QAMAConfig, QAMATrainer
from trainers.evaluation import GridEncoder


# Loads tokenizers, each in a terminal of its own, and prints what the terminal showed.
IN_A_TERMINAL = """
import os, pty, traceback
from transformers import AutoTokenizer

for folder, options in {folders}.items():
    process, terminal = pty.fork()
    if process == 0:
        try:
            print(AutoTokenizer.from_pretrained(folder, **options)("open the file").input_ids, flush=True)
        except BaseException:
            traceback.print_exc()
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
    print(folder, shown.decode().split("\\r\\n"), sep="|", flush=True)
"""
REMOTE = {"trust_remote_code": True}
# What was made -> how it is loaded, as on its page and its card.
MADE = {"converted": REMOTE, "trained": REMOTE, "cut": REMOTE, "quantised": REMOTE, "native": {}, "onnx": REMOTE}


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
    rebuild(checkpoint, tmp_path / "cut", Options(granularity=Granularity(1, 8)), checkpoint.files())
    options = quiet(tmp_path / "quantised", max_steps=1, grid="2x20", teacher_cache_dir=str(tmp_path / "teachers"))
    texts = Dataset.from_dict({"text": sentences})
    quantizer = QAMATrainer(str(tmp_path / "converted"), QAMAConfig(**options), train_dataset=texts)
    quantizer.train()
    quantizer.save_model()
    export_native(checkpoint, tmp_path / "native", Granularity(2, 20))
    write_encoder_files(GridEncoder.from_pretrained(tmp_path / "trained"), tmp_path / "onnx")
    return tmp_path


def test_a_tokenizer_asks_nothing_and_warns_of_nothing_in_a_terminal(made, run_bare, tiny_tokenizer):
    printed = run_bare(IN_A_TERMINAL.format(folders=MADE))
    expected = [str(tiny_tokenizer("open the file").input_ids), ""]
    assert printed.splitlines() == [f"{folder}|{expected}" for folder in MADE]


@pytest.mark.parametrize("page", pages())
def test_a_page_loads_a_checkpoint_with_its_code(page):
    """Where no line imports this package, which knows the architecture, every line that loads one trusts its code."""
    for snippet in snippets(read(page)):
        if snippet.language == "python" and "from m3bert import" not in snippet.code:
            loads = re.findall(r'^.*\bAuto\w+\.from_pretrained\(".*$', snippet.code, re.MULTILINE)
            assert all("trust_remote_code=True" in line for line in loads), loads
