"""Pages of reports: self-contained, escaped, and no wider than a phone in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.errors import UserError
from experiments.report import figures, page
from experiments.report.runs import RunRecord, content, differences, distinct_names, report
from tests.running import POINTS, invoke, mlflow_run, mlflow_text, seed

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs; b is like a but for its name and its learning rate."""
    folder = tmp_path_factory.mktemp("runs")
    overrides = ["run.name=a", "optimizer.lr=0.01", "train.steps=30", "train.eval_every=10"]
    arguments = ["train", *POINTS, "launcher=local", f"run.storage={folder}", *overrides]
    seed(arguments)
    invoke(*arguments)
    shutil.copytree(folder / "a", folder / "b")
    changes = [("run.json", '"name": "a"', '"name": "b"'), ("config.yaml", "lr: 0.01", "lr: 0.02")]
    for file, old, new in changes:
        (folder / "b" / file).write_text((folder / "a" / file).read_text().replace(old, new))
    return folder


def test_a_page_shows_one_run_or_compares_two(runs: Path, tmp_path: Path) -> None:
    invoke("report", runs / "a")
    out, _ = report([str(runs / "a"), str(runs / "b")], str(tmp_path / "both.html"))
    first = (runs / "a" / "report.html").read_text()
    comparison = out.read_text()
    assert "accuracy" in first and "Where they differ" not in first
    assert "Where they differ" in comparison
    assert re.search(r"optimizer\.lr</td><td[^>]*>0\.01</td><td[^>]*>0\.02", comparison)
    for text in (first, comparison):
        assert text.count("<svg") >= 3
        assert not re.search(r"""(src|href)=["'](?!#)""", text)
        assert "<script" not in text, "the page loads nothing"
    assert mlflow_text(runs, mlflow_run(runs, "a").info.run_id, "", "report.html") == [first]


BAD = [
    ("other", "is not the folder of a run, sweep or study"),
    ("study", "has no answer yet"),
    ("damaged", "is damaged"),
    ("gone", "there is no folder"),
    ("damaged study", "report on it alone"),
]


@pytest.mark.parametrize(("names", "message"), BAD)
def test_a_folder_without_a_page_is_refused(names: str, message: str, tmp_path: Path) -> None:
    for file, text in {"other/text": "", "study/study.json": "{}", "damaged/run.json": "{"}.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(text)
    with pytest.raises(UserError, match=message):
        report([str(tmp_path / name) for name in names.split()], None)


def test_the_page_of_a_study_is_the_one_that_it_wrote(tmp_path: Path) -> None:
    (tmp_path / "study.json").write_text("{}")
    tables = [
        {"rows": [{"<n>": 2, "loss": 0.5}, {"<n>": 4, "loss": "–", "why": "<y>"}], "best": 1},
        {"rows": []},
    ]
    sections = [
        {
            "title": "A",
            "sentences": ["<z>"],
            "plots": [["<svg>a</svg>", "one"]],
            "tables": tables,
            "note": "noted",
        },
        {"title": "Nothing", "tables": [{"rows": []}], "note": "of nothing"},
        {"title": "More", "folded": {"t": "<w>"}},
    ]
    facts = [["x", "1", ""]]
    study = {"title": "<b>", "about": "a & b", "facts": facts, "sections": sections}
    page.write_page(tmp_path, study)
    out, note = report([str(tmp_path)], str(tmp_path / "copies" / "page.html"))
    text = out.read_text()
    assert text == (tmp_path / "report.html").read_text() and not note
    assert not re.search(r"<[bnyzw]>", text) and "<svg>a</svg>" in text
    assert "noted" in text and "Nothing" not in text and "of nothing" not in text
    cells = r"class=n [^>]*>2</td><td class=n [^>]*>0\.5</td><td [^>]*>–</td></tr>\s*"
    cells += r"<tr class=\"best\">"
    assert re.search(cells, text) and 'data-column="&lt;n&gt;"' in text


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no browser is installed")
@pytest.mark.parametrize("width", [390, 1200])
def test_nothing_is_wider_than_a_phone_or_a_desk(runs: Path, tmp_path: Path, width: int) -> None:
    probe = """<script>
    const tables = [...document.querySelectorAll(".scroll")];
    const cut = Math.max(...tables.map(table => table.scrollWidth - table.clientWidth));
    document.title = `W${document.documentElement.scrollWidth}of${innerWidth}cut${cut}`
    </script>"""
    copy = tmp_path / "page.html"
    text = page.render(content([_record("a" * 40, 0.01), _record("b" * 40, 0.02)]))
    copy.write_text(text.replace("</body>", probe + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [
        f"--user-data-dir={tmp_path / 'profile'}",
        f"--window-size={width},900",
        "--dump-dom",
        f"file://{copy}",
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    title = re.search(r"<title>W(\d+)of(\d+)cut(\d+)</title>", shown)
    assert title and int(title[1]) <= int(title[2]) and int(title[3]) == 0, shown[:500]


def _record(name: str, rate: float, *left_out: str) -> RunRecord:
    """A run of 90 steps with some metrics, without those that are left out."""
    curves = {
        metric: [(step, rate * step) for step in range(5, 95, 5)]
        for metric in (
            "train/loss",
            "train/grad_norm",
            "eval/loss",
            "system/cpu_utilization_percentage",
        )
        if metric not in left_out
    }
    summary = {"step": 90, "parameters": 1000, "trained_parameters": 10, "memory_bytes": 5}
    manifest = {"created": 0.0, "steps": 90, "starts": 1, "status": "finished", "summary": summary}
    config = {"task": "x", "workers": "2", "optimizer": {"lr": rate}, "data": f"/folder/{name}" * 3}
    return RunRecord(
        name=name, folder=Path("/runs") / name, manifest=manifest, config=config, curves=curves
    )


def test_a_run_has_one_colour_in_all_plots_also_where_others_lack_a_metric() -> None:
    records = [
        _record("one", 0.1, "eval/loss"),
        _record("two", 0.2, "train/grad_norm"),
        _record("three", 0.3),
    ]
    plots = next(
        section["plots"] for section in content(records)["sections"] if section["title"] == "Curves"
    )
    assert len(plots) == 4
    for drawing, caption in plots:
        metric = caption.partition(" ")[0]
        used = set(re.findall(r"stroke: var\(--series-(\d)", drawing))
        assert used == {str(i) for i, record in enumerate(records) if metric in record.curves}, (
            caption
        )


def test_a_page_is_dark_where_the_reader_wants_it() -> None:
    text = page.render(content([_record("one", 0.1), _record("two", 0.2)]))
    pattern = r":root \{(.*?)\}\n@media.*?prefers-color-scheme: dark\) \{ :root \{(.*?)\}"
    rules = re.search(pattern, text, re.S)
    assert rules is not None
    named = [dict(re.findall(r"--([\w-]+): (#\w+)", part)) for part in rules.groups()]
    used = set(re.findall(r"var\(--([\w-]+)", text))
    assert used <= set(named[0]) and set(named[0]) == set(named[1])
    assert all(named[0][name] != named[1][name] for name in used)
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.S))
    assert not re.search(r"(fill|stroke): ?#", drawings), (
        "every colour of a plot is one that changes"
    )


def test_a_heat_maps_text_stays_as_its_cells_are() -> None:
    cells = {(16.0, 0.1): 1.0, (32.0, 0.1): 9.0}
    drawing = figures.to_svg(
        figures.heat_map([16, 32], [0.1], cells, lower_is_better=True, unfinished=())
    )
    assert figures.CELL_INK in drawing and figures.CELL_PAPER in drawing


@pytest.mark.parametrize("last", [3, 9, 45, 90, 1000, 123456])
def test_there_is_no_tick_between_two_steps(last: int) -> None:
    figure = figures.line_plot(
        {"loss": [(step, 1.0) for step in (1, last // 2, last)]}, x="step", y="loss"
    )
    figure.canvas.draw()
    (axes,) = figure.axes
    ticks = [float(tick) for tick in axes.get_xticks()]
    assert len(ticks) > 1 and all(tick.is_integer() for tick in ticks)


def test_how_many_parameters_are_trained_is_on_the_page() -> None:
    facts = {label: remark for label, _, remark in content([_record("one", 0.1)])["facts"]}
    assert facts["parameters"].startswith("10 of them are trained")


def test_costs_and_stages_of_runs_are_tables(tmp_path: Path) -> None:
    def record(name: str, values: dict[str, float]) -> RunRecord:
        manifest = {"created": 0.0, "steps": 9, "starts": 1, "status": "finished", "summary": None}
        curves = {metric: [(5.0, value)] for metric, value in values.items()}
        config = {"task": "x", "workers": "2"}
        return RunRecord(
            name=name, folder=tmp_path, manifest=manifest, config=config, curves=curves
        )

    staged = record("staged", {"pipeline/stage_0/compute_seconds": 0.02, "pipeline/bubble": 0.12})
    paid = record("paid", {"cost/dollars": 12.5})
    text = re.sub(r"<[^>]+>", " ", page.render(content([paid, staged])))
    assert re.search(r"Cost\s+paid\s+staged\s+cost/dollars\s+12\.5\s+–", text)
    stages = r"paid\s+staged\s+pipeline/bubble\s+–\s+0\.12\s+pipeline/stage_0/compute_s"
    assert re.search(stages, text)
    plain = page.render(content([record("plain", {})]))
    assert "Cost" not in plain and "Stages" not in plain


def test_runs_with_one_name_are_told_apart_by_the_folders_above_them() -> None:
    folders = ["/a/first/runs/unet", "/a/second/runs/unet", "/a/second/runs/other"]
    names = distinct_names([Path(folder) for folder in folders])
    assert names == ["first/runs/unet", "second/runs/unet", "other"]
    assert distinct_names([Path("/a/unet"), Path("/a/unet")]) == ["unet", "unet"]


def test_values_in_which_runs_differ_are_written_as_in_a_file() -> None:
    configs = [{"train": {"eval_every": None, "compile": True}}, {"train": {"eval_every": 10}}]
    records = [
        RunRecord(name=name, folder=Path(name), manifest={}, config=config, curves={})
        for name, config in zip("ab", configs, strict=True)
    ]
    assert [row["a"] for row in differences(records)] == ["null", "true"]


def test_text_in_a_figure_is_legible_on_a_phone() -> None:
    """On a screen of 390 pixels, of which the page's margins take 36."""
    svg = figures.to_svg(figures.line_plot({"a": [(0, 1)], "b": [(1, 2)]}, x="step", y="loss"))
    cells = {(16.0, 0.1): 1.0, (32.0, 0.1): 9.0}
    heat_map = figures.heat_map([16, 32], [0.1], cells, lower_is_better=True, unfinished=())
    for element in (svg, figures.to_svg(heat_map)):
        view_box = re.search(r'viewBox="0 0 ([\d.]+) ', element)
        assert view_box is not None
        shrinks = (390 - 36) / float(view_box[1])
        sizes = [float(size) for size in re.findall(r"font(?:-size)?: ([\d.]+)px", element)]
        assert sizes and min(sizes) * shrinks >= 10
