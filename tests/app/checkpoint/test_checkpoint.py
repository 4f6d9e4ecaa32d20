"""Checkpoints on one process: what is saved, kept, refused and exported; damaged ones are never resumed from."""

import json
import math
import os
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from app import checkpoint
from app.checkpoint import Checkpointer, CheckpointError, Commit, commit, export
from app.errors import UserError
from app.storage.storage import Storage
from tests.app.checkpoint.kit import plain, save, state_of, steps
from tests.running import flip

pytestmark = pytest.mark.pure


@pytest.mark.parametrize("place", ["local", "s3"])
def test_what_is_saved_is_kept_and_the_rest_swept(place: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    run = f"{tmp_path if place == 'local' else request.getfixturevalue('bucket')}/{uuid.uuid4().hex}"
    folder = f"{run}/checkpoints"
    checkpointer = Checkpointer(folder, attempt="a/1", keep_last=1)
    meta = {"samples_seen": 96, "layout": {"tp": 1}}
    for step, metric in enumerate((3.0, 1.0, math.nan, 2.5), 1):
        checkpointer.save(state_of(step), meta={"step": step, **meta}, metric=metric)
    checkpointer.close()
    newest, best = checkpoint.commits(folder)
    assert (newest.step, newest.meta, newest.metric, newest.attempt) == (4, {"step": 4, **meta}, 2.5, "a/1")
    assert best.step == 2 and len(Storage(folder).list()) == 2
    assert checkpointer.last_total_seconds > 0
    assert set(newest.files) == {".metadata", "__0_0.distcp"}
    assert sorted(newest.storage.list()) == sorted([*newest.files, "COMMIT.json"])
    into, expected = state_of(0.0), state_of(4.0)
    tensor, into["scheduler"]["added_later"], expected["scheduler"]["added_later"] = into["model"]["b"], 7, 7
    checkpoint.load(newest, into)
    assert into["model"]["b"] is tensor, "tensors are filled in place"
    assert json.dumps(plain(into)) == json.dumps(plain(expected))
    storage = Storage(folder)
    storage.write_bytes("step-00000003-x/__0_0.distcp", b"torn")
    storage.write_bytes("step-00000003-x/.metadata.tmp", b"torn")
    storage.write_bytes("notes/mine.txt", b"not ours")
    newest.storage.write_bytes(".COMMIT.json.ab.tmp", b"{")
    assert checkpoint.commits(folder) == [newest, best]
    checkpoint.sweep(folder)
    assert checkpoint.commits(folder) == [newest, best]
    assert storage.list() == ["notes", "step-00000002-a_1", "step-00000004-a_1"]
    assert ".COMMIT.json.ab.tmp" not in newest.storage.list()
    assert checkpoint.latest_good(folder) == (newest, [])
    checkpoint.sweep(f"{run}/nothing-here")
    assert [checkpoint.find(where) for where in (newest.path, folder, run)] == [newest] * 3
    for where, why in ((f"{run}/nowhere", "it does not exist"), (f"{folder}/notes", r"there is no COMMIT\.json in it")):
        with pytest.raises(UserError, match=rf" \({why}\): give"):
            checkpoint.find(where)


def test_what_is_saved_is_the_state_at_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()
    write = Checkpointer._write
    monkeypatch.setattr(Checkpointer, "_write", lambda self, *args: go.wait(30) and write(self, *args))
    checkpointer = Checkpointer(str(tmp_path))
    state, into, expected = state_of(1.0), state_of(0.0), state_of(1.0)
    whole = torch.ones(4)
    state["model"]["view"], into["model"]["view"], expected["model"]["view"] = whole[:2], torch.zeros(2), torch.ones(2)
    checkpointer.save(state, meta={"step": 1})
    for tensor in (state["model"]["b"], state["optimizer"]["state"]["b"]["step"], whole):
        tensor.fill_(9.0)
    state["scheduler"]["last_epoch"] = 9
    state["optimizer"]["param_groups"]["blocks.0.w"]["betas"][0] = 9
    go.set()
    checkpointer.close()
    checkpoint.load(checkpoint.commits(str(tmp_path))[0], into)
    assert plain(into) == plain(expected)


# -- keeping, repeating, superseding


def test_what_is_superfluous() -> None:
    for metrics, keep_last, mode, kept in [
        ([None, None, None], 0, "min", [3]),  # never the newest
        ([1.0, 2.0, 3.0], 1, "min", [1, 3]),
        ([1.0, 2.0, 3.0], 1, "max", [3]),
        ([1.0, 1.0, 3.0], 1, "min", [2, 3]),  # of equal ones the newest
        ([1.0, None, None], 2, None, [2, 3]),
    ]:
        found = [
            Commit(step=i, path=f"/{i}", meta={}, files={}, metric=metric, sequence=i)
            for i, metric in enumerate(metrics, 1)
        ][::-1]
        how: Any = {"keep_last": keep_last, "keep_best": mode is not None, "mode": mode}
        gone = [c.step for c in commit.superfluous(found, **how)]
        assert gone == sorted({1, 2, 3} - {*kept}), (metrics, how)


def test_the_newest_is_the_one_written_last_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """After a rewind behind a damaged checkpoint its step is the higher one, and it must not win for that."""
    for step, attempt in ((200, "a"), (150, "a"), (150, "b"), (150, "b")):
        save(tmp_path, step, attempt=attempt, keep_last=9)
    names = [Path(c.path).name.removeprefix("step-00000") for c in checkpoint.commits(str(tmp_path))]
    assert names == ["150-b-2", "150-b", "150-a", "200-a"]


def test_whether_a_save_that_does_not_end_well_has_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that is superseded while it writes (before that: tests/app/run/test_storage.py), but one whose marker is
    written, though telling the others of it fails."""
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step 2 in .* was not committed \(superseded"):
        save(tmp_path, 2, fence=iter([True, False]).__next__)
    assert steps(tmp_path) == [1] and len(list(tmp_path.iterdir())) == 1
    checkpointer = Checkpointer(str(tmp_path))
    first = checkpointer._ranks.run_on_first

    def lost(what: Any) -> Any:
        if isinstance(found := first(what), Commit):
            raise RuntimeError("Connection closed by peer")
        return found

    monkeypatch.setattr(checkpointer._ranks, "run_on_first", lost)
    checkpointer.save(state_of(10), meta={"step": 10})
    with pytest.raises(CheckpointError, match="Connection closed by peer"):
        checkpointer.close()
    assert steps(tmp_path)[0] == 10


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
def test_another_model_is_refused(tmp_path: Path, part: str, change: dict[str, Any], words: str) -> None:
    save(tmp_path, 1)
    into = state_of(0.0)
    into[part] = {name: value for name, value in (into[part] | change).items() if value is not None}
    with pytest.raises(UserError) as caught:
        checkpoint.load(checkpoint.commits(str(tmp_path))[0], into)
    assert f"step-00000001 is of another {part}: {words}" in str(caught.value) and "\n" not in str(caught.value)
    assert into["optimizer"]["state"]["blocks.0.w"]["step"].item() == 0.0


# -- damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, 1, 2, keep_last=2)
    return tmp_path


def newest(folder: Path) -> Commit:
    return checkpoint.commits(str(folder))[0]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 7), "bytes instead of"),
        (flip, "does not have the content it was"),
        (Path.unlink, "is missing"),
    ],
)
def test_damage_is_found_and_the_one_before_is_used(folder: Path, name: str, damage: Any, words: str) -> None:
    bad = newest(folder)
    damage(Path(bad.path, name))
    assert checkpoint.find(str(folder)).step == (2 if damage is flip else 1), "by the files' sizes alone"
    good, (skipped,) = checkpoint.latest_good(str(folder))
    assert good is not None and good.step == 1 and "\n" not in skipped
    assert skipped.startswith(f"{bad.path} is skipped") and name in skipped and words in skipped
    assert checkpoint.verify(bad) == [f"{bad.path}/{name} {skipped.split(name + ' ')[1]}"]
    reads = [lambda: checkpoint.load(bad, state_of(0.0)), lambda: export(bad, to="torch", out=folder / "out")]
    for read in reads if damage is not flip else reads[: name == ".metadata"]:
        with pytest.raises(UserError, match="the checkpoint is damaged") as caught:
            read()
        assert f"{bad.path}/{name} " in str(caught.value) and "\n" not in str(caught.value)
    for file in bad.files:
        Path(bad.path, file).unlink(missing_ok=True)
    assert checkpoint.latest_good(str(folder))[1][0].endswith(" is missing and 1 more")


def test_damage_of_weights_that_are_not_trained_is_that_of_every_checkpoint_which_reads_them(folder: Path) -> None:
    """Of several ranks each looks at every n-th file, the largest first."""
    save(folder / "frozen", 0)
    whole, frozen = replace(newest(folder), meta={"frozen": True}), newest(folder / "frozen")
    assert checkpoint.verify(whole) == []
    for name in frozen.files:
        flip(Path(frozen.path, name))
    assert checkpoint.verify(whole, by="size") == [] and len(checkpoint.verify(whole)) == 2
    shared = [checkpoint.verify(whole, rank, 2) for rank in range(2)]
    by_size = sorted(frozen.files, key=lambda name: -frozen.files[name].size)
    assert [fault.partition(" ")[0] for (fault,) in shared] == [f"{frozen.path}/{name}" for name in by_size]
    Path(frozen.path, "COMMIT.json").unlink()
    assert checkpoint.verify(whole)[0].startswith(f"there is no committed checkpoint in {folder}/frozen")


def test_a_flipped_bit_that_stops_reading_is_named(folder: Path) -> None:
    """Flips in bytes that reading stumbles over; those in plain numbers only a checksum can see."""
    bad, refused = newest(folder), 0
    path = Path(bad.path, "__0_0.distcp")
    whole = path.read_bytes()
    for index in range(0, len(whole), 261):
        path.write_bytes(whole[:index] + bytes([whole[index] ^ 255]) + whole[index + 1 :])
        try:
            checkpoint.load(bad, state_of(0.0))
        except UserError as error:
            refused += 1
            assert f"{path} does not have the content" in str(error) and "\n" not in str(error)
    assert refused > 3


def test_a_marker_is_believed_only_whole(folder: Path) -> None:
    """Whatever byte of it changes, or wherever it is cut, the checkpoint is skipped."""
    marker = Path(newest(folder).path, "COMMIT.json")
    whole = marker.read_bytes()
    for index in range(len(whole)):
        for torn in (whole[:index], whole[:index] + bytes([whole[index] ^ 1]) + whole[index + 1 :]):
            try:
                read = commit.decode(torn, "")
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            assert read == commit.decode(whole, ""), f"a change in byte {index} was believed"  # only white space
    other_order = json.dumps(dict(reversed(json.loads(whole).items()))).encode()
    assert commit.decode(other_order, "") == commit.decode(whole, "")
    marker.write_bytes(whole[:-20])
    good, skipped = checkpoint.latest_good(str(folder))
    assert good is not None and good.step == 1
    assert skipped == [f"{marker.parent} is skipped: its COMMIT.json is damaged"]
    with pytest.raises(UserError, match=r"its COMMIT\.json cannot be read"):
        checkpoint.find(str(marker.parent))


def test_a_damaged_marker_is_swept_once_a_checkpoint_of_a_later_step_is_there(tmp_path: Path) -> None:
    for step, attempt in ((0, ""), (2, ""), (2, "b")):
        save(tmp_path, step, attempt=attempt, keep_last=9)
    folders = [Path(found.path) for found in checkpoint.commits(str(tmp_path))]
    whole = (folders[0] / "COMMIT.json").read_bytes()
    for path in folders:
        (path / "COMMIT.json").write_text("{}")
    checkpoint.sweep(str(tmp_path))
    assert all(path.exists() for path in folders) and checkpoint.latest_good(str(tmp_path))[0] is None
    with pytest.raises(UserError, match=r"there is no committed checkpoint in .*/step-00000000 is skipped"):
        checkpoint.find(str(tmp_path))
    (folders[0] / "COMMIT.json").write_bytes(whole)
    checkpoint.sweep(str(tmp_path))
    assert [path.exists() for path in folders] == [True, True, False], "the old one goes, not that of the same step"


# -- exporting

TYPES = ["float64", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]


def model() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    tensors = {f"typed.{name}": (torch.randn(3, 5) * 9).to(getattr(torch, name)) for name in TYPES}
    tensors |= {"empty": torch.empty(4, 0), "scalar": torch.tensor(2.5), "turned": torch.randn(4, 6).t()}
    return tensors | {f"blocks.{i}.w": torch.randn(10, 10) for i in range(4)}


def test_what_is_exported_is_what_was_saved(tmp_path: Path) -> None:
    """As one file, as shards with an index, and as a torch file, without the optimizer's tensors; or by torch itself,
    for which it is a plain DCP checkpoint."""
    save(tmp_path / "c", 1, state={"model": model(), "optimizer": {"exp_avg": torch.ones(3)}})
    commit = checkpoint.find(str(tmp_path / "c"))
    (whole,) = export(commit, to="safetensors", out=tmp_path / "one")
    assert [whole] == list((tmp_path / "one").iterdir()) and whole.name == "model.safetensors"
    assert plain(load_file(whole)) == plain(model())
    with safe_open(whole, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    *shards, index = export(commit, to="safetensors", out=tmp_path, max_file_bytes=900, leave_out=["scalar"])
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 2 and [path.name for path in shards] == names
    table, wanted = json.loads(index.read_text()), {n: t for n, t in model().items() if n != "scalar"}
    assert index.name == "model.safetensors.index.json"
    assert table["metadata"] == {"total_size": sum(t.nbytes for t in wanted.values())}
    assert plain({name: load_file(tmp_path / f)[name] for name, f in table["weight_map"].items()}) == plain(wanted)
    assert all(sum(t.nbytes for t in load_file(path).values()) <= 900 for path in shards)
    (path,) = export(commit, to="torch", out=tmp_path)
    assert plain(torch.load(path, weights_only=True)) == plain(model())
    dcp_to_torch_save(commit.path, tmp_path / "all.pt")
    assert plain(torch.load(tmp_path / "all.pt")["model"]) == plain(model())
    save(tmp_path / "none", 1, state={"optimizer": {"w": torch.ones(1)}})
    with pytest.raises(UserError, match="holds no model"):
        export(checkpoint.find(str(tmp_path / "none")), to="torch", out=tmp_path / "out")
