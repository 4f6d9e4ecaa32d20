"""Exports: what others read equals what was saved; as safetensors, a large model is never whole in memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from app import checkpoint
from app.checkpoint import Checkpointer, Commit
from app.checkpoint.export import export
from app.errors import UserError
from tests.running import ROOT

TYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"typed.{str(t).removeprefix('torch.')}": (torch.randn(3, 5) * 9).to(t) for t in TYPES}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "turned": torch.randn(4, 6).t()}
    return tensors | {f"blocks.{i}.w": torch.randn(10, 10) for i in range(4)}


def saved(folder: Path, tensors: dict[str, torch.Tensor]) -> Commit:
    checkpointer = Checkpointer(str(folder))
    state = {"model": tensors, "optimizer": {"state": {n: {"exp_avg": t.clone()} for n, t in tensors.items()}}}
    checkpointer.save(state, meta={"step": 1})
    checkpointer.close()
    return checkpoint.commits(str(folder))[0]


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return set(got) == set(expected) and all(
        torch.equal(got[n], t) and got[n].dtype == t.dtype for n, t in expected.items()
    )


def test_safetensors_in_one_file(tmp_path: Path) -> None:
    paths = export(saved(tmp_path / "c", model()), to="safetensors", out=tmp_path / "out")
    assert paths == [tmp_path / "out" / "model.safetensors"] == list((tmp_path / "out").iterdir())
    assert same(load_file(paths[0]), model())
    with safe_open(paths[0], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_safetensors_in_shards_with_an_index(tmp_path: Path) -> None:
    paths = export(saved(tmp_path / "c", model()), to="safetensors", out=tmp_path, max_file_bytes=900)
    *shards, index = paths
    count = len(shards)
    assert count > 2 and [p.name for p in shards] == [
        f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)
    ]
    table: dict[str, Any] = json.loads(index.read_text())
    assert index.name == "model.safetensors.index.json"
    assert table["metadata"] == {"total_size": sum(t.nbytes for t in model().values())}
    got = {name: load_file(tmp_path / file)[name] for name, file in table["weight_map"].items()}
    assert same(got, model())
    assert all(sum(t.nbytes for t in load_file(p).values()) <= 900 for p in shards)


def test_torch_file(tmp_path: Path) -> None:
    tensors = {**model(), "complex": torch.randn(3, dtype=torch.complex64)}
    (path,) = export(saved(tmp_path / "c", tensors), to="torch", out=tmp_path)
    assert same(torch.load(path, weights_only=True), tensors)


def test_refusals(tmp_path: Path) -> None:
    commit = saved(tmp_path / "c", {"z": torch.randn(3, dtype=torch.complex64)})
    with pytest.raises(UserError, match="z is of type complex64, which safetensors cannot hold: export to torch"):
        export(commit, to="safetensors", out=tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UserError, match="to 'onnx': use safetensors or torch"):
        export(commit, to="onnx", out=tmp_path / "out")  # type: ignore[arg-type]
    Path(commit.path, "__0_0.distcp").write_bytes(b"")
    with pytest.raises(UserError, match=r"the checkpoint is damaged: .*__0_0\.distcp has 0 bytes"):
        export(commit, to="torch", out=tmp_path / "out")
    checkpointer = Checkpointer(str(tmp_path / "d"))
    checkpointer.save({"optimizer": {"w": torch.ones(1)}}, meta={"step": 1})
    checkpointer.close()
    with pytest.raises(UserError, match="holds no model"):
        export(checkpoint.commits(str(tmp_path / "d"))[0], to="torch", out=tmp_path / "out")


PEAK = """
import re, sys
from pathlib import Path
from app import checkpoint
from app.checkpoint.export import export
small, large = (checkpoint.commits(folder)[0] for folder in sys.argv[1:3])
def peak():  # not getrusage's: that one remembers the parent's at the fork
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) / 1024
export(small, to="safetensors", out=Path(sys.argv[3], "small"))
before = peak()
export(large, to="safetensors", out=Path(sys.argv[3]))
print(peak() - before)
"""


def test_memory_stays_small(tmp_path: Path) -> None:
    """250 MB in tensors of 10 MB. Seen: 20 to 85 MiB more, for 100 MB as for 400."""
    saved(tmp_path / "small", {"w": torch.ones(4)})
    large = {f"blocks.{i}.w": torch.full((2_500, 1_000), float(i)) for i in range(25)}
    checkpointer = Checkpointer(str(tmp_path / "large"))
    checkpointer.save({"model": large}, meta={"step": 1})
    checkpointer.close()
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *(str(tmp_path / name) for name in ("small", "large", "out"))],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert 0 < float(done.stdout) < 125, f"took {done.stdout} MiB"
    got = load_file(tmp_path / "out" / "model.safetensors")
    assert all(got[n][0, 0] == t[0, 0] for n, t in large.items())
