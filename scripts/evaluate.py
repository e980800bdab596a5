"""
Score every granularity of an encoder, with one encode a task: a results file, tables and figures.

    python -m scripts.evaluate --tasks seeds --output_dir runs/evaluation              # the default encoder
    python -m scripts.evaluate --model_name_or_path intfloat/multilingual-e5-base --tasks sts cranfield \\
        --grid "4,8,12x32,64,768" --query_prompt "query: " --document_prompt "passage: "
    python -m scripts.evaluate --list_tasks

Tasks are read from the folder in M3BERT_DATA where they are there, and from the Hub where they are not.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from transformers import HfArgumentParser, set_seed

from hub_cards.figures import draw_all
from hub_cards.tables import family_table, report
from modeling_m3bert import convert_to_m3bert
from modeling_m3bert.conversion_m3bert import CONVERTIBLE
from scripts._command import HelpFormatter, run_command
from scripts._encoder import EncoderArguments, load_encoder
from scripts._sources import DEFAULT_ENCODER, local_data
from trainers.evaluation import GROUPS, TASKS, GridEncoder, GridResults, evaluate_grid, find_tasks, measure_latency
from trainers.nested import unwrap_encoder


QUERIES = [
    "how do I join two paths",
    "what is the capital of the country with the most islands",
    "measure how long a small piece of code takes",
    "a man is playing a guitar on a stage in front of a crowd",
]


@dataclass
class EvaluationArguments:
    """What to score, and where to write it."""

    tasks: list[str] = field(default_factory=list, metadata={"help": "Tasks or groups of tasks; see --list_tasks."})
    output_dir: str = field(default="runs/evaluation", metadata={"help": "Where results, tables and figures go."})
    latency: bool = field(default=True, metadata={"help": "Time one query at each layer and dim."})
    latency_documents: int = field(default=100_000, metadata={"help": "Documents in the search that is timed."})
    two_stages: bool = field(default=True, metadata={"help": "Retrieval: measure searches in two stages as well."})
    embeddings_dir: str | None = field(
        default=None,
        metadata={"help": "Keep embeddings there, on disk; a run that stopped goes on. Default: no."},
    )
    seed: int = field(default=0, metadata={"help": "Random seed."})
    list_tasks: bool = field(default=False, metadata={"help": "Print tasks and groups, and stop."})


def as_deployed(encoder: GridEncoder) -> GridEncoder:
    """The encoder that stops at a layer: the same one converted to m3BERT, where that is exact."""
    model = unwrap_encoder(encoder.model)
    if model.config.model_type not in CONVERTIBLE:
        return encoder
    return replace(encoder, model=convert_to_m3bert(model).to(model.device))


def write(results: GridResults, folder: Path) -> None:
    """Results, tables and figures."""
    results.save(folder / "results.json")
    (folder / "tables.md").write_text(report(results), encoding="utf-8")
    figures = draw_all(results, folder)
    print(f"{folder}: results.json, tables.md, {', '.join(file.name for file in figures)}")


def main(arguments: list[str]) -> None:
    parser = HfArgumentParser(
        (EncoderArguments, EvaluationArguments), description=__doc__, formatter_class=HelpFormatter
    )
    encoding, options = parser.parse_args_into_dataclasses(arguments)
    if options.list_tasks:
        print(f"tasks: {', '.join(TASKS)}, tatoeba-LANGUAGE, xnli-LANGUAGE")
        print("\n".join(f"{group}: {', '.join(names)}" for group, names in GROUPS.items()))
        return
    tasks = find_tasks(options.tasks)
    if not tasks:
        raise ValueError("Name what to score: --tasks seeds, or see --list_tasks.")
    set_seed(options.seed)
    encoder = load_encoder(encoding)
    results = evaluate_grid(
        encoder,
        tasks,
        local_data(),
        folder=Path(options.embeddings_dir) if options.embeddings_dir else None,
        two_stages=options.two_stages,
        seed=options.seed,
        verbose=True,
    )
    # The default encoder's folder is this machine's; its name is not.
    results.model = encoding.model_name_or_path or DEFAULT_ENCODER
    if options.latency:
        results.latency = measure_latency(
            as_deployed(encoder), QUERIES, documents=options.latency_documents, seed=options.seed
        )
    write(results, Path(options.output_dir))
    print(f"\n{family_table(results)}")


if __name__ == "__main__":
    run_command(main)
