"""One HTML file with everything in it: no script, no font, no picture from elsewhere; page.html is its template.

What is on a page is plain data:

    {"title", "about", "facts": [[what, value, remark]], "sections": [section]}
    section: {"title", "sentences": [text], "plots": [[SVG, caption]],
              "tables": [{"rows": [{column: value}], "best": the row that is marked}], "note": text,
              "folded": {title: text}}
"""

from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

PAGE = "report.html"


def write(folder: Path, content: dict[str, Any]) -> Path:
    """The page of what is in a folder, as its report.html."""
    (folder / PAGE).write_text(render(content))
    return folder / PAGE


def render(content: dict[str, Any]) -> str:
    """The whole document; of a section in which there is nothing, nothing."""
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(loader=folder, autoescape=True, trim_blocks=True, keep_trailing_newline=True)
    environment.filters |= {"number": number, "kind": _kind}
    sections = [
        {"folded": {}, **section, "tables": list(map(_table, (t for t in section.get("tables", ()) if t["rows"])))}
        for section in content["sections"]
    ]
    return environment.get_template("page.html").render({**content, "sections": sections})


def _table(table: dict[str, Any]) -> dict[str, Any]:
    """With its columns, and those that hold numbers."""
    rows = table["rows"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    numeric = {c for c in columns if all(isinstance(row.get(c, ""), int | float) or row.get(c) == "–" for row in rows)}
    return {**table, "columns": columns, "numeric": numeric}


def _kind(column: str, table: dict[str, Any], row: dict[str, Any] | None = None) -> str:
    """A cell's class: numbers are to the right, long texts are broken."""
    text = column if row is None else number(row.get(column, "–"))
    kind = "n" if column in table["numeric"] else "w" if len(text) > 30 else ""
    return Markup(f" class={kind}") if kind else ""


def number(value: object) -> str:
    """Numbers with the digits that matter."""
    if isinstance(value, bool) or not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
