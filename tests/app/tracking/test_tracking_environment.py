"""What a run tells of where it ran, without MLflow: provenance and samples of the system."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.tracking import environment
from app.tracking.environment import Sample, SystemSampler, environment_text, provenance_tags
from tests.running import wait_until

# --- provenance ---------------------------------------------------------------------------------------------------


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=n", "-c", "user.email=e@example.org"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_provenance_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git(tmp_path, "init", "-b", "trunk")
    (tmp_path / "a.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-m", "one")
    git(tmp_path, "remote", "add", "origin", "https://me:sesame@example.org/x.git")
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


def test_provenance_never_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr("getpass.getuser", lambda: 1 / 0)
    tags = provenance_tags()
    assert "mlflow.source.git.commit" not in tags and "mlflow.user" not in tags and tags["trireme.python"]


# --- system metrics -----------------------------------------------------------------------------------------------


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
    gpus = {key: value for key, value in Sample().take().items() if key.startswith("gpu_1")}
    assert gpus == {
        "gpu_1_memory_usage_percentage": 25.0,
        "gpu_1_memory_usage_megabytes": 20_000.0,
        "gpu_1_utilization_percentage": 92,
    }


@pytest.mark.parametrize(("gpus", "said"), [(0, []), (2, ["node-3 has 2 GPUs whose metrics cannot be recorded ("])])
def test_gpus_whose_metrics_cannot_be_seen_are_told(
    gpus: int, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(gpus):
        (tmp_path / f"nvidia{number}").touch()
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(environment, "GPU_DEVICES", str(tmp_path / Path(environment.GPU_DEVICES).name))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    emitted: list[dict] = []
    sampler = SystemSampler(emitted.append, "node-3", 0.01)
    wait_until(lambda: len(emitted) > gpus)
    sampler.close()
    warnings = [event["text"] for event in emitted if event["type"] == "warning"]
    assert len(warnings) == len(said) and all(text.startswith(start) for text, start in zip(warnings, said))
    assert all(
        text.endswith("pynvml halted; None in sys.modules): `pip install nvidia-ml-py` there") for text in warnings
    )


def test_a_sampler_emits_and_stops() -> None:
    emitted: list[dict] = []
    sampler = SystemSampler(emitted.append, "node-3", 0.01)
    wait_until(lambda: emitted)
    sampler.close()
    assert not sampler._thread.is_alive() and emitted[0]["type"] == "system"
    assert emitted[0]["event"]["type"] == "metrics" and emitted[0]["event"]["step"] is None
    assert emitted[0]["event"]["values"]["system/node-3/cpu_utilization_percentage"] >= 0
    count = len(emitted)
    SystemSampler(emitted.append, "n", 0.0).close()
    assert len(emitted) == count
