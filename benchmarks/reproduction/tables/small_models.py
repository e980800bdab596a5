"""Tables of smaller files: static tables, ONNX graphs and trimmed vocabularies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from benchmarks.reproduction.tables.cells import (
    ASYMMETRIC,
    HERE,
    RETRIEVAL,
    Content,
    results,
    titled,
    with_share,
)
from benchmarks.reproduction.training_data import STS_TESTS
from m3bert.hub_cards.tables import markdown


def static_peers() -> str:
    """The static table beside model2vec and BM25."""
    content = results("static_peers", HERE.parent)
    scores = content["scores"]

    def mean_over(tests: Iterable[str], system: str) -> str:
        values = [scores[test].get(system) for test in tests]
        return "" if None in values else f"{mean(values):.1f}"

    sides = {
        "model2vec": ("model2vec", "model2vec"),
        "static table": ("static table", "static table"),
        "static queries, full documents": ("static table", "full depth"),
        "full depth": ("full depth", "full depth"),
        "BM25": ("BM25 alone", ""),
    }
    rows = []
    for name, words in sides.items():
        row = [mean_over(STS_TESTS, name), mean_over(RETRIEVAL, name)]
        rows.append([*words, *row, mean_over(RETRIEVAL, f"{name} + BM25, by scores")])
    return titled(content, markdown(["queries", "documents", "STS", "nDCG@10", "with BM25"], rows, words=2))


def static_tables() -> str:
    """The static table with smaller rows, and with rows for words, on the development set and on the tests."""
    searched, content = (results(f"static_peers_tables{suffix}", HERE.parent) for suffix in ("_development", ""))

    def with_whole(file: Content, tests: Sequence[str], table: str) -> str:
        """nDCG@10, with its share of that of full depth."""
        if any(table not in file["scores"][test] for test in tests):
            return ""
        whole = mean(file["scores"][test.removesuffix(" asymmetric")]["full depth"] for test in tests)
        return with_share(mean(file["scores"][test][table] for test in tests) / 100, whole / 100)

    rows = []
    for table, megabytes in searched["megabytes"].items():
        row = [table, f"{megabytes:.1f}", f"{searched['rows_per_text'][table]:.1f}"]
        row += [with_whole(searched, [name], table) for name in ("msmarco-mini", "msmarco-mini asymmetric")]
        tested = table in content["megabytes"]
        row.append(f"{mean(content['scores'][test][table] for test in STS_TESTS):.1f}" if tested else "")
        rows.append([*row, *(with_whole(content, tests, table) for tests in (RETRIEVAL, ASYMMETRIC))])
    header = ["table", "MB", "rows per text", "msmarco-mini", "msmarco-mini, full documents"]
    header += ["STS", "tests", "tests, full documents"]
    return titled(content, markdown(header, rows), " [--development]")


def onnx_quality() -> str:
    """The size and the loss of quality of the ONNX graphs of the default encoder."""
    content = results("onnx_quality")
    rows = []
    for graph in content["graphs"]:
        cosines = (graph["mean_cosine"], graph["lowest_cosine"])
        rows.append(
            [
                f"`{Path(graph['file']).name}`",
                f"{graph['bytes'] / 1e6:.1f}",
                *("" if cosine is None else f"{cosine:.4f}" for cosine in cosines),
                f"{100 * graph['scores']['stsb']:.2f}",
            ]
        )
    header = ["graph", "MB", "mean cosine", "lowest", "STS-B (Spearman)"]
    return titled({**content, "command": "m3bert export --fp16"}, markdown(header, rows))


TRIMMED = {"e5": "multilingual-e5-small", "minilm": "all-MiniLM-L6-v2", "smollm2": "SmolLM2-135M-Instruct"}


def trim() -> str:
    """The sizes of encoders before and after their vocabulary is trimmed, and other texts."""
    content, rows = results("trim"), []
    runs = [(name, characters) for name in TRIMMED for characters in ("all", "texts")]
    for name, characters in runs:
        if f"{name}, {characters}" not in content["scores"]:
            continue
        sizes = content["scores"][f"{name}, {characters}"]["0"]
        before, after = sizes["before"], sizes["after"]
        others = (sizes.get(text) for text in ("held-out texts", "Cranfield", "deu", "por", "rus", "zho"))
        rows.append(
            [
                f"{TRIMMED[name]}, {characters}",
                f"{before['tokens']:,} -> {after['tokens']:,}",
                *(f"{before[size] / 1e6:.1f} -> {after[size] / 1e6:.1f}" for size in ("parameters", "bytes")),
                f"{sizes['hidden states']['difference']:.1f}",
                *(
                    f"{100 * text['longer']:+.1f}% ({100 * text['unknown_after']:.1f}%)" if text else ""
                    for text in others
                ),
            ]
        )
    header = ["characters", "tokens", "million parameters", "MB", "difference", "held out", "Cranfield"]
    return titled(content, markdown([*header, "German", "Portuguese", "Russian", "Chinese"], rows), " ENCODER")
