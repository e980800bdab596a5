"""Tables of paths: depths that run some of an encoder's layers."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.reproduction.tables.cells import (
    FULL,
    RETRIEVAL,
    Content,
    cell,
    depth_of,
    is_file,
    mean_of,
    results,
    titled,
    with_share,
)
from m3bert.hub_cards.tables import markdown


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
