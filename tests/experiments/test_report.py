"""Pages: self-contained, escaped, and the same in a real browser on a desk and on a phone."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from app.errors import UserError
from experiments.report import build, figures, page, run_page
from experiments.report.runs import RunRecord
from tests.running import POINTS, mlflow_run, trireme

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or ""


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for name, rate in (("a", "0.01"), ("b<i>", "0.02")):
        more = [f"run.name={name[0]}", f"optimizer.lr={rate}", "train.steps=60", "train.eval_every=20"]
        ended = trireme("train", *POINTS, "launcher=local", f"run.storage={folder}", *more)
        assert ended.code == 0, ended.err
    return folder


def test_a_run_and_two_runs(runs: Path, tmp_path: Path) -> None:
    out = tmp_path / "both.html"
    one = trireme("report", str(runs / "a"))
    two = trireme("report", str(runs / "a"), str(runs / "b"), "--out", str(out))
    assert one.code == two.code == 0, one.err + two.err
    first, both = (runs / "a" / "report.html").read_text(), out.read_text()
    assert "accuracy" in first and "Where they differ" not in first
    assert "Where they differ" in both and re.search(r"optimizer\.lr</td><td[^>]*>0\.01</td><td[^>]*>0\.02", both)
    for text in (first, both):
        assert text.count("<svg") >= 3
        assert not re.search(r"""(src|href)=["'](?!#)""", text), "nothing is loaded from elsewhere"
        assert "<script" not in text
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{runs}/mlflow.db")
    names = {artifact.path for artifact in client.list_artifacts(mlflow_run(runs, "a").info.run_id)}
    assert "report.html" in names


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    ended = trireme("report", str(tmp_path))
    assert ended.code == 2 and "holds no run, sweep or study" in ended.err
    damaged = {
        "a": ("study.json", "{", "study.json is damaged"),
        "b": ("study.json", "{}", "says nothing of name"),
        "c": ("study.json", '{"name": "c", "created": 0, "about": {}, "points": []}', "has measured nothing yet"),
        "d": ("sweep.json", "{}", "has no answer yet"),
        "e": ("run.json", "{", "is damaged"),
    }
    for name, (file, text, said) in damaged.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
        (tmp_path / name / "config.yaml").write_text("{}")
        with pytest.raises(UserError, match=said):
            build.report([str(tmp_path / name)], None)
    with pytest.raises(UserError, match="there is no folder"):
        build.report([str(tmp_path / "gone")], None)


def test_everything_is_escaped_and_figures_are_xml() -> None:
    text = page.page("<b>", "a & b", [page.table(["<x>"], [["<y>"]]), page.sentences(["<z>"]), page.folded("t", "<w>")])
    assert not re.search(r"<[bxyzw]>", text)
    drawn = figures.svg(figures.lines({"a<b": [(0, 1.0), (1, 2.0)], "c": [(0, 1.0)]}, x="x & y", y="y"))
    ElementTree.fromstring(drawn)
    values = {(1, 0.1): 1.0, (2, 0.1): 0.5, (2, 0.2): float("inf")}
    ElementTree.fromstring(figures.svg(figures.heat_map([1, 2], [0.1, 0.2], values, x="b", y="r", best_low=True)))


@pytest.mark.skipif(not CHROMIUM, reason="no browser is installed")
@pytest.mark.parametrize("width", [1200, 390])
def test_nothing_is_wider_than_the_window_in_a_browser(runs: Path, tmp_path: Path, width: int) -> None:
    if not (runs / "a" / "report.html").exists():
        assert trireme("report", str(runs / "a")).code == 0
    probe = "<script>document.title = `W${document.documentElement.scrollWidth}of${innerWidth}`</script>"
    copy = tmp_path / "page.html"
    copy.write_text((runs / "a" / "report.html").read_text().replace("</body>", probe + "</body>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},900", "--dump-dom", f"file://{copy}"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"<title>W(\d+)of(\d+)</title>", shown)
    assert found, shown[:500]
    assert int(found[1]) <= int(found[2])


def test_what_runs_cost_is_a_table(tmp_path: Path) -> None:
    manifest = {"created": 0.0, "steps": 9, "starts": 1, "status": "finished", "summary": {"seconds": 1800.0}}
    paid = RunRecord("paid", tmp_path, manifest, {"task": "x", "workers": "4"})
    paid.cost = {"total": 12.5, "start": 0.25, "restarts": 0.0, "idle": 1.0}
    free, unknown = (RunRecord(name, tmp_path, manifest, {"task": "x", "workers": "2"}) for name in ("free", "old"))
    unknown.manifest = {**manifest, "summary": None}
    found = re.sub(r"<[^>]+>", " ", run_page._cost([paid, free, unknown]))
    assert re.search(r"paid\s+2\s+12\.5\s+0\.25\s+0\s+1\s+free\s+1\s+–", found) and "old" not in found, found
    assert "dollars" not in run_page._cost([free]) and run_page._cost([unknown]) == ""


def test_the_stages_of_a_pipeline_are_a_table(tmp_path: Path) -> None:
    manifest = {"created": 0.0, "steps": 9, "starts": 1, "status": "finished"}
    seconds = {"compute": 0.02, "wait": 0.003, "handover": 0.0001, "reduce": 0.0}
    values = {f"pipeline/stage_{stage}/{what}_seconds": n for stage in (0, 1) for what, n in seconds.items()}
    values |= {"pipeline/bubble": 0.12, "pipeline/bubble_by_formula": 1 / 9, "pipeline/bubble_by_simulation": 0.115}
    curves = {name: [(5.0, value)] for name, value in values.items()}
    record = RunRecord("staged", tmp_path, manifest, {"task": "x", "workers": "2"}, curves)
    found = re.sub(r"<[^>]+>", " ", "".join(run_page._stages([record])))
    assert re.search(r"staged\s+1\s+20\.00\s+3\.00\s+0\.10\s+0\.00", found), found
    assert re.search(r"measured\s+formula\s+simulated\s+staged\s+12\.0%\s+11\.1%\s+11\.5%", found), found
    assert run_page._stages([RunRecord("plain", tmp_path, manifest, {})]) == []
