"""Checkpoints on one process: what is saved, what is kept, what is refused, what is exported."""

import json
import math
import threading
import uuid
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from app import checkpoint
from app.checkpoint import Checkpointer, CheckpointError, Commit, commit, export
from app.checkpoint.dcp import Writer
from app.errors import RunFailed, UserError
from app.storage import Storage
from tests.app.checkpoint.kit import plain, save, state_of, steps


@pytest.fixture(params=["local", "s3"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    place = tmp_path if request.param == "local" else request.getfixturevalue("bucket")
    return f"{place}/{uuid.uuid4().hex}"


def test_save_and_load(folder: str) -> None:
    checkpointer = Checkpointer(folder, attempt="a/1")
    meta = {"step": 3, "samples_seen": 96, "layout": {"tp": 1}}
    checkpointer.save(state_of(3.0), meta=meta, metric=0.5)
    checkpointer.close()
    (found,) = checkpoint.commits(folder)
    assert (found.step, found.meta, found.metric, found.attempt) == (3, meta, 0.5, "a/1")
    assert checkpointer.last_total_seconds > 0
    assert set(found.files) == {".metadata", "__0_0.distcp"}
    assert sorted(Storage(found.path).list()) == sorted([*found.files, "COMMIT.json"])
    assert checkpoint.latest_good(folder) == (found, [])
    into = state_of(0.0)
    tensor = into["model"]["b"]
    checkpoint.load(found, into)
    assert into["model"]["b"] is tensor, "tensors are filled in place"
    assert json.dumps(plain(into)) == json.dumps(plain(state_of(3.0)))


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", lambda self, *args: go.wait(30) and write(self, *args))
    checkpointer = Checkpointer(str(tmp_path))
    state = state_of(1.0)
    whole = torch.ones(4)
    state["model"]["view"] = whole[:2]
    checkpointer.save(state, meta={"step": 1})
    for tensor in (state["model"]["b"], state["optimizer"]["state"]["b"]["step"], whole):
        tensor.fill_(9.0)
    state["scheduler"]["last_epoch"] = 9
    state["optimizer"]["param_groups"]["blocks.0.w"]["betas"][0] = 9
    go.set()
    checkpointer.close()
    into = {**state_of(0.0), "model": {**state_of(0.0)["model"], "view": torch.zeros(2)}}
    checkpoint.load(checkpoint.commits(str(tmp_path))[0], into)
    expected = {**state_of(1.0), "model": {**state_of(1.0)["model"], "view": torch.ones(2)}}
    assert plain(into) == plain(expected)


def test_torch_reads_it_too(tmp_path: Path) -> None:
    """A plain DCP checkpoint: torch's own conversion gives the nested state back."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    save(tmp_path / "c", 2)
    dcp_to_torch_save(checkpoint.commits(str(tmp_path / "c"))[0].path, tmp_path / "out.pt")
    assert plain(torch.load(tmp_path / "out.pt")) == plain(state_of(2.0))


# -- keeping and pruning


def test_keeps_the_last_and_the_best(folder: str) -> None:
    save(folder, 1, 2, 3, 4, metrics={1: 3.0, 2: 1.0, 3: math.nan, 4: 2.5}, keep_last=1, mode="min")
    assert steps(folder) == [4, 2] and len(Storage(folder).list()) == 2


@pytest.mark.parametrize(
    ("metrics", "keep_last", "keep_best", "mode", "kept"),
    [
        ([None, None, None], 0, True, "min", [3]),  # never the newest
        ([1.0, 2.0, 3.0], 1, True, "min", [1, 3]),
        ([1.0, 2.0, 3.0], 1, True, "max", [3]),
        ([1.0, 1.0, 3.0], 1, True, "min", [2, 3]),  # of equal ones the newest
        ([1.0, None, None], 2, False, "min", [2, 3]),
    ],
)
def test_what_is_superfluous(
    metrics: list[float | None], keep_last: int, keep_best: bool, mode: Any, kept: list[int]
) -> None:
    found = [Commit(i, f"/{i}", {}, {}, m, sequence=i) for i, m in enumerate(metrics, 1)][::-1]
    gone = commit.superfluous(found, keep_last=keep_last, keep_best=keep_best, mode=mode)
    assert sorted({1, 2, 3} - {c.step for c in gone}) == kept
    assert [c.step for c in gone] == sorted(c.step for c in gone)


# -- repeating, superseding, sweeping


def test_the_newest_is_the_one_written_last_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """After a rewind behind a damaged checkpoint its step is the higher one, and it must not win for that."""
    for step, attempt in ((200, "a"), (150, "a"), (150, "b"), (150, "b")):
        save(tmp_path, step, attempt=attempt, keep_last=9)
    names = [Path(c.path).name.removeprefix("step-00000") for c in checkpoint.commits(str(tmp_path))]
    assert names == ["150-b-2", "150-b", "150-a", "200-a"]


def test_a_superseded_attempt_does_not_commit(folder: str) -> None:
    save(folder, 1)
    checkpointer = Checkpointer(folder, fence=lambda: False)
    checkpointer.save(state_of(2), meta={"step": 2})
    with pytest.raises(CheckpointError, match=r"step 2 in .* was not committed \(superseded"):
        checkpointer.wait()
    assert steps(folder) == [1] and len(Storage(folder).list()) == 1


def test_sweep_removes_what_is_not_committed(folder: str) -> None:
    save(folder, 1, 2)
    storage = Storage(folder)
    newest = checkpoint.commits(folder)[0]
    storage.write_bytes("step-00000003-x/__0_0.distcp", b"torn")
    storage.write_bytes("step-00000003-x/.metadata.tmp", b"torn")
    storage.write_bytes("notes/mine.txt", b"not ours")
    newest.storage.write_bytes(".COMMIT.json.ab.tmp", b"{")
    assert steps(folder) == [2, 1]
    checkpoint.sweep(folder)
    assert steps(folder) == [2, 1]
    assert storage.list() == ["notes", "step-00000001", "step-00000002"]
    assert ".COMMIT.json.ab.tmp" not in newest.storage.list()
    assert checkpoint.latest_good(folder)[0] == newest
    checkpoint.sweep(folder + "/nothing-here")


# -- failures


def test_a_failure_surfaces_and_the_next_save_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpointer = Checkpointer(str(tmp_path))
    checkpointer.save(state_of(1), meta={"step": 1})
    checkpointer.wait()
    with monkeypatch.context() as broken:
        broken.setattr(Writer, "write_data", Mock(side_effect=OSError(28, "No space left on device")))
        checkpointer.save(state_of(2), meta={"step": 2})
        with pytest.raises(CheckpointError):
            checkpointer._pending.result(30)  # type: ignore[union-attr]
    for _ in range(2):  # it is not forgotten by looking
        with pytest.raises(CheckpointError, match=r"step 2 in .* \(No space left on device\)"):
            checkpointer.check()
    with pytest.raises(RunFailed, match="those committed before are untouched"):
        checkpointer.save(state_of(3), meta={"step": 3})
    checkpointer.check()
    checkpointer.save(state_of(3), meta={"step": 3})
    checkpointer.close()
    assert steps(tmp_path) == [3, 1] and len(list(tmp_path.iterdir())) == 2


def test_a_commit_that_a_peer_did_not_live_to_hear_of_stands(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its marker is written, then telling the others fails: it is a checkpoint all the same."""
    checkpointer = Checkpointer(folder)
    first = checkpointer._ranks.first

    def lost(what: Any) -> Any:
        found = first(what)
        if isinstance(found, Commit):
            raise RuntimeError("Connection closed by peer")
        return found

    monkeypatch.setattr(checkpointer._ranks, "first", lost)
    checkpointer.save(state_of(1.0), meta={"step": 10})
    with pytest.raises(CheckpointError, match="Connection closed by peer"):
        checkpointer.close()
    assert steps(folder) == [10]


# -- loading


@pytest.mark.parametrize(
    ("part", "change", "words"),
    [
        ("model", {"blocks.0.w": torch.zeros(4, 4)}, "blocks.0.w is (4, 3) there and (4, 4) here; use another"),
        ("model", {"head.w": torch.zeros(2)}, "head.w is not in it"),
        ("model", {"b": None}, "b is (3,) there and does not exist here"),
        ("optimizer", {"exp_avg_sq": torch.zeros(3)}, "optimizer.exp_avg_sq is not in it"),
        ("model", {"b": 1.0}, "b is (3,) there and float here"),
    ],
)
def test_another_model_is_refused_before_anything_is_read(
    tmp_path: Path, part: str, change: dict[str, Any], words: str
) -> None:
    save(tmp_path, 1)
    into = state_of(0.0)
    into[part] = {name: value for name, value in (into[part] | change).items() if value is not None}
    with pytest.raises(UserError) as caught:
        checkpoint.load(checkpoint.commits(str(tmp_path))[0], into)
    assert f"step-00000001 is of another {part}: {words}" in str(caught.value) and "\n" not in str(caught.value)
    assert into["optimizer"]["state"]["blocks.0.w"]["step"].item() == 0.0


def test_weights_alone_and_numbers_that_are_new(tmp_path: Path) -> None:
    save(tmp_path, 1)
    found = checkpoint.commits(str(tmp_path))[0]
    weights = {"model": state_of(0.0)["model"]}
    checkpoint.load(found, weights)
    assert weights["model"]["b"].tolist() == [1.0] * 3
    into = state_of(0.0)
    into["scheduler"]["added_later"] = 7
    checkpoint.load(found, into)
    assert into["scheduler"] == {"last_epoch": 1, "added_later": 7}


def test_find(tmp_path: Path) -> None:
    save(tmp_path / "run" / "checkpoints", 1, 2)
    newest = checkpoint.commits(str(tmp_path / "run" / "checkpoints"))[0]
    for where in (newest.path, str(tmp_path / "run" / "checkpoints"), str(tmp_path / "run")):
        assert checkpoint.find(where) == newest
    with pytest.raises(UserError, match=r" \(it does not exist\): give"):
        checkpoint.find(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"there is no COMMIT\.json in it"):
        checkpoint.find(str(tmp_path / "empty"))


# -- exporting

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
