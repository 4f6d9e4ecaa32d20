"""Pictures of a schedule, and what a profiled step tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.errors import UserError
from app.schedule_picture import draw
from strategies.pipeline.schedules import make
from strategies.pipeline.simulate import Span, Times, bubble, chrome_trace, figures, simulate


def test_the_pictures_of_a_schedule(tmp_path: Path) -> None:
    spans = simulate(make("1f1b", 2, 4), Times(1.0, 1.0, 1.0))
    for ending, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        draw(spans, tmp_path / f"x{ending}", "1f1b")
        assert (tmp_path / f"x{ending}").read_bytes().startswith(magic)
    with pytest.raises(UserError, match=r"write \.png"):
        draw(spans, tmp_path / "x.xyz")
    with pytest.raises(UserError, match="nothing to draw"):
        draw([Span(0, "SEND", 0, 0, 0.0, 1.0)], tmp_path / "x.png")


@pytest.mark.parametrize(("name", "chunks"), [("1f1b", 1), ("interleaved_1f1b", 2), ("zb_h1", 1), ("zbv", 2)])
def test_a_step_that_ran_as_simulated_has_the_simulated_bubble(name: str, chunks: int) -> None:
    spans = simulate(make(name, 2, 8, chunks), Times(0.01, 0.01, 0.01))
    ranks = [[span for span in spans if span.stage == stage] for stage in (0, 1)]
    found = figures(ranks, name, chunks)
    assert abs(found["pipeline/bubble"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/bubble_by_simulation"] - bubble(spans)) < 1e-9
    assert abs(found["pipeline/stage_1/compute_seconds"] - 8 * chunks * 0.03) < 1e-9
    trace = json.loads(json.dumps(chrome_trace(spans)))["traceEvents"]
    assert sum(event["ph"] == "X" for event in trace) == len(spans)
