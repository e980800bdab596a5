"""
The picture of README.md and of the first page of the documentation: documents are embedded once, queries at the depth
that they can afford. And the picture of MRL with one term of MIPIC or MIC at a time.

    python -m benchmarks.reproduction.picture     # writes docs/images/elastic.svg and terms.svg from the results
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from html import escape
from pathlib import Path

from benchmarks.reproduction.report import Difference, measured, runs_on
from benchmarks.reproduction.run import read_runs
from benchmarks.reproduction.studies import STUDIES
from benchmarks.reproduction.tables.cells import Content, results


IMAGES = Path(__file__).parents[2] / "docs" / "images"
WIDTH, HEIGHT, LAYERS = 960, 430, 6
ALL = range(1, LAYERS + 1)
QUERIES = {"0x384": "table look-up", "2x384": "2 layers", "4x384": "4 layers", "6x384": "all 6 layers"}
TABLE = ("#f2c278", "#e9a23b")
INK, GREY, FAINT, DEEP, LIGHT = "#1c2733", "#5b6875", "#e4e9ee", "#1f6f8b", "#d8edf3"


def text(x: float, y: float, words: str, size: int = 15, color: str = INK, weight: int = 400) -> str:
    return (
        f'<text x="{x}" y="{y}" font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="middle">'
        f"{escape(words)}</text>"
    )


def box(x: float, y: float, width: float, height: float, fill: str, radius: float = 5, more: str = "") -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="{radius}" fill="{fill}" {more}/>'


def stack(x: float, y: float, width: float, used: Collection[int]) -> str:
    """The layers of an encoder from the bottom up, of which some run; a table in place of the first if none does."""
    drawn = [
        box(x, y - 26 * layer, width, 20, DEEP if layer in used else FAINT)
        for layer in range(1 if used else 2, LAYERS + 1)
    ]
    if not used:
        cell = width / 6
        drawn += [box(x + cell * place, y - 26, cell - 3, 20, TABLE[place % 2], 2) for place in range(6)]
    return "".join(drawn)


def arrow(x: float, top: float, bottom: float) -> str:
    return (
        f'<path d="M{x} {top} V{bottom - 8}" stroke="{GREY}" stroke-width="2"/>'
        f'<path d="M{x - 6} {bottom - 9} h12 l-6 9 z" fill="{GREY}"/>'
    )


def picture(content: Content) -> str:
    """The SVG file of a run of the quickstart."""
    sizes = content["granularities"]
    whole = sizes["6x384"]["fitted"]["recall@10"]
    drawn = [
        box(0, 0, WIDTH, HEIGHT, "#ffffff", 14, f'stroke="{FAINT}"'),
        text(150, 46, "Documents, once", 19, weight=600),
        text(150, 70, "all 6 layers", 15, GREY),
        stack(85, 262, 130, ALL),
        arrow(150, 268, 300),
        text(610, 46, "Queries, at the depth that you can afford", 19, weight=600),
        text(610, 70, "one checkpoint, one embedding space, one index", 15, GREY),
        f'<path d="M290 30 V{HEIGHT - 60}" stroke="{FAINT}" stroke-width="2"/>',
        box(60, 304, 180, 56, LIGHT, 8),
        text(150, 338, "one index", 17, DEEP, 600),
    ]
    for place, (size, words) in enumerate(QUERIES.items()):
        middle, scores = 385 + 160 * place, sizes[size]
        layers = content["layers"].get(size.partition("x")[0], ALL)
        drawn += [
            stack(middle - 55, 262, 110, layers),
            text(middle, 290, words, 15, GREY),
            text(middle, 330, f"{100 * scores['fitted']['recall@10'] / whole:.0f}%", 30, DEEP, 700),
            text(middle, 358, f"{scores['ms_per_query']:.1f} ms", 17, INK, 600),
        ]
    note = (
        f"Recall@10 kept and time of a query: all-MiniLM-L6-v2 after a fit without training, {content['test_pairs']} "
        f"held-out queries of Python's documentation, {content['machine'].split(',')[1].strip()}."
    )
    drawn.append(text(WIDTH / 2, HEIGHT - 26, note, 13, GREY))
    return svg(HEIGHT, note, drawn)


def interval(x: float, y: float, half: float, width: float, color: str) -> str:
    """A bar from 0 (at x) to `width`, with an interval of half a length at its end."""
    bar = box(min(x, x + width), y, abs(width), 14, color, 2)
    end = x + width
    return bar + f'<path d="M{end - half} {y + 7} H{end + half}" stroke="{INK}" stroke-width="1.5"/>'


def differences() -> str:
    """The SVG file of the claims of the study `elimination`: how far each method is above or below MRL."""
    study = STUDIES["elimination"]
    runs = runs_on(study, read_runs(study), study.backbones[0])
    by_claim = {(claim.better, claim.sizes): measured(study, claim, runs) for claim in study.claims}
    names, sizes = dict.fromkeys(name for name, _ in by_claim), dict.fromkeys(size for _, size in by_claim)
    most = max(
        abs(difference.mean) + difference.half_width
        for difference in by_claim.values()
        if isinstance(difference, Difference)
    )
    zero, scale, height = 640, 400 / most, 60 + 52 * len(names)
    drawn = [text(zero, 26, "points above or below MRL, 95% interval over seeds", 15, GREY)]
    for row, name in enumerate(names):
        drawn.append(text(120, 66 + 52 * row, name, 15))
        for place, size in enumerate(sizes):
            difference = by_claim[name, size]
            if not isinstance(difference, Difference):
                raise ValueError(f"{name} at {size}: {difference}.")
            y, color = 44 + 52 * row + 18 * place, (DEEP, TABLE[1])[place]
            drawn += [
                interval(zero, y, scale * difference.half_width, scale * difference.mean, color),
                text(WIDTH - 40, y + 12, f"{difference.mean:+.1f}", 13, color, 600),
            ]
    drawn.append(f'<path d="M{zero} 36 V{height - 20}" stroke="{GREY}" stroke-width="1"/>')
    legend = f"upper bar: {[*sizes][0].partition('x')[2]} dims; lower bar: {[*sizes][1].partition('x')[2]} dims"
    return svg(height + 20, study.title, [*drawn, text(zero, height + 6, legend, 13, GREY)])


def svg(height: float, title: str, drawn: Sequence[str]) -> str:
    """An SVG file."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">'
        f"<title>{escape(title)}</title>" + "".join(drawn) + "</svg>\n"
    )


def main() -> None:
    for name, content in (("elastic", picture(results("quickstart"))), ("terms", differences())):
        (IMAGES / f"{name}.svg").write_text(content, encoding="utf-8")
        print(IMAGES / f"{name}.svg")


if __name__ == "__main__":
    main()
