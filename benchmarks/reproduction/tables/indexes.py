"""Tables of searches in an index: joined, quantised and sparse."""

from __future__ import annotations

from statistics import mean

from benchmarks.reproduction.tables.cells import (
    FULL,
    RETRIEVAL,
    cell,
    mean_of,
    results,
    titled,
    with_share,
)
from m3bert.encode.precisions import bytes_per_vector
from m3bert.hub_cards.tables import markdown, percent, share
from m3bert.trainers import Granularity


EACH = (500, 5000)  # pairs of the rows of one direction


def join() -> str:
    """What queries of one encoder keep of an index of another, by the map and its pairs: over all directions, and in
    each one for some numbers of pairs."""
    content = results("join")
    tests = content["settings"]["collections"]
    runs = [run.split(", ") for run in content["scores"] if "," in run]  # direction, pairs, method
    directions = sorted({run[0] for run in runs})
    methods = ["Procrustes", "low-rank affine", "residual MLP", "m3bert join"]
    sizes = sorted({int(run[1].split()[0]) for run in runs})

    def shares(pairs: int, method: str, *some: str) -> str:
        whole, part, same = 0.0, 0.0, []
        for direction in some:
            run, index = f"{direction}, {pairs} pairs, {method}", direction.split(" to ")[1]
            if run not in content["scores"]:
                return ""
            whole += mean_of(content, index, tests, "ndcg@10")
            part += mean_of(content, run, tests, "ndcg@10")
            same.append(mean_of(content, run, tests, "top ten"))
        return f"{share(part, whole)}% / {percent(mean(same))}"

    rows = [["all", f"{pairs:,}", *(shares(pairs, method, *directions) for method in methods)] for pairs in sizes]
    for name in directions:
        rows += [[name, f"{pairs:,}", *(shares(pairs, method, name) for method in methods)] for pairs in EACH]
    options = f" --collections {' '.join(tests)}"
    return titled(content, markdown(["queries to index", "pairs", *methods], rows), options)


QAMA_SIZES = [Granularity(6, dim, code) for code in ("qama-2", "qama-1.5") for dim in (384, 192, 96)]
QAMA_HEADER = [f"`{g.code}`, {g.dim} dims" for g in QAMA_SIZES]
QAMA_STEPS = ["thresholds only", "+ feed-forward transform", "+ quantisation loss", "+ Matryoshka loss"]
QAMA_STEPS += ["+ orthogonality, bottleneck", "+ variance control"]
ALL_STEPS = QAMA_STEPS[-1]


def searched(way: str) -> list[str]:
    """The collections searched in one way, as the results file calls them."""
    return [f"{name} {way}".strip() for name in RETRIEVAL]


def qama_steps() -> str:
    """nDCG@10 by Hamming distance after each part of QAMA."""
    content = results("qama")
    floats = [cell(content, "no quantizer", f"6x{g.dim}", RETRIEVAL) for g in QAMA_SIZES]
    rows = [["float32", *floats]]
    rows += [[run, *(cell(content, run, g, RETRIEVAL) for g in QAMA_SIZES)] for run in QAMA_STEPS]
    return titled(content, markdown(["step", *QAMA_HEADER], rows), seeds=content["scores"][ALL_STEPS])


def qama_bytes() -> str:
    """nDCG@10 by bytes per vector after all steps, its share of float32, and what takes as many bytes untrained."""
    content = results("qama")
    full = mean_of(content, "no quantizer", RETRIEVAL, FULL)
    untrained = [Granularity.parse(key) for key in content["scores"]["no quantizer"]["0"][RETRIEVAL[0]]]
    rows = []
    for code, dim in (("qama-1", 192), ("qama-1", 384), ("qama-hybrid", 384), ("qama-1.5", 384), ("qama-2", 384)):
        size = bytes_per_vector(code, dim)
        row = [f"`{code}`, {dim}", str(size)]
        for way in ("", "asymmetric", "re-scored"):
            row.append(with_share(mean_of(content, ALL_STEPS, searched(way), Granularity(6, dim, code)), full))
        for other in ("binary", "int4", "int8"):
            same = [g for g in untrained if g.code == other and bytes_per_vector(other, g.dim) == size]
            row += [f"{cell(content, 'no quantizer', g, RETRIEVAL)} ({g.dim})" for g in same] or [""]
        products = content["scores"]["faiss PQ"]["0"][RETRIEVAL[0]]
        row.append(cell(content, "faiss PQ", size, RETRIEVAL) if str(size) in products else "")
        rows.append(row)
    header = ["precision, dims", "bytes", "Hamming", "float query", "by int8", "`binary`", "`int4`", "`int8`", "PQ"]
    return titled(content, markdown(header, rows), seeds=content["scores"][ALL_STEPS])


def qama_kept() -> str:
    """The share of the nDCG@10 of float32 at 384 dims that precisions keep, in percent."""
    content = results("qama")
    full = mean_of(content, "no quantizer", RETRIEVAL, FULL)
    rows = []
    for code in ("qama-2", "qama-1.5", "qama-hybrid", "qama-1"):
        values = (
            mean_of(content, ALL_STEPS, searched(way), f"6x384@{code}") for way in ("", "asymmetric", "re-scored")
        )
        rows.append([f"`{code}`", str(bytes_per_vector(code, 384)), *(share(value, full) for value in values)])
    for code, dim in (("int4", 384), ("int8", 144), ("binary", 384)):
        untrained = share(mean_of(content, "no quantizer", RETRIEVAL, f"6x{dim}@{code}"), full)
        rows.append([f"`{code}`, {dim} dims", str(bytes_per_vector(code, dim)), untrained, "", ""])
    header = ["precision", "bytes", "quantised query", "float query", "100 rescored by int8"]
    return titled(content, markdown(header, rows), seeds=content["scores"][ALL_STEPS])


def qama_development() -> str:
    """nDCG@10 and agreement with float32 on msmarco-mini, by step and by change of the settings."""
    content = results("qama_development")
    groups = (("msmarco-mini",), ("msmarco-mini agreement",))
    runs = [*QAMA_STEPS, *(run for run in content["scores"] if run not in (*QAMA_STEPS, "no quantizer", "faiss PQ"))]
    floats = [cell(content, "no quantizer", f"6x{g.dim}", groups[0]) for g in QAMA_SIZES]
    rows = [["float32", *floats], *([run, *(cell(content, run, g, *groups) for g in QAMA_SIZES)] for run in runs)]
    return titled(content, markdown(["run", *QAMA_HEADER], rows), seeds=content["scores"][ALL_STEPS])


def sparse() -> str:
    """nDCG@10 of look-up queries and of a sparse encoder, with the time of a query and the size of an index."""
    content, rows = results("sparse"), []
    for system, tests in content["scores"].items():
        searches = [test["search"] for test in tests.values()]
        quality = [values["ndcg@10"] for values in searches]
        time = next((f"{values['cpu_ms']:.2f}" for values in searches if "cpu_ms" in values), "")
        size = f"{mean(values['bytes'] for values in searches):,.0f}"
        rows.append([system, *map(percent, [*quality, mean(quality)]), time, size])
    return titled(content, markdown(["queries", *tests, "mean", "CPU ms per query", "bytes per document"], rows))
