"""Exports: what others read equals what was saved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from app import checkpoint
from app.checkpoint import export
from app.errors import UserError
from tests.app.checkpoint.kit import save

TYPES = ["float64", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"typed.{name}": (torch.randn(3, 5) * 9).to(getattr(torch, name)) for name in TYPES}
    tensors |= {"empty": torch.empty(0, 4), "scalar": torch.tensor(2.5), "turned": torch.randn(4, 6).t()}
    return tensors | {f"blocks.{i}.w": torch.randn(10, 10) for i in range(4)}


def same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return set(got) == set(expected) and all(
        torch.equal(got[n].view(torch.uint8), t.contiguous().view(torch.uint8)) and got[n].dtype == t.dtype
        for n, t in expected.items()
        if t.ndim
    )


def test_what_is_exported_is_what_was_saved(tmp_path: Path) -> None:
    """As one file, as shards with an index, and as a torch file; the optimizer's tensors are not in it."""
    save(tmp_path / "c", 1, state={"model": model(), "optimizer": {"exp_avg": torch.ones(3)}})
    commit = checkpoint.find(str(tmp_path / "c"))
    (whole,) = export(commit, to="safetensors", out=tmp_path / "one")
    assert [whole] == list((tmp_path / "one").iterdir()) and whole.name == "model.safetensors"
    assert same(load_file(whole), model())
    with safe_open(whole, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    *shards, index = export(commit, to="safetensors", out=tmp_path, max_file_bytes=900, leave_out=["scalar"])
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 2 and [path.name for path in shards] == names
    table, wanted = json.loads(index.read_text()), {n: t for n, t in model().items() if n != "scalar"}
    assert index.name == "model.safetensors.index.json"
    assert table["metadata"] == {"total_size": sum(t.nbytes for t in wanted.values())}
    assert same({name: load_file(tmp_path / file)[name] for name, file in table["weight_map"].items()}, wanted)
    assert all(sum(t.nbytes for t in load_file(path).values()) <= 900 for path in shards)
    (path,) = export(commit, to="torch", out=tmp_path)
    assert same(torch.load(path, weights_only=True), model())


def test_a_checkpoint_without_a_model(tmp_path: Path) -> None:
    """A damaged one: test_checkpoint_damage.py."""
    save(tmp_path / "c", 1, state={"optimizer": {"w": torch.ones(1)}})
    with pytest.raises(UserError, match="holds no model"):
        export(checkpoint.find(str(tmp_path / "c")), to="torch", out=tmp_path / "out")
