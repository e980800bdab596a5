"""
The tables of the studies that are not in the harness: `TABLES` has them by name. Each reads its results files and is
Markdown, below a line that names the command, date, machine and seeds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.data import RECORD, source_of
from benchmarks.reproduction.exits import PASSAGES
from benchmarks.reproduction.study import seeds_of
from benchmarks.reproduction.training_data import STS_TESTS
from m3bert.commands.quickstart import STAGES
from m3bert.encode.precisions import bytes_per_vector
from m3bert.hub_cards.tables import markdown, percent, share
from m3bert.trainers import Granularity


HERE = Path(__file__).parent
RETRIEVAL = ("cranfield", "cisi", "npl")
ASYMMETRIC = tuple(f"{name} asymmetric" for name in RETRIEVAL)
FULL = "6x384"
Content = Mapping[str, Any]  # content of a results file


def results(name: str, folder: Path = HERE) -> dict[str, Any]:
    """The content of a results file."""
    content: dict[str, Any] = json.loads((folder / "results" / f"{name}.json").read_text(encoding="utf-8"))
    return content


def is_file(name: str) -> bool:
    """Whether there is a results file."""
    return (HERE / "results" / f"{name}.json").is_file()


def depth_of(run: str) -> int:
    """The number of layers of a run that is named after them."""
    return run.count(",") + 1


def mean_of(content: Content, run: str, tests: Iterable[str], key: Any) -> float:
    """The mean of a run over tests and seeds, of 1, at a granularity or another key of the scores."""
    return mean(seed[test][str(key)] for test in tests for seed in content["scores"][run].values())


def cell(content: Content, run: str, key: Any, *groups: Sequence[str]) -> str:
    """The means of a run over groups of tests, in percent; empty where it has no scores."""
    seeds = content["scores"][run].values()
    if any(str(key) not in seed[test] for tests in groups for test in tests for seed in seeds):
        return ""
    return " / ".join(percent(mean_of(content, run, tests, key)) for tests in groups)


def with_share(value: float, whole: float) -> str:
    return f"{percent(value)} ({share(value, whole)}%)"


def titled(content: Content, table: str, options: str = "", seeds: Collection[Any] = ()) -> str:
    """A table below its source. `options` of the command are those that the file does not name; a fit has no seeds."""
    source = f"{content['date']}; {content['machine']}" + (f"; {seeds_of(sorted(seeds))}" if seeds else "")
    return f"`{content.get('command', 'm3bert quickstart')}{options}` ({source}):\n\n{table}"


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


PATH_ENCODERS = {"minilm": "all-MiniLM-L6-v2", "e5": "multilingual-e5-small", "mpnet": "all-mpnet-base-v2"}


def with_shares(content: Content, run: str, suffix: str, sizes: Sequence[str], whole: str = "full") -> str:
    """The means of the collections, and of msmarco-mini, where they are searched in this way, with their shares of the
    whole encoder's. `sizes` are those of the run and of the whole encoder."""
    pairs = []
    for group in (RETRIEVAL, ["msmarco-mini"]):
        if tests := [test for test in group if f"{test} {suffix}" in content["scores"][run]["0"]]:
            of_run = mean_of(content, run, [f"{test} {suffix}" for test in tests], sizes[0])
            of_whole = mean_of(content, whole, [f"{test} asymmetric" for test in tests], sizes[1])
            pairs.append(with_share(of_run, of_whole))
    return " / ".join(pairs)


def paths() -> str:
    """nDCG@10 of queries by paths against documents of the whole encoder, and its share."""
    blocks = []
    for name, encoder in PATH_ENCODERS.items():
        if not is_file(f"paths_{name}"):
            continue
        content = results(f"paths_{name}")
        size = {run: next(iter(seeds["0"]["cranfield asymmetric"])) for run, seeds in content["scores"].items()}
        *_, deepest = sorted((run for run in size if "," in run), key=depth_of)
        by_path = f"documents by {depth_of(deepest)} layers"
        earlier = results(f"paths_with_exits_{name}") if is_file(f"paths_with_exits_{name}") else None
        rows = []
        for run in sorted(size, key=lambda run: int(size[run].partition("x")[0])):
            sizes = [size[run], size["full"]]
            layers = {"table": "0 (the table)", "full": f"all {size['full'].partition('x')[0]}"}.get(run)
            rows.append([layers or run.replace(",", ", ")])
            rows[-1] += [with_shares(content, run, suffix, sizes) for suffix in ("asymmetric", by_path)]
            if earlier is not None:
                native = f"{run}, native"
                rows[-1].append(
                    with_shares(earlier, native, "asymmetric", sizes) if native in earlier["scores"] else ""
                )
        header = [f"layers of {encoder}, {content['settings']['fit']['texts']:,} texts"]
        header += ["documents by all layers", by_path]
        if earlier is not None:
            header.append(f"with an exit, {earlier['settings']['fit']['texts']:,} texts")
        blocks.append(titled(content, markdown(header, rows)))
    return "\n\n".join(blocks)


def late() -> str:
    """nDCG@10 of queries by the depths of an encoder for late interaction, beside one vector per text, and BM25."""
    content, pooled = results("late"), results("paths_minilm")
    *short, whole = sorted((run for run in content["scores"] if run != "BM25"), key=depth_of)
    rows, last = [], depth_of(whole)
    for run in (*short, whole):
        depth = depth_of(run)
        alike = "full" if run == whole else next(other for other in pooled["scores"] if depth_of(other) == depth > 1)
        sizes = [f"{depth}x128", f"{last}x128"]
        sides = [with_shares(content, run, suffix, sizes, whole) for suffix in ("asymmetric", "symmetric")]
        rows.append([run.replace(",", ", "), *sides])
        rows[-1].append(with_shares(pooled, alike, "asymmetric", [f"{depth}x384", FULL]))
    rows.append(["BM25", cell(content, "BM25", "0x128", RETRIEVAL, ["msmarco-mini"]), "", ""])
    header = ["layers", "documents by all layers", "documents by the same layers", "one vector per text"]
    return titled(content, markdown(header, rows), seeds=[0])


def paths_candidates() -> str:
    """nDCG@10 of queries by the best three lists of layers of each depth, and by the list that a fit takes."""
    blocks, tests = [], [f"{test} asymmetric" for test in RETRIEVAL]
    for name in ("minilm", "e5"):
        content, paths = results(f"candidates_{name}"), results(f"paths_{name}")
        whole = mean_of(paths, "full", tests, next(iter(paths["scores"]["full"]["0"][tests[0]])))
        scores = {run: mean_of(content, run, tests, f"{depth_of(run)}x384") for run in content["scores"]}
        rows = []
        for depth, fit in paths["settings"]["fit"]["paths"].items():
            ranked = sorted(
                (run for run in scores if depth_of(run) == int(depth)), key=scores.__getitem__, reverse=True
            )
            taken = ",".join(map(str, fit["layers"]))
            for place, run in enumerate(ranked, start=1):
                if place <= 3 or run == taken:
                    share = with_share(scores[run], whole)
                    rows.append([run.replace(",", ", "), f"{place} of {len(ranked)}", share, "yes" * (run == taken)])
        header = [f"layers of {PATH_ENCODERS[name]}", "place", "documents by all layers", "taken by the fit"]
        blocks.append(titled(content, markdown(header, rows)))
    return "\n\n".join(blocks)


def trained_paths() -> str:
    """nDCG@10 of queries by native students against documents of the whole encoder, before and after training."""
    content, blocks = results("trained_paths"), []
    size = {run: next(iter(seeds["0"]["cranfield"])) for run, seeds in content["scores"].items()}
    for name, encoder in PATH_ENCODERS.items():

        def both(run: str, whole: str = f"{name} full") -> str:
            pairs = (
                (mean_of(content, each, tests, size[each]) for each in (run, whole))
                for tests in (RETRIEVAL, ["msmarco-mini"])
            )
            return " / ".join(with_share(*pair) for pair in pairs)

        rows = []
        for trained in (run for run in size if run.startswith(f"{name} ") and run.endswith(", trained")):
            run = trained.removesuffix(", trained")
            rows.append([run.removeprefix(f"{name} "), both(run), both(trained)])
        if rows:
            rows.append(["whole encoder", both(f"{name} full"), ""])
            steps = content["settings"]["training"]["max_steps"][name]
            columns = [f"layers of {encoder}", "before training", f"after {steps} steps"]
            blocks.append(titled(content, markdown(columns, rows), f" {name}"))
    return "\n\n".join(blocks)


def paths_decoder() -> str:
    """The share of the nearest ten texts that a path of a decoder keeps."""
    content = results("paths_smollm2")
    size = next(iter(content["scores"]["plain"]["0"]["nearest ten"]))
    rows = [
        [run, *(cell(content, run, size, [test]) for test in ("nearest ten", "nearest ten asymmetric"))]
        for run in content["scores"]
    ]
    header = ["20 of 30 layers", "both sides by the path", "one side by the whole model"]
    return titled(content, markdown(header, rows))


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


def data_sources() -> str:
    """The public source of every data set, and what our results are measured on: a digest and the number of rows."""
    parts: dict[str, list[tuple[int, str]]] = {}
    for name, (count, digest) in json.loads(RECORD.read_text(encoding="utf-8")).items():
        parts.setdefault(name.partition("/")[0], []).append((count, digest))
    rows = []
    for folder, files in parts.items():
        source = source_of(folder)
        digest = sha256("".join(digest for _, digest in files).encode()).hexdigest()[:12]
        where = re.sub(r"/([0-9a-f]{12})[0-9a-f]{28}/", r" @ \1: ", source.name)
        rows.append([folder, where, source.rule, f"`{digest}`", f"{sum(count for count, _ in files):,}"])
    return markdown(["set", "source", "rule", "digest", "rows"], rows, words=4)


def public() -> str:
    """The means of NanoBEIR and of families of MTEB, by encoder and size."""
    blocks = []
    for file in sorted((HERE / "results" / "public").glob("*.json")):
        content = results(f"public/{file.stem}", HERE)
        scores = content["scores"]
        sizes = dict.fromkeys(g for values in scores.values() for g in values)
        rows = [[g, *(percent(values[g]) if g in values else "" for values in scores.values())] for g in sizes]
        blocks.append(titled(content, markdown([content["model"], *scores], rows)))
    return "\n\n".join(blocks) or "| size | NanoBEIR | STS | classification | pairs | clustering |\n|" + " --- |" * 6


SPEED: dict[str, Any] = json.loads((HERE / "speed.json").read_text(encoding="utf-8"))


def speed(name: str) -> str:
    """A table of `SPEED`, whose cells are formats of the content of results files."""
    files = {file: results(file, HERE.parent) for file in SPEED[name]["files"]}
    sources = (
        f"`python -m benchmarks.{file}` ({content['date']}; {content['machine']}, {content['cores']} CPU cores; "
        f"{seeds_of([content['seed']])})"
        for file, content in files.items()
    )
    rows = [[cell.format(**files) for cell in row] for row in SPEED[name]["rows"]]
    return f"{'; '.join(sources)}:\n\n{markdown(SPEED[name]['header'], rows, words=2 if len(rows) > 5 else 1)}"


TABLES: dict[str, Callable[[], str]] = {
    "quickstart": quickstart,
    "quickstart-in-short": quickstart_in_short,
    "exits": exits_fitted,
    "exits-texts": exits_texts,
    "exits-trained": exits_trained,
    "exits-development": exits_development,
    "paths": paths,
    "late": late,
    "paths-candidates": paths_candidates,
    "paths-decoder": paths_decoder,
    "trained-paths": trained_paths,
    "join": join,
    "qama-steps": qama_steps,
    "qama-bytes": qama_bytes,
    "qama-kept": qama_kept,
    "qama-development": qama_development,
    "static-peers": static_peers,
    "sparse": sparse,
    "static-tables": static_tables,
    "onnx-quality": onnx_quality,
    "trim": trim,
    "data": data_sources,
    "public": public,
    **{name: partial(speed, name) for name in SPEED},
}
