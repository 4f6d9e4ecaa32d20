"""What a run's folder holds of its configuration."""

from __future__ import annotations

from pathlib import Path

from app.config import Config, RunConfig, TrackingConfig
from app.run.manifest import Run


def test_a_secret_of_the_configuration_stays_out_of_the_runs_folder(tmp_path: Path) -> None:
    def start(token: str) -> Run:
        args = {"hf_token": token, "pad_token": "<pad>", "nested": {"api_key": token}, "label_key": "y"}
        tracking = TrackingConfig(uri=f"https://me:{token}@host/x")
        run = RunConfig(name="kept", storage=str(tmp_path))
        return Run(Config(task="language_modelling", task_args=args, tracking=tracking, run=run))

    run = start("planted-1")
    run.open(run.config, 5)
    run.end("stopped")
    written = {file.name: file.read_text() for file in (tmp_path / "kept").rglob("*") if file.is_file()}
    assert set(written) == {"run.json", "config.yaml"}
    assert not [name for name, text in written.items() if "planted" in text], written
    assert "pad_token: <pad>" in written["config.yaml"] and "label_key: y" in written["config.yaml"]
    assert start("planted-2").manifest.uid == run.manifest.uid, "the same run, also with a newer token"
