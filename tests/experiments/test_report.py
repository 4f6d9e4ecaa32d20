"""Pages of reports: self-contained, escaped, and no wider than a phone in a real browser."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from app.errors import UserError
from experiments.report import page
from experiments.report.runs import RunRecord, content, report
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
    row = r"class=n>2</td><td class=n>0\.5</td><td>–</td></tr>\s*<tr class=\"best\">"
    assert re.search(row, text)


@pytest.mark.slow
@pytest.mark.skipif(not CHROMIUM, reason="no browser is installed")
def test_a_page_is_no_wider_than_a_phone(runs: Path, tmp_path: Path) -> None:
    widths_as_title = "document.title = `W${document.documentElement.scrollWidth}of${innerWidth}`"
    probe = f"<script>{widths_as_title}</script>"
    copy = tmp_path / "page.html"
    out, _ = report([str(runs / "a")], None)
    copy.write_text(out.read_text().replace("</body>", probe + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=390,900"]
    command += ["--dump-dom", f"file://{copy}"]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    widths = re.search(r"<title>W(\d+)of(\d+)</title>", dom)
    assert widths and int(widths[1]) <= int(widths[2]), dom[:500]


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
