"""
The picture of README.md and of the first page of the documentation: documents are embedded once, queries at the depth
that they can afford.

    python -m benchmarks.reproduction.picture     # writes docs/images/elastic.svg from results/quickstart.json
"""

from __future__ import annotations

from collections.abc import Collection
from html import escape
from pathlib import Path

from benchmarks.reproduction.tables import Found, results


FILE = Path(__file__).parents[2] / "docs" / "images" / "elastic.svg"
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


def picture(found: Found) -> str:
    """The SVG file of a run of the quickstart."""
    sizes = found["granularities"]
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
        middle, its = 385 + 160 * place, sizes[size]
        layers = found["layers"].get(size.partition("x")[0], ALL)
        drawn += [
            stack(middle - 55, 262, 110, layers),
            text(middle, 290, words, 15, GREY),
            text(middle, 330, f"{100 * its['fitted']['recall@10'] / whole:.0f}%", 30, DEEP, 700),
            text(middle, 358, f"{its['ms_per_query']:.1f} ms", 17, INK, 600),
        ]
    note = (
        f"Recall@10 kept and time of a query: all-MiniLM-L6-v2 after a fit without training, {found['test_pairs']} "
        f"held-out queries of Python's documentation, {found['machine'].split(',')[1].strip()}."
    )
    drawn.append(text(WIDTH / 2, HEIGHT - 26, note, 13, GREY))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, -apple-system, Segoe UI, Helvetica, Arial, sans-serif" role="img">'
        f"<title>{escape(note)}</title>" + "".join(drawn) + "</svg>\n"
    )


def main() -> None:
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(picture(results("quickstart")), encoding="utf-8")
    print(f"{FILE}")


if __name__ == "__main__":
    main()
