"""
Which granularity to deploy on a budget, by what an evaluation measured:

    python -m scripts.choose runs/evaluation/results.json --documents 1000000 --memory_gb 0.5
    python -m scripts.choose runs/evaluation/results.json --documents 1000000 --latency_ms 10 --min_quality 0.4
"""

from __future__ import annotations

import argparse
from pathlib import Path

from hub_cards.tables import two_stage_table
from scripts._command import run_command
from trainers.evaluation import GROUPS, GridResults
from trainers.evaluation.selection import Budget, choose


def judges(results: GridResults, names: list[str]) -> list[str]:
    """The tasks to judge by: those named, also by family or group; by default retrieval, where it was scored, else all
    but geometry."""
    if not names:
        judged = [task for family in results.judged_families() for task in results.tasks(family)]
        return results.tasks("retrieval") or judged
    members: list[str] = []
    for name in names:
        members += results.tasks(name) or GROUPS.get(name, (name,))
    return list(dict.fromkeys(members))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="results.json of scripts.evaluate")
    parser.add_argument("--documents", type=int, required=True, help="vectors in the index")
    parser.add_argument("--memory_gb", type=float, help="memory for them, in gigabytes, as float32")
    parser.add_argument("--latency_ms", type=float, help="of a query, encoding and search, where it was measured")
    parser.add_argument(
        "--min_quality", type=float, help="main metric that is good enough, in 0..1: then the cheapest"
    )
    parser.add_argument("--tasks", nargs="+", default=[], help="tasks or families to judge by; default: retrieval")
    parser.add_argument("--tolerance", type=float, default=0.01, help="quality that two stages may lose, as a share")
    parser.add_argument("--plans", action="store_true", help="print every measured search in two stages as well")
    options = parser.parse_args(arguments)
    results = GridResults.load(options.results)
    tasks = judges(results, options.tasks)
    budget = Budget(options.documents, options.memory_gb, options.latency_ms, options.min_quality)
    choice = choose(results, tasks, budget, tolerance=options.tolerance)
    print(f"Judged by {', '.join(tasks)}. {choice.explanation}")
    if options.plans:
        print(f"\n{two_stage_table(results, choice.granularity)}")


if __name__ == "__main__":
    run_command(main)
