"""Tables of the quickstart, and of exits before and after training."""

from __future__ import annotations

from benchmarks.reproduction.fit_texts import PASSAGES
from benchmarks.reproduction.tables.cells import (
    ASYMMETRIC,
    FULL,
    RETRIEVAL,
    Content,
    cell,
    mean_of,
    results,
    titled,
    with_share,
)
from benchmarks.reproduction.training_data import STS_TESTS
from m3bert.commands.quickstart import STAGES
from m3bert.hub_cards.tables import markdown, percent


def quickstart() -> str:
    """Recall@10 / MRR@10 of every size of the quickstart."""
    content = results("quickstart")

    def both(scores: Content) -> str:
        return f"{percent(scores['recall@10'])} / {percent(scores['mrr@10'])}"

    rows = [
        [
            g,
            *(both(scores[stage]) for stage in STAGES),
            f"{scores['ms_per_query']:.1f}",
            str(scores["bytes_per_vector"]),
        ]
        for g, scores in content["granularities"].items()
    ]
    for name, scores in content["baselines"].items():
        of = next((stage for stage in STAGES if f" {stage} " in name), None)
        cells = (both(scores) if of in (None, stage) else "" for stage in STAGES)
        rows.append([name.replace("trained", STAGES["trained"]), *cells, "", ""])
    header = ["query", *STAGES.values(), "ms per query", "bytes per vector"]
    return titled(content, markdown(header, rows), seeds=[content["seed"]])


def quickstart_in_short() -> str:
    """Recall@10 at some sizes, with documents at layer 6."""
    content = results("quickstart")
    words = {"0x384": "table look-up", "2x384": "2 layers", "4x384": "4 layers"}
    words |= {"6x64": "all 6 layers, 64 dims", FULL: "all 6 layers"}
    rows = []
    for g, name in words.items():
        scores = content["granularities"][g]
        rows.append(
            [name, *(percent(scores[stage]["recall@10"]) for stage in STAGES), f"{scores['ms_per_query']:.1f}"]
        )
    rows.append(["BM25", *[percent(content["baselines"]["BM25"]["recall@10"])] * len(STAGES), ""])
    header = ["query", *STAGES.values(), "ms per query"]
    return titled(content, markdown(header, rows), seeds=[content["seed"]])


def exits_fitted() -> str:
    """STS / nDCG@10 / nDCG@10 with documents at layer 6, by granularity and variant of the fit."""
    content = results("exits")
    columns = {"untouched": "base model", "fitted": "hidden state only", "static": "with static table"}
    columns |= {"static, principal": "with static table, principal basis"}
    rows = [
        [g, *(cell(content, run, g, STS_TESTS, RETRIEVAL, ASYMMETRIC) for run in columns)]
        for g in (f"{layer}x{dim}" for layer in (0, 1, 2, 4, 6) for dim in (32, 64, 384))
    ]
    return titled(content, markdown(["granularity", *columns.values()], rows), " --fit")


def exits_texts() -> str:
    """The same at layer 2, by the texts of the fit."""
    content = results("exits")
    counts = content["settings"]["texts"]
    words = {
        "static": (counts, 1, "all"),
        **{f"static, {part:.1%} of the texts": (counts, part, "all sources") for part in (0.4, 0.1, 0.025)},
        "static, no short texts": (PASSAGES, 1, "passages"),
        "static, news sentences": (["news"], 1, "news sentences"),
        "static, captions": (["captions"], 1, "captions"),
    }
    rows = []
    for run, (sources, part, name) in words.items():
        number = sum(int(part * counts[source]) for source in sources)
        rows.append([name, f"{number:,}", cell(content, run, "2x384", STS_TESTS, RETRIEVAL, ASYMMETRIC)])
    return titled(content, markdown(["texts of the fit", "number", "2x384"], rows), " --fit")


def exits_trained() -> str:
    """The same at 384 dims before and after training, and the share of the full depth that queries keep."""
    content, fits = results("exits_trained"), results("exits")
    full = mean_of(fits, "untouched", ASYMMETRIC, FULL)
    columns = {"fitted, hidden state only": (fits, "fitted"), "fitted": (fits, "static, principal")}
    columns["trained"] = content, "trained"

    def with_share_of_full(scores: Content, run: str, g: str) -> str:
        means = cell(scores, run, g, STS_TESTS, RETRIEVAL)
        return f"{means} / {with_share(mean_of(scores, run, ASYMMETRIC, g), full)}" if means else ""

    rows = [
        [str(layer), *(with_share_of_full(*column, f"{layer}x384") for column in columns.values())]
        for layer in (0, 1, 2, 4, 6)
    ]
    table = markdown(["layers run", *columns], rows)
    return titled(content, table, " --train --seeds 0 1", content["scores"]["trained"])


def exits_development() -> str:
    """STS / nDCG@10 with documents at the query's layer, on development sets, of fits without a table."""
    content, tests = results("exits_development"), (("stsb-dev", "sick-dev"), ("msmarco-mini",))
    sizes = ("2x32", "2x384", "4x32", "4x384", "6x32", "6x128", FULL)
    rows = [[run, *(cell(content, run, g, *tests) for g in sizes)] for run in content["scores"]]
    return titled(content, markdown(["fit", *sizes], rows), " --fit")
