"""One HTML file with everything in it: no script, no font, no picture from elsewhere.

What is on a page is plain data:

    {"title", "about", "facts": [[what, value, remark]], "sections": [section]}
    section: {"title", "sentences": [text], "plots": [[SVG, caption]],
              "tables": [{"rows": [{column: value}], "best": the row that is marked}], "note": text,
              "folded": {title: text}}
"""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light; --ink: #1d2733; --soft: #55606e; --line: #d9dee5; --wash: #f5f7f9; --mark: #2563a8; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem 1.1rem 4rem; color: var(--ink); background: #fff;
  font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .6rem; padding-top: .6rem; border-top: 1px solid var(--line); }
p { margin: .4rem 0; max-width: 46rem; }
.about, figcaption, dt, small { color: var(--soft); font-size: .88rem; overflow-wrap: anywhere; }
.facts, .plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .75rem; }
.facts div { background: var(--wash); border-radius: .4rem; padding: .6rem .8rem; }
.facts dd { margin: 0; font-size: 1.25rem; font-weight: 600; overflow-wrap: anywhere; }
.facts small { display: block; font-weight: 400; }
ul { list-style: none; padding: 0; max-width: 50rem; }
li { padding: .2rem 0 .2rem .8rem; border-left: 3px solid var(--mark); margin: .35rem 0; }
.plots { grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1.5rem; }
figure { margin: 0; break-inside: avoid; }
svg.plot { width: 100%; height: auto; display: block; }
.scroll, pre { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { color: var(--soft); }
td.n, th.n { text-align: right; }
td.w { white-space: normal; min-width: 14rem; }
tr.best td { font-weight: 600; background: #fdf3ea; }
summary { cursor: pointer; color: var(--mark); }
pre { background: var(--wash); padding: .8rem; font-size: .82rem; }
@media print { body { max-width: none; padding: 0; font-size: 11pt; } .scroll { overflow: visible; }
  .plots { grid-template-columns: 1fr 1fr; } tr { break-inside: avoid; } details { display: none; }
  td { white-space: normal; } }
"""


PAGE = "report.html"


def write(folder: Path, content: dict[str, Any]) -> Path:
    """The page of what is in a folder, as its report.html."""
    (folder / PAGE).write_text(render(content))
    return folder / PAGE


def render(content: dict[str, Any]) -> str:
    """The whole document."""
    title = html.escape(content["title"])
    facts = [
        f"<div><dt>{html.escape(what)}</dt><dd>{html.escape(value)}<small>{html.escape(remark)}</small></dd></div>"
        for what, value, remark in content.get("facts", ())
    ]
    body = [f'<dl class="facts">{"".join(facts)}</dl>' if facts else ""]
    body += [_section(section) for section in content["sections"]]
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{title}</title>\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<style>{STYLE}</style>\n</head>\n<body>\n<h1>{title}</h1>\n"
        f'<p class="about">{html.escape(content["about"])}</p>\n' + "\n".join(body) + "\n</body>\n</html>\n"
    )


def _section(section: dict[str, Any]) -> str:
    """Nothing where there is nothing to say."""
    lines = "".join(f"<li>{html.escape(line)}</li>" for line in section.get("sentences", ()))
    plots = "".join(
        f"<figure>{plot}<figcaption>{html.escape(caption)}</figcaption></figure>"
        for plot, caption in section.get("plots", ())
    )
    parts = [f"<ul>{lines}</ul>" if lines else "", f'<div class="plots">{plots}</div>' if plots else ""]
    parts += [_table(**table) for table in section.get("tables", ())]
    for name, text in section.get("folded", {}).items():
        parts.append(f"<details><summary>{html.escape(name)}</summary><pre>{html.escape(text)}</pre></details>")
    inside = "\n".join(part for part in parts if part)
    note = f"<p>{html.escape(section['note'])}</p>" if section.get("note") else ""
    return f"<section>\n<h2>{html.escape(section['title'])}</h2>\n{inside}{note}\n</section>" if inside else ""


def _table(rows: list[dict[str, Any]], best: int | None = None) -> str:
    """Numbers to the right."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    if not columns:
        return ""
    numeric = {c for c in columns if all(isinstance(row.get(c, ""), int | float) or row.get(c) == "–" for row in rows)}

    def cell(tag: str, value: object, column: str) -> str:
        text = number(value)
        kind = "n" if column in numeric else "w" if len(text) > 30 else ""
        return f"<{tag}{f' class={kind}' if kind else ''}>{html.escape(text)}</{tag}>"

    lines = ["<tr>" + "".join(cell("th", column, column) for column in columns) + "</tr>"]
    for j, row in enumerate(rows):
        mark = ' class="best"' if j == best else ""
        lines.append(f"<tr{mark}>" + "".join(cell("td", row.get(c, "–"), c) for c in columns) + "</tr>")
    return f'<div class="scroll"><table>{"".join(lines)}</table></div>'


def number(value: object) -> str:
    """Numbers with the digits that matter."""
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
