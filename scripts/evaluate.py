"""
Score every granularity of an encoder, encoding each task once: a results file, tables and figures.

    m3bert evaluate --tasks paper --output_dir runs/evaluation                  # the default encoder
    m3bert evaluate --model_name_or_path intfloat/multilingual-e5-base --tasks sts cranfield \\
        --grid "4,8,12x32,64,768" --query_prompt "query: " --document_prompt "passage: "
    m3bert evaluate --tasks cranfield --grid "6x384@float32,int8,binary"    # also in fewer bits
    m3bert evaluate --tasks nanobeir                                      # the 13 small collections of NanoBEIR
    m3bert evaluate --mteb STSBenchmark Banking77Classification           # by MTEB's own protocol
    m3bert evaluate --retrieval my-collection --pairs pairs.csv --classification reviews.csv     # your own data
    m3bert evaluate --list_tasks

Tasks are read from the folder in the environment variable M3BERT_DATA if they are there, otherwise from the Hub.
The task `stdlib` needs neither: its texts come with Python. Your own data is a local file or folder, or a data set on
the Hub (user/name, or user/name:configuration), and is scored under its own name. MTEB itself
runs tasks of MTEB (extra `mteb`), on data that it reads from the Hub. All scores are in one results.json.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .. import evaluation
from ..data.formats import FORMATS, check_files, suffix_of
from ..encode.device import ComputeArguments, place
from ..encode.granularity import is_elastic
from ..evaluation.results import GridResults
from ..evaluation.tasks import BY_LANGUAGE, GROUPS, TASKS, Task, find_tasks
from ..hub_cards.tables import latency_report, report, task_type_table
from ..utils.durable import remove_files
from ..utils.extras import how_to_install, require_extra
from ..utils.help_texts import option
from .command import next_step, parse_options, writing_to
from .encoder import EncoderArguments, load_encoder
from .sources import DEFAULT_ENCODER, local_data


# What the command writes. Results of an interrupted run are in a file whose name is made of its options.
FILES = ("results.json", "tables.md", "heat_map_*.png", "quality_*.png", "asymmetric_search.png", "variances_*.png")
UNFINISHED = "unfinished-{}.json"
QUERIES = [
    "how do I join two paths",
    "what is the capital of the country with the most islands",
    "measure how long a small piece of code takes",
    "a man is playing a guitar on a stage in front of a crowd",
]


@dataclass
class EvaluationArguments:
    """Which tasks and searches to score, and where to write the results."""

    tasks: list[str] = option([], "Tasks or groups of tasks; see --list_tasks.")
    mteb: list[str] = option([], "Tasks of MTEB (STSBenchmark), by its own protocol. Needs the extra `mteb`.")
    retrieval: list[str] = option(
        [],
        "Your own collections to search, in the layout of BEIR: folders with corpus.jsonl, queries.jsonl and "
        "qrels/test.tsv, plain or gzipped, or Hub ids.",
    )
    pairs: list[str] = option(
        [],
        "Your own pairs of texts with a score (similarity) or a label 0 or 1 (pair classification): .csv, .tsv, "
        ".jsonl or .parquet files, also gzipped, or Hub ids.",
    )
    pairs_columns: list[str] = option([], "Columns of --pairs. Default: sentence1, sentence2, and score or label.")
    classification: list[str] = option(
        [],
        "Your own labelled texts: folders with the files train and test, or Hub ids; or single files, of which a "
        "fifth of the texts is the test split, always the same. Formats as for --pairs.",
    )
    classification_columns: list[str] = option(["text", "label"], "The columns of --classification.")
    split: str = option("test", "Split of your own data to score.")
    recall: list[int] = option([1, 10, 100], "For retrieval: k of Recall@k, up to the size of the collection.")
    output_dir: str = option("runs/evaluation", "Folder for the results. An interrupted run resumes from it.")
    overwrite: bool = option(False, "Replace the results that output_dir holds.")
    latency: bool = option(True, "Measure ms per query, at each layer and dim.")
    latency_documents: int = option(100_000, "Number of documents in the index whose search is timed.")
    latency_onnx: list[int] = option(
        [],
        "Layers of the grid whose ms per query are also measured in onnxruntime, in float32 and int8. Needs the extra "
        "`onnx`, and memory for two graphs per layer, each with all token embeddings.",
    )
    two_stages: bool = option(True, "For retrieval: also measure two-stage searches.")
    asymmetric: bool | None = option(
        None,
        "For retrieval: also measure searches with queries and documents at different layers: True is between all "
        "layers, False is not at all. Default: between the layers that share a space, which are those with exits and "
        "the last.",
    )
    hybrid: bool = option(
        False,
        "For retrieval: also measure BM25, alone and beside embeddings, with queries at each layer that shares the "
        "space of the last one.",
    )
    embeddings_dir: str | None = option(None, "Keep the embeddings in this folder, to resume from. Default: do not.")
    seed: int = option(0, "Random seed.")
    list_tasks: bool = option(False, "Print all tasks and groups, and exit.")


def as_deployed(encoder: evaluation.GridEncoder, compute: ComputeArguments) -> evaluation.GridEncoder:
    """The encoder to time: converted to m3BERT, which stops at a layer, if that is exact. It computes as asked for."""
    from ..encode.states import unwrap_encoder
    from ..models.conversion import CONVERTIBLE, convert_to_m3bert

    model = unwrap_encoder(encoder.model)
    if is_elastic(model.config) or model.config.model_type not in CONVERTIBLE:
        return encoder
    return replace(encoder, model=place(convert_to_m3bert(model), compute))


def tasks_of(options: EvaluationArguments) -> list[Task]:
    """The tasks that the options name, then your own data."""
    for source in (*options.pairs, *options.classification):
        if suffix_of(source) in FORMATS:
            check_files([source])
    at: dict[str, Any] = {"split": options.split}
    texts, labels = {"columns": options.pairs_columns, **at}, {"columns": options.classification_columns, **at}
    tasks = [
        *find_tasks(options.tasks),
        *(evaluation.collection_task(source, **at) for source in options.retrieval),
        *(evaluation.pairs_task(source, **texts) for source in options.pairs),
        *(evaluation.labels_task(source, **labels) for source in options.classification),
    ]
    return [replace(task, recall=tuple(sorted({*options.recall}))) for task in tasks]


def unfinished_file(encoder: evaluation.GridEncoder, encoding: EncoderArguments, options: EvaluationArguments) -> Path:
    """The file for the results so far, named by a hash of options, weights and versions."""
    from ..evaluation.evaluate import installed_versions
    from ..utils.hashing import key_of

    facts = [asdict(encoding), asdict(options), installed_versions(), encoder.identity()]
    return Path(options.output_dir, UNFINISHED.format(key_of({"run": facts})))


def write(results: GridResults, folder: Path) -> None:
    results.save(folder / "results.json")
    (folder / "tables.md").write_text(report(results), encoding="utf-8")
    written = ["results.json", "tables.md"]
    if find_spec("matplotlib") is not None:
        from ..hub_cards.figures import draw_all

        written += [file.name for file in draw_all(results, folder)]
    else:
        written.append(f"no figures ({how_to_install('publish')})")
    print(f"{folder}: {', '.join(written)}")


def main(arguments: list[str]) -> None:
    encoding, options = parse_options((EncoderArguments, EvaluationArguments), __doc__, arguments)
    if options.list_tasks:
        print(f"tasks: {', '.join(TASKS)}, {BY_LANGUAGE}")
        print("\n".join(f"{group}: {', '.join(names)}" for group, names in GROUPS.items()))
        return
    mteb_tasks: list[Any] = []
    if options.mteb:
        mteb_tasks = require_extra("mteb", "mteb", "--mteb").get_tasks(tasks=options.mteb)
    tasks = tasks_of(options)
    if not tasks and not mteb_tasks:
        raise ValueError("Nothing to score: pass --tasks paper, or see --list_tasks.")
    with writing_to(options.output_dir, FILES, options.overwrite):
        from transformers import set_seed

        from ..hub_cards.onnx_graphs import onnx_engines

        set_seed(options.seed)
        encoder = load_encoder(encoding)
        # Before the work: an encoder that cannot be exported ends the run at once.
        engines = onnx_engines(encoder, options.latency_onnx) if options.latency_onnx else None
        unfinished = unfinished_file(encoder, encoding, options)
        results = evaluation.evaluate_grid(
            encoder,
            [*tasks, *mteb_tasks],
            local_data(),
            folder=Path(options.embeddings_dir) if options.embeddings_dir else None,
            two_stages=options.two_stages,
            asymmetric=options.asymmetric,
            hybrid=options.hybrid,
            seed=options.seed,
            verbose=True,
            unfinished=unfinished,
        )
        # The name of the default encoder, not its folder on this machine.
        results.model = encoding.model_name_or_path or DEFAULT_ENCODER
        results.settings["compile"] = encoding.compile
        if options.latency:
            results.latency = evaluation.measure_latency(
                as_deployed(encoder, encoding),
                QUERIES,
                documents=options.latency_documents,
                seed=options.seed,
                engines=engines,
            )
        remove_files(options.output_dir, FILES)
        write(results, Path(options.output_dir))
        remove_files(options.output_dir, [UNFINISHED.format("*")])
    print(f"\n{task_type_table(results)}")
    if results.latency is not None:
        print(f"\n{latency_report(results.latency, results.granularities.layers)}")
    plan = ["--documents", 100_000, "--output_file", Path(options.output_dir, "plan.json")]
    next_step("m3bert", "choose", Path(options.output_dir, "results.json"), *plan)
