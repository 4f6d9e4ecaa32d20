"""A database for each test, and delivery without a process of its own."""

import shutil
from pathlib import Path

import pytest

from app.tracking.tracker import WriterProcess
from app.tracking.writer import claim
from tests.app.tracking.kit import tracker


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database that the writers of two runs found missing at the same moment."""
    folder = tmp_path_factory.mktemp("template")
    uri = f"sqlite:///{folder / 'deep' / 'mlflow.db'}"
    runs = [tracker(folder / f"spool-{number}", uri, run_uid=f"uid-{number}") for number in (8, 9)]
    for run in runs:
        run.metrics(0, {"loss": 1.0})
    deliveries = [run.finish("FINISHED", timeout=60) for run in runs]
    assert all(delivery.complete for delivery in deliveries), (runs[0].folder / "writer.log").read_text()
    return folder / "deep" / "mlflow.db"


@pytest.fixture
def uri(template: Path, tmp_path: Path) -> str:
    """Of a database of one's own, copied because MLflow takes more than a second to make one."""
    shutil.copyfile(template, tmp_path / "mlflow.db")
    return f"sqlite:///{tmp_path / 'mlflow.db'}"


@pytest.fixture
def inline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a tracker's writer would deliver is delivered by `finish`, in this process."""

    def deliver(self: WriterProcess, timeout: float) -> str:
        from app.tracking.uploader import PermanentError, TransientError, Uploader

        claim(self._folder, self._attempt)
        uploader = Uploader(self._folder, self._uri)
        try:
            assert not uploader.deliver()
        except (TransientError, PermanentError) as error:
            uploader.failed(str(error))
            return str(error)
        return ""

    monkeypatch.setattr(WriterProcess, "keep", lambda self: None)
    monkeypatch.setattr(WriterProcess, "wait", deliver)
