"""
Fill the folder of data sets, M3BERT_DATA (by default ../shared/data), from the Hub and from ir_datasets:

    python -m benchmarks.data                  # what the studies read
    python -m benchmarks.data stsb sts12       # these folders
    python -m benchmarks.data --record         # record the files that are there in benchmarks/data.json

Files that are there are kept. Each file is compared with benchmarks/data.json, which has the number of rows and a
digest of the files that our results are measured on: rows in another order are the same, and columns that no task
reads do not count. A difference is printed, and so is what has no public source in this form; studies run without it.
A study that was run with other data has other results. Cranfield and NPL need `pip install ir_datasets`. SICK's splits
are chosen from all of its rows on the Hub by benchmarks/sick.json.
"""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from m3bert.commands.command import argument_parser, run_command
from m3bert.commands.sources import data_folder
from m3bert.data.files import load_files
from m3bert.data.hub_data import load_hub
from m3bert.evaluation import Task, find_task
from m3bert.evaluation.readers import download, read_rows
from m3bert.evaluation.tasks import HubData
from m3bert.utils.durable import replace_text, replacing


RECORD = Path(__file__).with_name("data.json")
TEXTS = ("id", "_id", "title", "text", "sentence1", "sentence2", "query-id", "corpus-id")
NUMBERS = ("label", "score")
NLI = ("entailment", "neutral", "contradiction")
# Folder -> split here -> split on the Hub. MRPC's training set is in two splits there.
SPLITS: dict[str, dict[str, str]] = {"mrpc": {"train": "train+validation"}}
LINES = {"wikitext-2": HubData("Salesforce/wikitext", "wikitext-2-v1", splits={"dev": "validation", "test": "test"})}
# Folder -> collection of ir_datasets, and its grade -> ours. Cranfield's best grade is 1; -1 is the paper that a query
# comes from.
COLLECTIONS = {"cranfield": ("cranfield", {-1: 4, 1: 4, 2: 3, 3: 2, 4: 1}), "npl": ("vaswani", {1: 1})}
SICK = Path(__file__).with_name("sick.json")  # split -> the keys of its rows; all others are for training
Rows = list[dict[str, Any]]


def file_of(data: Path, name: str) -> Path:
    """The file of a name such as `stsb/test`: lines of text, judgements, or rows of JSON."""
    folder, _, part = name.partition("/")
    kinds = {"txt": folder in LINES or folder.startswith("text-"), "tsv": part == "qrels"}
    return data / folder / f"{part}.{next((kind for kind, fits in kinds.items() if fits), 'jsonl')}.gz"


def names_in(data: Path) -> list[str]:
    """The names of all files of a folder."""
    files = (file for kind in ("jsonl", "tsv", "txt") for file in data.glob(f"*/*.{kind}.gz"))
    return sorted(f"{file.parent.name}/{file.name.split('.')[0]}" for file in files)


def read(file: Path) -> Rows:
    """The rows of a file; a line of text is a row."""
    return load_files([str(file)]).to_list() if ".txt" in file.suffixes else read_rows(file)


def task_of(name: str) -> Task | None:
    """The task that reads a file; `None` if there is none, as for text."""
    folder, _, part = name.partition("/")
    languages = {"tatoeba": part.partition("-")[0], "xnli": part.partition("-")[0]}
    try:
        return find_task(f"{folder}-{languages[folder]}" if folder in languages else folder)
    except ValueError:
        return None


def one_line(text: str) -> str:
    """A text without line breaks and repeated spaces."""
    return " ".join(text.split())


def rows_of_collection(folder: str, part: str) -> Rows:
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


def sick_rows(rows: Iterable[Mapping[str, Any]], part: str) -> Rows:
    """The rows of a split of SICK among all of its rows. Rows with the same texts and score are the same row."""
    keys = {split: Counter(text[place : place + 8] for place in range(0, len(text), 8))
            for split, text in json.loads(SICK.read_text(encoding="utf-8")).items()}  # fmt: skip
    splits: dict[str, Rows] = {split: [] for split in ("train", *keys)}
    for row in rows:
        values = [row["sentence1"], row["sentence2"], float(row["score"])]
        key = sha256(json.dumps(values).encode()).hexdigest()[:8]
        split = next((split for split, left in keys.items() if left[key]), "train")
        if split != "train":
            keys[split][key] -= 1
        splits[split].append(dict(zip(("sentence1", "sentence2", "score"), values, strict=True)))
    return splits[part]


def public_rows(name: str) -> Rows | None:
    """The rows of a file from its public source; `None` if they are not there in this form."""
    folder, _, part = name.partition("/")
    if folder in COLLECTIONS:
        return rows_of_collection(folder, part)
    if folder == "sick":
        return sick_rows(load_hub("mteb/sickr-sts", split="test"), part)
    if folder in LINES:
        hub = LINES[folder]
        lines = load_hub(hub.path, hub.config, split=hub.splits[part])["text"]
        return [{"text": line.strip()} for line in lines if line.strip()]
    task = task_of(name)
    if task is None or task.hub is None:
        return None
    splits = {"dev": "validation", **SPLITS.get(folder, {}), **task.hub.splits}
    # The local files of a task with labels of its own have those of the data set.
    hub = replace(task.hub, splits=splits, labels={} if task.labels else task.hub.labels)
    rows = download(task, part, hub)
    if task.labels:
        return [{**row, "label_text": NLI[row["label"]]} for row in rows if row["label"] in range(len(NLI))]
    return rows


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
    kept = []
    for row in rows:
        texts = {name.lstrip("_"): str(row[name] or "") for name in TEXTS if name in row}
        numbers = {name: float(row[name]) for name in NUMBERS if row.get(name) not in (None, "")}
        kept.append(json.dumps([texts, numbers, row.get("captions")], sort_keys=True))
    return [len(kept), sha256("\n".join(sorted(kept)).encode()).hexdigest()[:16]]


def compared(found: list[Any], recorded: list[Any] | None) -> str:
    """What a file has, and how it differs from the one that was recorded."""
    if recorded is None:
        return f"{found[0]:,} rows; none recorded"
    if found == recorded:
        return f"{found[0]:,} rows, as recorded"
    return f"{found[0]:,} rows DIFFER from the {recorded[0]:,} that our results are measured on"


def fill(data: Path, names: Iterable[str], recorded: Mapping[str, list[Any]]) -> list[str]:
    """Write the files that are missing, print a line for each name, and return the names that could not be read."""
    failed = []
    for name in names:
        file, known = file_of(data, name), recorded.get(name)
        try:
            if not file.is_file():
                rows = public_rows(name)
                if rows is None:
                    print(f"{name}: no public source in this form; studies run without it", flush=True)
                    continue
                write(file, rows)
            print(f"{name}: {compared(summary(read(file)), known)}", flush=True)
        except (OSError, ValueError, KeyError) as error:  # the next data set may be there
            print(f"{name}: FAILED: {str(error).splitlines()[0]}", flush=True)
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
        raise ValueError(f"{len(failed)} of {len(names)} files could not be read: run the command again.")


if __name__ == "__main__":
    run_command(main)
