"""What a run tells of where it ran, without MLflow: provenance and samples of the system."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.tracking import environment
from app.tracking.environment import Sample, SystemSampler, environment_text, provenance_tags
from tests.running import wait_until


def test_provenance_is_a_repositorys_and_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("1")
    for command in (
        "init -b trunk",
        "add .",
        "-c user.name=n -c user.email=e@example.org commit -m one",
        "remote add origin https://me:sesame@example.org/x.git",
    ):
        subprocess.run(["git", *command.split()], cwd=tmp_path, check=True, capture_output=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    tags = provenance_tags()
    assert len(tags["mlflow.source.git.commit"]) == 40 and tags["mlflow.source.git.branch"] == "trunk"
    assert tags["mlflow.source.git.dirty"] == "false"
    assert tags["mlflow.source.git.repoURL"] == "https://***@example.org/x.git"
    assert tags["trireme.slurm_job_id"] == "17"
    assert tags["trireme.version.torch"].startswith("2.") and tags["mlflow.user"]
    assert f"torch=={tags['trireme.version.torch']}" in environment_text().splitlines()
    (tmp_path / "a.py").write_text("2")
    assert provenance_tags()["mlflow.source.git.dirty"] == "true"
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("getpass.getuser", lambda: 1 / 0)
    tags = provenance_tags()
    assert "mlflow.source.git.commit" not in tags and "mlflow.user" not in tags and tags["trireme.python"]


def test_a_gpu_tells_what_it_can(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = SimpleNamespace(
        NVMLError=LookupError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetMemoryInfo=lambda handle: SimpleNamespace(used=20e9, total=80e9),
        nvmlDeviceGetUtilizationRates=lambda handle: SimpleNamespace(gpu=91 + handle),
        nvmlDeviceGetPowerUsage=lambda handle: {}["no power"],
        nvmlDeviceGetEnforcedPowerLimit=lambda handle: 700_000,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = {key[6:]: value for key, value in Sample().take().items() if key.startswith("gpu_1_")}
    memory = {"memory_usage_percentage": 25.0, "memory_usage_megabytes": 20_000.0}
    assert found == memory | {"utilization_percentage": 92}


def test_a_sampler_tells_of_the_machine_and_of_gpus_whose_metrics_cannot_be_seen_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "GPU_DEVICES", str(tmp_path / Path(environment.GPU_DEVICES).name))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    (tmp_path / "nvidiactl").touch()
    assert not Sample().blind, "there is no GPU"
    for number in range(2):
        (tmp_path / f"nvidia{number}").touch()
    emitted: list[dict[str, Any]] = []
    sampler = SystemSampler(emitted.append, "node-3", 0.01)
    wait_until(lambda: len(emitted) > 1)
    sampler.close()
    assert not sampler._thread.is_alive()
    warning, sample, *_ = emitted
    assert warning["type"] == "warning"
    assert warning["text"].startswith("node-3 has 2 GPUs whose metrics cannot be recorded (")
    assert warning["text"].endswith("pynvml halted; None in sys.modules): `pip install nvidia-ml-py` there")
    assert sample["type"] == "system" and sample["event"]["type"] == "metrics" and sample["event"]["step"] is None
    assert sample["event"]["values"]["system/node-3/cpu_utilization_percentage"] >= 0
    idle = SystemSampler(emitted.append, "n", 0.0)
    assert not idle._thread.is_alive()
    idle.close()
