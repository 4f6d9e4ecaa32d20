"""One HTML file with everything in it: no script, no font, no picture from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #55606e; --line: #d9dee5; --wash: #f5f7f9; --mark: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1.25rem 4rem; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 46rem; }
.about { color: var(--soft); margin-top: 0; overflow-wrap: anywhere; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; margin: 1.25rem 0 0;
  padding: 0; }
.facts div { background: var(--wash); border-radius: .4rem; padding: .6rem .8rem; }
.facts dt { color: var(--soft); font-size: .82rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; overflow-wrap: anywhere; }
.facts dd small { display: block; font-size: .8rem; font-weight: 400; color: var(--soft); }
ul.plain { list-style: none; padding: 0; margin: .75rem 0 0; max-width: 50rem; }
ul.plain li { padding: .2rem 0 .2rem .8rem; border-left: 3px solid var(--mark); margin: .35rem 0; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 0; break-inside: avoid; }
figcaption { color: var(--soft); font-size: .88rem; margin-top: .25rem; }
svg.plot { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; white-space: nowrap; }
td { white-space: nowrap; }
td.n, th.n { text-align: right; }
td.w { white-space: normal; min-width: 14rem; }
tr.best td { font-weight: 600; background: #fdf3ea; }
details { margin-top: .75rem; } summary { cursor: pointer; color: var(--mark); }
pre { background: var(--wash); padding: .8rem; overflow-x: auto; font-size: .82rem; border-radius: .4rem; }
@media (max-width: 34rem) { body { padding: 1rem .9rem 3rem; } h1 { font-size: 1.35rem; } }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } h2 { break-after: avoid; }
  .scroll { overflow: visible; }
  .plots { grid-template-columns: 1fr 1fr; } tr { break-inside: avoid; } details { display: none; }
  td { white-space: normal; } }
"""


def page(title: str, about: str, body: Iterable[str]) -> str:
    """A whole document."""
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n"
        f'<p class="about">{escape(about)}</p>\n' + "\n".join(body) + "\n</body>\n</html>\n"
    )


def escape(text: object) -> str:
    return html.escape(str(text))


def section(title: str, *parts: str) -> str:
    """Nothing where there is nothing to say."""
    inside = "\n".join(part for part in parts if part)
    return f"<section>\n<h2>{escape(title)}</h2>\n{inside}\n</section>" if inside else ""


def facts(items: Sequence[tuple[str, str, str]]) -> str:
    """The figures at the top: (what, value, remark)."""
    cells = [
        f"<div><dt>{escape(what)}</dt><dd>{escape(value)}{f'<small>{escape(note)}</small>' if note else ''}</dd></div>"
        for what, value, note in items
    ]
    return f'<dl class="facts">{"".join(cells)}</dl>'


def sentences(lines: Sequence[str]) -> str:
    return f'<ul class="plain">{"".join(f"<li>{escape(line)}</li>" for line in lines)}</ul>' if lines else ""


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>" if text else ""


def plots(pairs: Sequence[tuple[str, str]]) -> str:
    """(svg, caption) side by side where there is room."""
    cells = [f"<figure>{svg}<figcaption>{escape(caption)}</figcaption></figure>" for svg, caption in pairs if svg]
    return f'<div class="plots">{"".join(cells)}</div>' if cells else ""


def table(head: Sequence[str], rows: Sequence[Sequence[object]], *, best: int | None = None) -> str:
    """Numbers to the right. best: the row that is marked."""
    if not rows:
        return ""
    numeric = [all(isinstance(row[i], int | float) or row[i] in ("", "–") for row in rows) for i in range(len(head))]

    def cell(tag: str, value: object, i: int) -> str:
        text = number(value)
        kind = "n" if numeric[i] else "w" if len(text) > 30 else ""
        return f"<{tag}{f' class={kind}' if kind else ''}>{escape(text)}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", name, i) for i, name in enumerate(head)) + "</tr>"]
    for j, row in enumerate(rows):
        mark = ' class="best"' if j == best else ""
        lines.append(f"<tr{mark}>" + "".join(cell("td", value, i) for i, value in enumerate(row)) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def number(value: object) -> str:
    """Numbers with the digits that matter."""
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"


def folded(title: str, text: str) -> str:
    return f"<details><summary>{escape(title)}</summary><pre>{escape(text)}</pre></details>"
