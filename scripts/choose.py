"""
Choose the granularity to deploy within a budget, from the results of an evaluation: layer, dims and precision of the
index, and, if they were measured, the layer for queries and the vectors that rescore a shortlist:

    m3bert choose runs/evaluation/results.json --documents 1000000 --memory_gb 0.5
    m3bert choose runs/evaluation/results.json --documents 1000000 --latency_ms 10 --min_quality 0.4

With `--output_file plan.json`, `m3bert index plan.json` builds the index.
"""

from __future__ import annotations

from dataclasses import MISSING, dataclass
from pathlib import Path

from ..evaluation.choice import Budget, choose
from ..evaluation.results import GridResults
from ..evaluation.tasks import GROUPS
from ..hub_cards.tables import asymmetric_table, hybrid_table, rescored_table, two_stage_table
from ..utils.help_texts import option
from .command import next_step, parse_options


def judges(results: GridResults, names: list[str]) -> list[str]:
    """The tasks to judge by. Names may be tasks, task types or groups; without any, the retrieval tasks with
    scores, then MTEB's, otherwise all tasks but geometry."""
    if not names:
        judged = [task for task_type in results.judged_task_types() for task in results.tasks(task_type)]
        return results.tasks("retrieval") or results.tasks("mteb_retrieval") or judged
    members: list[str] = []
    for name in names:
        members += results.tasks(name) or GROUPS.get(name, (name,))
    return list(dict.fromkeys(members))


@dataclass
class ChoiceArguments:
    """The budget, and what to judge by."""

    documents: int = option(MISSING, "Number of vectors in the index.")
    memory_gb: float | None = option(None, "Memory for the stored vectors, in gigabytes.")
    latency_ms: float | None = option(None, "ms per query, encoding and search together; needs measured latency.")
    min_quality: float | None = option(
        None, "Mean main metric, in 0..1, that is good enough: take the cheapest with it."
    )
    tasks: list[str] = option([], "Tasks, task types or groups to judge by. Default: retrieval, or all.")
    plans: bool = option(
        False, "Also print all measured searches in two stages, with codes rescored, or between layers."
    )
    output_file: Path | None = option(None, "File for the plan, which `m3bert index` builds.")


def main(arguments: list[str]) -> None:
    file = {"type": Path, "help": "results.json of `m3bert evaluate`"}
    options, place = parse_options((ChoiceArguments,), __doc__, arguments, results=file)
    results = GridResults.load(place.results)
    tasks = judges(results, options.tasks)
    budget = Budget(options.documents, options.memory_gb, options.latency_ms, options.min_quality)
    choice = choose(results, tasks, budget)
    print(f"Judged by {', '.join(tasks)}. {choice.explanation}")
    if options.output_file is not None:
        from ..index.plan import Plan  # imports torch, which choosing does not need

        Plan.of(choice, results, tasks, budget.documents).save(options.output_file)
        print(f"Plan: {options.output_file}")
    if options.plans:
        size = choice.granularity.size
        print(f"\n{two_stage_table(results, size)}")
        if any(search.granularity.size == size for search in results.rescored_searches):
            print(f"\n{rescored_table(results, size)}")
        if any(search.dim == size.dim for search in results.asymmetric_searches):
            print(f"\n{asymmetric_table(results, size.dim)}")
        if results.hybrid_searches:
            print(f"\n{hybrid_table(results)}")
    if options.output_file is None:
        next_step("m3bert", "choose", *arguments, "--output_file", place.results.with_name("plan.json"))
    else:
        index = ["--vector_store", "faiss", "--output_dir", options.output_file.with_suffix(".index")]
        next_step("m3bert", "index", options.output_file, "--files", "corpus.jsonl", *index)
