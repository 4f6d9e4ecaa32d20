"""Checkpoints of one process: saving, keeping, refusing, exporting, and skipping damaged ones."""

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


@pytest.mark.parametrize("store", ["local", "s3"])
def test_committed_checkpoints_are_kept_and_anything_else_is_swept(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    root = tmp_path if store == "local" else request.getfixturevalue("bucket")
    run = f"{root}/{uuid.uuid4().hex}"
    folder = f"{run}/checkpoints"
    checkpointer = Checkpointer(folder, attempt="a/1", keep_last=1)
    meta = {"samples_seen": 96, "layout": {"tp": 1}}
    for step, metric in enumerate((3.0, 1.0, math.nan, 2.5), 1):
        checkpointer.save(state_of(step), meta={"step": step, **meta}, metric=metric)
    checkpointer.close()
    newest, best = checkpoint.commits(folder)
    assert newest.step == 4
    assert newest.meta == {"step": 4, **meta}
    assert (newest.metric, newest.attempt) == (2.5, "a/1")
    assert best.step == 2 and len(Storage(folder).list()) == 2
    assert checkpointer.last_total_seconds > 0
    assert set(newest.files) == {".metadata", "__0_0.distcp"}
    assert sorted(newest.storage.list()) == sorted([*newest.files, "COMMIT.json"])
    loaded = state_of(0.0)
    expected = state_of(4.0)
    for state in (loaded, expected):
        state["scheduler"]["added_later"] = 7
    tensor = loaded["model"]["b"]
    checkpoint.load(newest, loaded)
    assert loaded["model"]["b"] is tensor, "tensors are filled in place"
    assert json.dumps(plain(loaded)) == json.dumps(plain(expected))
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
    for path in (newest.path, folder, run):
        assert checkpoint.find(path) == newest
    for path, reason in (
        (f"{run}/nowhere", "it does not exist"),
        (f"{folder}/notes", r"there is no COMMIT\.json in it"),
    ):
        with pytest.raises(UserError, match=rf" \({reason}\): give"):
            checkpoint.find(path)


def test_a_checkpoint_holds_the_state_at_the_time_of_the_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write = threading.Event()
    write = Checkpointer._write

    def write_later(self: Checkpointer, *args: Any) -> Any:
        return may_write.wait(30) and write(self, *args)

    monkeypatch.setattr(Checkpointer, "_write", write_later)
    checkpointer = Checkpointer(str(tmp_path))
    state = state_of(1.0)
    loaded = state_of(0.0)
    expected = state_of(1.0)
    base = torch.ones(4)
    state["model"]["view"] = base[:2]
    loaded["model"]["view"] = torch.zeros(2)
    expected["model"]["view"] = torch.ones(2)
    checkpointer.save(state, meta={"step": 1})
    for tensor in (state["model"]["b"], state["optimizer"]["state"]["b"]["step"], base):
        tensor.fill_(9.0)
    state["scheduler"]["last_epoch"] = 9
    state["optimizer"]["param_groups"]["blocks.0.w"]["betas"][0] = 9
    may_write.set()
    checkpointer.close()
    checkpoint.load(checkpoint.commits(str(tmp_path))[0], loaded)
    assert plain(loaded) == plain(expected)


# -- keeping, repeating, superseding


@pytest.mark.parametrize(
    ("metrics", "keep_last", "mode", "kept_steps"),
    [
        ([None, None, None], 0, "min", [3]),  # the newest is always kept
        ([1.0, 2.0, 3.0], 1, "min", [1, 3]),
        ([1.0, 2.0, 3.0], 1, "max", [3]),
        ([1.0, 1.0, 3.0], 1, "min", [2, 3]),  # of equally good ones the newest is kept
        ([1.0, None, None], 2, None, [2, 3]),
    ],
)
def test_all_but_the_last_and_the_best_checkpoints_are_superfluous(
    metrics: list[float | None], keep_last: int, mode: Any, kept_steps: list[int]
) -> None:
    commits = [
        Commit(step=i, path=f"/{i}", meta={}, files={}, metric=metric, sequence=i)
        for i, metric in enumerate(metrics, 1)
    ]
    commits.reverse()
    options: Any = {"keep_last": keep_last, "keep_best": mode is not None, "mode": mode}
    deleted = [superfluous.step for superfluous in commit.superfluous(commits, **options)]
    assert deleted == sorted({1, 2, 3} - {*kept_steps})


def test_the_newest_is_the_one_written_last_and_nothing_is_overwritten(tmp_path: Path) -> None:
    """After a rewind past a damaged checkpoint, that one has the higher step but is older."""
    for step, attempt in ((200, "a"), (150, "a"), (150, "b"), (150, "b")):
        save(tmp_path, step, attempt=attempt, keep_last=9)
    names = [
        Path(saved.path).name.removeprefix("step-00000")
        for saved in checkpoint.commits(str(tmp_path))
    ]
    assert names == ["150-b-2", "150-b", "150-a", "200-a"]


def test_a_save_that_fails_has_committed_only_if_its_marker_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run superseded while it writes commits nothing; one that cannot tell the other ranks has.

    A run superseded before it writes: tests/app/run/test_storage.py.
    """
    save(tmp_path, 1)
    with pytest.raises(CheckpointError, match=r"step 2 in .* was not committed \(superseded"):
        save(tmp_path, 2, fence=iter([True, False]).__next__)
    assert steps(tmp_path) == [1] and len(list(tmp_path.iterdir())) == 1
    checkpointer = Checkpointer(str(tmp_path))
    run_and_combine = checkpointer._ranks.run_and_combine

    def lose_outcome(*functions: Any) -> None:
        run_and_combine(*functions)
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(checkpointer._ranks, "run_and_combine", lose_outcome)
    checkpointer.save(state_of(10), meta={"step": 10})
    with pytest.raises(CheckpointError, match="Connection closed by peer"):
        checkpointer.close()
    assert steps(tmp_path)[0] == 10


# -- loading


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        (
            "model",
            {"blocks.0.w": torch.zeros(4, 4)},
            "blocks.0.w is (4, 3) there and (4, 4) here; use another",
        ),
        ("model", {"head.w": torch.zeros(2)}, "head.w is not in it"),
        ("model", {"b": None}, "b is (3,) there and does not exist here"),
        ("optimizer", {"exp_avg_sq": torch.zeros(3)}, "optimizer.exp_avg_sq is not in it"),
        ("model", {"b": 1.0}, "b is (3,) there and float here"),
    ],
)
def test_another_model_is_refused(
    tmp_path: Path, part: str, change: dict[str, Any], message: str
) -> None:
    save(tmp_path, 1)
    loaded = state_of(0.0)
    changed = loaded[part] | change
    loaded[part] = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(UserError) as caught:
        checkpoint.load(checkpoint.commits(str(tmp_path))[0], loaded)
    assert f"step-00000001 is of another {part}: {message}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert loaded["optimizer"]["state"]["blocks.0.w"]["step"].item() == 0.0


# -- damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1 and 2."""
    save(tmp_path, 1, 2, keep_last=2)
    return tmp_path


def newest(folder: Path) -> Commit:
    return checkpoint.commits(str(folder))[0]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: os.truncate(path, path.stat().st_size - 7), "bytes instead of"),
        (flip, "does not have the content it was"),
        (Path.unlink, "is missing"),
    ],
)
def test_damage_is_noticed_and_the_checkpoint_before_is_used(
    folder: Path, name: str, damage: Any, message: str
) -> None:
    damaged = newest(folder)
    damage(Path(damaged.path, name))
    expected = 2 if damage is flip else 1
    assert checkpoint.find(str(folder)).step == expected, "only the files' sizes are checked"
    usable, (skipped,) = checkpoint.latest_good(str(folder))
    assert usable is not None and usable.step == 1 and "\n" not in skipped
    assert skipped.startswith(f"{damaged.path} is skipped")
    assert name in skipped
    assert message in skipped
    assert checkpoint.verify(damaged) == [f"{damaged.path}/{name} {skipped.split(name + ' ')[1]}"]
    reads = [
        lambda: checkpoint.load(damaged, state_of(0.0)),
        lambda: export(damaged, to="torch", out=folder / "out"),
    ]
    if damage is flip:
        # A flipped bit stops no reader, save that of the metadata.
        reads = reads[:1] if name == ".metadata" else []
    for read in reads:
        with pytest.raises(UserError, match="the checkpoint is damaged") as caught:
            read()
        assert f"{damaged.path}/{name} " in str(caught.value) and "\n" not in str(caught.value)
    for file in damaged.files:
        Path(damaged.path, file).unlink(missing_ok=True)
    assert checkpoint.latest_good(str(folder))[1][0].endswith(" is missing and 1 more")


def test_damaged_frozen_weights_damage_every_checkpoint_that_reads_them(folder: Path) -> None:
    """Each of n ranks verifies every n-th file, the largest first."""
    save(folder / "frozen", 0)
    trained = replace(newest(folder), meta={"frozen": True})
    frozen = newest(folder / "frozen")
    assert checkpoint.verify(trained) == []
    for name in frozen.files:
        flip(Path(frozen.path, name))
    assert checkpoint.verify(trained, by="size") == []
    assert len(checkpoint.verify(trained)) == 2
    faults_by_rank = [checkpoint.verify(trained, rank, 2) for rank in range(2)]
    by_size = sorted(frozen.files, key=lambda name: -frozen.files[name].size)
    damaged_files = [fault.partition(" ")[0] for (fault,) in faults_by_rank]
    assert damaged_files == [f"{frozen.path}/{name}" for name in by_size]
    Path(frozen.path, "COMMIT.json").unlink()
    message = f"there is no committed checkpoint in {folder}/frozen"
    assert checkpoint.verify(trained)[0].startswith(message)


def test_a_flipped_bit_that_stops_reading_is_named(folder: Path) -> None:
    """Only some flips stop a reader; those in plain numbers only a checksum reveals."""
    damaged = newest(folder)
    refused = 0
    path = Path(damaged.path, "__0_0.distcp")
    content = path.read_bytes()
    for index in range(0, len(content), 261):
        path.write_bytes(content[:index] + bytes([content[index] ^ 255]) + content[index + 1 :])
        try:
            checkpoint.load(damaged, state_of(0.0))
        except UserError as error:
            refused += 1
            assert f"{path} does not have the content" in str(error) and "\n" not in str(error)
    assert refused > 3


def test_a_commit_marker_counts_only_if_it_is_complete(folder: Path) -> None:
    """Whatever byte of it changes, or wherever it is cut, the checkpoint is skipped."""
    marker = Path(newest(folder).path, "COMMIT.json")
    content = marker.read_bytes()
    for index in range(len(content)):
        flipped = bytes([content[index] ^ 1])
        for changed in (content[:index], content[:index] + flipped + content[index + 1 :]):
            try:
                decoded = commit.decode(changed, "")
            except (ValueError, KeyError, TypeError, AttributeError):
                continue
            # A change of white space alone is harmless.
            assert decoded == commit.decode(content, ""), f"a change in byte {index} was believed"
    other_order = json.dumps(dict(reversed(json.loads(content).items()))).encode()
    assert commit.decode(other_order, "") == commit.decode(content, "")
    marker.write_bytes(content[:-20])
    usable, skipped = checkpoint.latest_good(str(folder))
    assert usable is not None and usable.step == 1
    assert skipped == [f"{marker.parent} is skipped: its COMMIT.json is damaged"]
    with pytest.raises(UserError, match=r"its COMMIT\.json cannot be read"):
        checkpoint.find(str(marker.parent))


def test_a_damaged_marker_is_swept_once_a_later_step_is_committed(tmp_path: Path) -> None:
    for step, attempt in ((0, ""), (2, ""), (2, "b")):
        save(tmp_path, step, attempt=attempt, keep_last=9)
    folders = [Path(saved.path) for saved in checkpoint.commits(str(tmp_path))]
    marker = (folders[0] / "COMMIT.json").read_bytes()
    for path in folders:
        (path / "COMMIT.json").write_text("{}")
    checkpoint.sweep(str(tmp_path))
    assert all(path.exists() for path in folders)
    assert checkpoint.latest_good(str(tmp_path))[0] is None
    message = r"there is no committed checkpoint in .*/step-00000000 is skipped"
    with pytest.raises(UserError, match=message):
        checkpoint.find(str(tmp_path))
    (folders[0] / "COMMIT.json").write_bytes(marker)
    checkpoint.sweep(str(tmp_path))
    existing = [path.exists() for path in folders]
    assert existing == [True, True, False], "the old one is swept, not that of the same step"


# -- exporting

TYPES = ["float64", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64"]


def model() -> dict[str, torch.Tensor]:
    """Tensors of every type, and of shapes that are easily got wrong."""
    torch.manual_seed(0)
    tensors = {f"typed.{name}": (torch.randn(3, 5) * 9).to(getattr(torch, name)) for name in TYPES}
    tensors |= {
        "empty": torch.empty(4, 0),
        "scalar": torch.tensor(2.5),
        "turned": torch.randn(4, 6).t(),
    }
    return tensors | {f"blocks.{i}.w": torch.randn(10, 10) for i in range(4)}


def test_an_export_holds_what_was_saved(tmp_path: Path) -> None:
    """One file, shards with an index, or a torch file, all without the optimizer's tensors.

    torch itself can export too, since the checkpoint is a plain DCP checkpoint.
    """
    save(tmp_path / "c", 1, state={"model": model(), "optimizer": {"exp_avg": torch.ones(3)}})
    commit = checkpoint.find(str(tmp_path / "c"))
    (single_file,) = export(commit, to="safetensors", out=tmp_path / "one")
    assert [single_file] == list((tmp_path / "one").iterdir())
    assert single_file.name == "model.safetensors"
    assert plain(load_file(single_file)) == plain(model())
    with safe_open(single_file, "pt") as file:
        assert file.metadata() == {"format": "pt"}
    limits: Any = {"max_file_bytes": 900, "leave_out": ["scalar"]}
    *shards, index = export(commit, to="safetensors", out=tmp_path, **limits)
    names = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert len(shards) > 2 and [path.name for path in shards] == names
    table = json.loads(index.read_text())
    expected = {name: tensor for name, tensor in model().items() if name != "scalar"}
    assert index.name == "model.safetensors.index.json"
    assert table["metadata"] == {"total_size": sum(tensor.nbytes for tensor in expected.values())}
    weight_map = table["weight_map"].items()
    loaded = {name: load_file(tmp_path / shard)[name] for name, shard in weight_map}
    assert plain(loaded) == plain(expected)
    for shard in shards:
        assert sum(tensor.nbytes for tensor in load_file(shard).values()) <= 900
    (torch_file,) = export(commit, to="torch", out=tmp_path)
    assert plain(torch.load(torch_file, weights_only=True)) == plain(model())
    dcp_to_torch_save(commit.path, tmp_path / "all.pt")
    assert plain(torch.load(tmp_path / "all.pt")["model"]) == plain(model())
    save(tmp_path / "none", 1, state={"optimizer": {"w": torch.ones(1)}})
    with pytest.raises(UserError, match="holds no model"):
        export(checkpoint.find(str(tmp_path / "none")), to="torch", out=tmp_path / "out")
