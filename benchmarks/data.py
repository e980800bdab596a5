"""
Fill the folder of data sets, M3BERT_DATA (by default ../shared/data), from public sources:

    python -m benchmarks.data                  # what the studies read
    python -m benchmarks.data stsb sts12       # these folders
    python -m benchmarks.data --record         # record the files that are there in benchmarks/data.json

`SOURCES` has the sources that are not tasks on the Hub, and docs/studies.md the table of all. Files that are there are
kept. Each file is compared with benchmarks/data.json, which has the number of rows and a digest of the files that our
results are measured on: rows in another order are the same, and columns that no task reads do not count. A difference
is printed, and so is what could not be read; studies run without it. A study that was run with other data has other
results. Cranfield and NPL need `pip install ir_datasets`. Where a set is a part of its source, benchmarks/rows.json
has the numbers of the rows that are left out, and benchmarks/sick.json the splits of SICK.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from datasets import DownloadConfig, DownloadManager

from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder
from m3bert.data.files import load_files
from m3bert.data.hub_data import load_hub
from m3bert.evaluation import Task, find_task
from m3bert.evaluation.readers import download, read_rows
from m3bert.utils.durable import replace_text, replacing


RECORD = Path(__file__).with_name("data.json")
LEFT_OUT = Path(__file__).with_name("rows.json")  # file -> numbers of the rows of its source that are left out
SICK = Path(__file__).with_name("sick.json")  # split -> the keys of its rows; all others are for training
GITHUB = os.environ.get("M3BERT_GITHUB", "https://raw.githubusercontent.com")
TEXTS = ("id", "_id", "title", "text", "sentence1", "sentence2", "query-id", "corpus-id")
NUMBERS = ("label", "score")
NLI = ("entailment", "neutral", "contradiction")
# Folder -> split here -> split on the Hub. MRPC's training set is in two splits there.
SPLITS: dict[str, dict[str, str]] = {"mrpc": {"train": "train+validation"}}
# Folder -> collection of ir_datasets, and its grade -> ours. Cranfield's best grade is 1; -1 is the paper that a query
# comes from.
COLLECTIONS = {"cranfield": ("cranfield", {-1: 4, 1: 4, 2: 3, 3: 2, 4: 1}), "npl": ("vaswani", {1: 1})}
CISI = "lailaglez/belief-network-irs/9094e4cde738bd93ed1747dc958b5acb0e0fa684/cisi/cisi.tar.gz"
MSMARCO = "agentset-ai/embedding-leaderboard/7a1376ca20a006b470e3bbb4a08b17affd380d90/datasets/msmarco"
MULTI30K = "multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task2/raw"
SNLI_SAMPLE = "academic-repository/cat/9c98ebb0d26edad9a3c8e8a7314a867e1b451d81/data/snli"
SNLI_PAIRS = "acmi-lab/counterfactually-augmented-data/6f232a1d2a11462a30ce08fb4825b734ab30828e/NLI"
UNIVERSAL = "UniversalDependencies"
WEB = (
    "UD_English-EWT/15d613d8447b3478787d4c278730a1e48a945efb/en_ewt",
    "UD_English-GUM/afb41ee9bca57991125814fa04d96a0e61470c8b/en_gum",
)
WIC = "Wenxin-Jiang/CS577-NLP/17fb8ca981698024599b423ad140f1ac36608529/HW2/WiC_dataset"
TALKS = "sentence-transformers/parallel-sentences-talks"
# Language of a file -> its code there.
LANGUAGES = dict(pair.split(":") for pair in (
    "ara:ar ces:cs deu:de ell:el est:et fas:fa fin:fi fra:fr heb:he hin:hi hun:hu ind:id ita:it jpn:ja kat:ka kor:ko "
    "lit:lt nld:nl pol:pl por:pt rus:ru spa:es tha:th tur:tr ukr:uk urd:ur vie:vi zho:zh-cn"
).split())  # fmt: skip
# Kind of text -> data set on the Hub, configuration, split and column. Ours were other texts of these kinds.
ENGLISH = {
    "news": ("sentence-transformers/parallel-sentences-news-commentary", "en-de", "train[:150000]", "english"),
    "books": ("Helsinki-NLP/opus_books", "en-fr", "train[:6000]", "translation"),
    "brown": ("sentence-transformers/simple-wiki", None, "train[:60000]", "text"),
}
Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Source:
    """
    Where the files of a folder come from, and how rows are chosen.

    Args:
        name (`str`): Its public source.
        rule (`str`): Which rows are taken.
        rows (`Callable`): Part of the folder -> its rows.
    """

    name: str
    rule: str
    rows: Callable[[str], Rows]


def github(path: str, member: str = "") -> str:
    """A text file, or a member of an archive, of a repository on GitHub, at a commit: OWNER/NAME/COMMIT/FILE."""
    manager = DownloadManager(download_config=DownloadConfig(disable_tqdm=True))
    return Path(manager.download_and_extract(f"{GITHUB}/{path}"), member).read_text(encoding="utf-8")


def github_rows(path: str) -> list[list[str]]:
    """The lines of a text file on GitHub, split at tabs."""
    return [line.split("\t") for line in github(path).split("\n") if line]


def without_left_out(name: str, rows: Rows) -> Rows:
    """The rows whose numbers are not in `LEFT_OUT`."""
    left_out = {*json.loads(LEFT_OUT.read_text(encoding="utf-8"))[name]}
    return [row for number, row in enumerate(rows) if number not in left_out]


def cisi_rows(part: str) -> Rows:
    """A part of CISI, which marks records by `.I`, titles by `.T` and texts by `.W`."""
    text = github(CISI, {"corpus": "CISI.ALL", "queries": "CISI.QRY", "qrels": "CISI.REL"}[part])
    if part == "qrels":
        judged = (line.split()[:2] for line in text.split("\n") if line.strip())
        return [{"query-id": query, "corpus-id": document, "score": 1} for query, document in judged]
    rows = []
    _, *records = re.split(r"^\.I ", text, flags=re.MULTILINE)
    for record in records:
        number, *fields = re.split(r"^\.([A-Z])\s*$", record, flags=re.MULTILINE)
        texts = {letter: one_line(text) for letter, text in zip(fields[::2], fields[1::2], strict=True)}
        title, text = texts.get("T", ""), texts["W"]
        named = {"title": title, "text": text} if part == "corpus" else {"text": f"{title} {text}".strip()}
        rows.append({"id": number.strip(), **named})
    return rows


def msmarco_rows(part: str) -> Rows:
    """A part of the small collection of MS MARCO."""
    if part == "qrels":
        judged = github_rows(f"{MSMARCO}/qrels/test.tsv")
        return [{"query-id": query, "corpus-id": document, "score": grade} for query, document, grade in judged]
    rows = map(json.loads, filter(None, github(f"{MSMARCO}/{part}.jsonl").split("\n")))
    title = {"title": ""} if part == "corpus" else {}
    return [{"id": row["_id"], **title, "text": row["text"]} for row in rows]


def caption_rows(part: str) -> Rows:
    """The five English captions of each image of Multi30k."""
    files = [f"{MULTI30K}/{ {'train': 'train', 'dev': 'val'}[part] }.{number}.en.gz" for number in range(1, 6)]
    captions = zip(*(github(file).split("\n")[:-1] for file in files), strict=True)
    return without_left_out(f"multi30k-captions/{part}", [{"captions": [*map(one_line, five)]} for five in captions])


def snli_rows(part: str) -> Rows:
    """The splits of the Hub, but for training 20,000 of its rows, and the counterfactual pairs."""
    if part != "train":
        return task_rows(find_task("snli"), part)
    rows = [[one_line(one), one_line(two), NLI[int(label) % 3]] for split in ("train", "test")
            for label, _, one, two in github_rows(f"{SNLI_SAMPLE}/{split}.csv")]  # fmt: skip
    for kind in ("original", "revised_combined"):
        for split in ("train", "dev", "test"):
            rows += github_rows(f"{SNLI_PAIRS}/{kind}/{split}.tsv")[1:]
    return without_left_out(
        "snli/train",
        [
            {"sentence1": one.strip(), "sentence2": two.strip(), "label": NLI.index(label), "label_text": label}
            for one, two, label in rows
        ],
    )


def wic_rows(part: str) -> Rows:
    """A split of WiC."""
    files = (github_rows(f"{WIC}/{part}/{part}.{kind}.txt") for kind in ("data", "gold"))
    return [
        {"sentence1": one.strip(), "sentence2": two.strip(), "label": int(label == "T"), "word": word, "pos": pos}
        for (word, pos, _, one, two), (label,) in zip(*files, strict=True)
    ]


def hub_lines(path: str, config: str | None, split: str, column: str) -> Rows:
    """The distinct lines of a column of a data set on the Hub, in its order; of translations, the English ones."""
    values = load_hub(path, config, split=split)[column]
    lines = (value["en"] if isinstance(value, dict) else value for value in values)
    return [{"text": line} for line in dict.fromkeys(one_line(line) for line in lines) if line]


def english_rows(part: str) -> Rows:
    """English texts of one kind."""
    if part != "web":
        return hub_lines(*ENGLISH[part])
    files = (github(f"{UNIVERSAL}/{name}-ud-{split}.conllu") for name in WEB for split in ("dev", "test", "train"))
    marked = (line.removeprefix("# text = ").strip() for file in files for line in file.splitlines()
              if line.startswith("# text = "))  # fmt: skip
    return [{"text": line} for line in dict.fromkeys(marked)]


def foreign_rows(part: str) -> Rows:
    """Texts of a language, by its code of three letters."""
    if part not in LANGUAGES:
        raise ValueError(f"{TALKS} does not have this language")
    return hub_lines(TALKS, f"en-{LANGUAGES[part]}", "train[:12000]", "non_english")


def collection_rows(folder: str, part: str) -> Rows:
    """The documents, queries or judgements of a collection of ir_datasets. Empty documents and their judgements are
    left out, the title is not repeated in the text, and queries are in lower case."""
    try:
        import ir_datasets
    except ImportError as error:
        raise ValueError("its source is a collection of ir_datasets: pip install ir_datasets") from error
    name, grades = COLLECTIONS[folder]
    collection, documents = ir_datasets.load(name), {}
    for doc in collection.docs_iter():
        title, text = one_line(getattr(doc, "title", "")), one_line(doc.text)
        if title or text:
            documents[doc.doc_id] = {"id": doc.doc_id, "title": title, "text": text.removeprefix(title).strip()}
    if part == "corpus":
        return [*documents.values()]
    if part == "queries":
        return [{"id": query.query_id, "text": one_line(query.text).lower()} for query in collection.queries_iter()]
    return [
        {"query-id": judged.query_id, "corpus-id": judged.doc_id, "score": grades[judged.relevance]}
        for judged in collection.qrels_iter()
        if judged.doc_id in documents
    ]


def sick_rows(part: str) -> Rows:
    """The rows of a split of SICK among all of its rows. Rows with the same texts and score are the same row."""
    keys = {split: Counter(text[place : place + 8] for place in range(0, len(text), 8))
            for split, text in json.loads(SICK.read_text(encoding="utf-8")).items()}  # fmt: skip
    splits: dict[str, Rows] = {split: [] for split in ("train", *keys)}
    for row in load_hub("mteb/sickr-sts", split="test"):
        values = [row["sentence1"], row["sentence2"], float(row["score"])]
        key = sha256(json.dumps(values).encode()).hexdigest()[:8]
        split = next((split for split, left in keys.items() if left[key]), "train")
        if split != "train":
            keys[split][key] -= 1
        splits[split].append(dict(zip(("sentence1", "sentence2", "score"), values, strict=True)))
    return splits[part]


def task_rows(task: Task, part: str) -> Rows:
    """The rows of a split of a task on the Hub."""
    assert task.hub is not None
    splits = {"dev": "validation", **SPLITS.get(task.folder or task.name, {}), **task.hub.splits}
    # The local files of a task with labels of its own have those of the data set.
    hub = replace(task.hub, splits=splits, labels={} if task.labels else task.hub.labels)
    rows = download(task, part, hub)
    if task.labels:
        return [{**row, "label_text": NLI[row["label"]]} for row in rows if row["label"] in range(len(NLI))]
    return rows


def wikitext_rows(part: str) -> Rows:
    """The lines of WikiText-2 that have text."""
    lines = load_hub("Salesforce/wikitext", "wikitext-2-v1", split={"dev": "validation"}.get(part, part))["text"]
    return [{"text": line.strip()} for line in lines if line.strip()]


def source_of(name: str) -> Source:
    """The public source of a folder, or of a file: that of `SOURCES`, or the data of its task on the Hub."""
    folder = name.partition("/")[0]
    if folder in SOURCES:
        return SOURCES[folder]
    task = task_of(name)
    if task is None or task.hub is None:
        raise ValueError(f"{name} has no public source: name one in SOURCES.")
    return Source(f"Hub: {task.hub.path}", "all rows", partial(task_rows, task))


def public_rows(name: str) -> Rows:
    """The rows of a file from its public source."""
    return source_of(name).rows(name.partition("/")[2])


SOURCES = {
    "cisi": Source(f"GitHub: {CISI}", "all rows", cisi_rows),
    "cranfield": Source("ir_datasets: cranfield", "documents with a text", partial(collection_rows, "cranfield")),
    "msmarco-mini": Source(f"GitHub: {MSMARCO}", "all rows", msmarco_rows),
    "multi30k-captions": Source(f"GitHub: {MULTI30K}", f"all rows but those of {LEFT_OUT.name}", caption_rows),
    "npl": Source("ir_datasets: vaswani", "all rows", partial(collection_rows, "npl")),
    "sick": Source("Hub: mteb/sickr-sts", f"splits of {SICK.name}", sick_rows),
    "snli": Source(
        f"Hub: stanfordnlp/snli; for training, GitHub: {SNLI_SAMPLE}, {SNLI_PAIRS}",
        f"all rows but those of {LEFT_OUT.name}",
        snli_rows,
    ),
    "text-english": Source(
        f"GitHub: {UNIVERSAL}/{f', {UNIVERSAL}/'.join(WEB)}; Hub: {', '.join(name for name, *_ in ENGLISH.values())}",
        "distinct lines; other texts than ours",
        english_rows,
    ),
    "text-multilingual": Source(
        f"Hub: {TALKS}", "distinct lines of the first 12,000 rows; other texts than ours", foreign_rows
    ),
    "wic": Source(f"GitHub: {WIC}", "all rows", wic_rows),
    "wikitext-2": Source("Hub: Salesforce/wikitext", "lines with text", wikitext_rows),
}


def file_of(data: Path, name: str) -> Path:
    """The file of a name such as `stsb/test`: lines of text, judgements, or rows of JSON."""
    folder, _, part = name.partition("/")
    kinds = {"txt": folder == "wikitext-2" or folder.startswith("text-"), "tsv": part == "qrels"}
    return data / folder / f"{part}.{next((kind for kind, fits in kinds.items() if fits), 'jsonl')}.gz"


def names_in(data: Path) -> list[str]:
    """The names of all files of a folder."""
    files = (file for kind in ("jsonl", "tsv", "txt") for file in data.glob(f"*/*.{kind}.gz"))
    return sorted(f"{file.parent.name}/{file.name.split('.')[0]}" for file in files)


def read(file: Path) -> Rows:
    """The rows of a file; a line of text is a row."""
    return load_files([str(file)]).to_list() if ".txt" in file.suffixes else read_rows(file)


def task_of(name: str) -> Task | None:
    """The task that reads a file, or one of those that read a folder; `None` if there is none, as for text."""
    folder, _, part = name.partition("/")
    language = part.partition("-")[0] or {"tatoeba": "deu", "xnli": "de"}.get(folder)
    try:
        return find_task(f"{folder}-{language}" if folder in ("tatoeba", "xnli") else folder)
    except ValueError:
        return None


def one_line(text: str) -> str:
    """A text without line breaks and repeated spaces."""
    return " ".join(text.split())


def write(file: Path, rows: Rows) -> None:
    """Write the rows of a file."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as draft, gzip.open(draft, "wt", encoding="utf-8", newline="") as lines:
        if ".tsv" in file.suffixes:
            columns = ("query-id", "corpus-id", "score")
            table = csv.DictWriter(
                lines, columns, restval=1, extrasaction="ignore", delimiter="\t", lineterminator="\n"
            )
            table.writeheader()
            table.writerows(rows)
        else:
            plain = (row["text"] if ".txt" in file.suffixes else json.dumps(row, ensure_ascii=False) for row in rows)
            lines.writelines(f"{line}\n" for line in plain)


def summary(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """The number of rows, and a digest of what tasks read of them, in any order."""
    lines = []
    for row in rows:
        texts = {name.lstrip("_"): str(row[name] or "") for name in TEXTS if name in row}
        numbers = {name: float(row[name]) for name in NUMBERS if row.get(name) not in (None, "")}
        lines.append(json.dumps([texts, numbers, row.get("captions")], sort_keys=True))
    return [len(lines), sha256("\n".join(sorted(lines)).encode()).hexdigest()[:16]]


def compared(measured: list[Any], recorded: list[Any] | None) -> str:
    """What a file has, and how it differs from the one that was recorded."""
    if recorded is None:
        return f"{measured[0]:,} rows; none recorded"
    if measured == recorded:
        return f"{measured[0]:,} rows, as recorded"
    return f"{measured[0]:,} rows DIFFER from the {recorded[0]:,} that our results are measured on"


def fill(data: Path, names: Iterable[str], recorded: Mapping[str, list[Any]]) -> list[str]:
    """Write the files that are missing, print a line for each name, and return the names that could not be read."""
    failed = []
    for name in names:
        file, known = file_of(data, name), recorded.get(name)
        try:
            if not file.is_file():
                write(file, public_rows(name))
            print(f"{name}: {compared(summary(read(file)), known)}", flush=True)
        except (OSError, ValueError, KeyError) as error:  # the next data set may be there
            print(f"{name}: MISSING, studies run without it: {str(error).splitlines()[0]}", flush=True)
            failed.append(name)
    return failed


def main(arguments: list[str]) -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("folders", nargs="*", help="folders to fill, such as stsb; default: all that are recorded")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name} from the files that are there")
    options, data = parser.parse_args(arguments), data_folder()
    if options.record:
        entries = [f"{json.dumps(name)}: {json.dumps(summary(read(file_of(data, name))))}" for name in names_in(data)]
        replace_text(RECORD, "{\n" + ",\n".join(entries) + "\n}\n")
        print(f"{RECORD}: {len(entries)} files")
        return
    recorded = json.loads(RECORD.read_text(encoding="utf-8"))
    folders = {name.partition("/")[0] for name in recorded}
    if unknown := [folder for folder in options.folders if folder not in folders]:
        raise ValueError(f"There is no {', '.join(unknown)}; legal values: {', '.join(sorted(folders))}.")
    names = [name for name in recorded if not options.folders or name.partition("/")[0] in options.folders]
    if failed := fill(data, names, recorded):
        print(f"{len(failed)} of {len(names)} files are missing; call again to continue: {', '.join(failed)}")


if __name__ == "__main__":
    run_command(main)
