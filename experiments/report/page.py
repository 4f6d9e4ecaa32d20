"""One self-contained HTML file: no script, and no font or picture from elsewhere.

page.html is its template. What is on a page is plain data, see `PageContent`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import jinja2
from markupsafe import Markup

from experiments.report import figures

PAGE = "report.html"
MISSING = "–"
"""What a cell without a value shows."""
LONG_TEXT = 30
"""Characters from which on the text of a cell is broken into lines."""


class Table(TypedDict):
    """A table.

    Attributes:
        rows: Values by column; rows may have different columns.
        best: The index of the row that is marked.
    """

    rows: Sequence[Mapping[str, object]]
    best: NotRequired[int]


class Section(TypedDict):
    """A section; one without sentences, plots, filled tables and folded texts is left out.

    Attributes:
        title: Its heading.
        sentences: Sentences, one a line.
        plots: SVG and caption of each plot.
        tables: Its tables; empty ones are left out.
        note: A sentence below everything else.
        folded: Long texts by title, which the reader may unfold.
    """

    title: str
    sentences: NotRequired[Sequence[str]]
    plots: NotRequired[Sequence[tuple[str, str]]]
    tables: NotRequired[Sequence[Table]]
    note: NotRequired[str]
    folded: NotRequired[Mapping[str, str]]


class PageContent(TypedDict):
    """What is on a page.

    Attributes:
        title: Its heading.
        about: A line below it.
        facts: The most important facts: a label, a value and a remark each.
        sections: Everything else.
    """

    title: str
    about: str
    facts: Sequence[tuple[str, str, str]]
    sections: Sequence[Section]


def write_page(folder: Path, content: PageContent) -> Path:
    """Writes a page into a folder, as report.html.

    Returns:
        The path of the page.
    """
    page = folder / PAGE
    page.write_text(render(content))
    return page


def render(content: Mapping[str, Any]) -> str:
    """The HTML document of a page.

    Args:
        content: A `PageContent`.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["number"] = format_number
    environment.filters["kind"] = _cell_class
    variables = figures.colour_variables()
    light = {name: colours[0] for name, colours in variables.items()}
    dark = {name: colours[1] for name, colours in variables.items()}
    sections = []
    for section in content["sections"]:
        tables = [_with_columns(table) for table in section.get("tables", ()) if table["rows"]]
        sections.append({"folded": {}, **section, "tables": tables})
    return environment.get_template("page.html").render(
        {**content, "sections": sections, "light": light, "dark": dark}
    )


def _with_columns(table: Table) -> dict[str, Any]:
    """A table with its columns, and those of them that hold numbers."""
    rows = table["rows"]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    numeric = {column for column in columns if _is_numeric(column, rows)}
    return {**table, "columns": columns, "numeric": numeric}


def _is_numeric(column: str, rows: Sequence[Mapping[str, object]]) -> bool:
    """Whether every row has a number in a column, or shows that it has no value."""
    for row in rows:
        value = row.get(column, MISSING)
        if not isinstance(value, int | float) and value != MISSING:
            return False
    return True


def _cell_class(
    column: str,
    table: dict[str, Any],
    row: Mapping[str, object] | None = None,
) -> str:
    """The HTML class of a cell: numbers are aligned to the right, long texts are broken into lines.

    Args:
        column: The cell's column.
        table: Its table.
        row: Its row; None for the heading of the column.
    """
    text = column if row is None else format_number(row.get(column, MISSING))
    if column in table["numeric"]:
        return Markup(" class=n")
    if len(text) > LONG_TEXT:
        return Markup(" class=w")
    return ""


def format_number(value: object) -> str:
    """A number with the digits that matter; anything else as its text."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
