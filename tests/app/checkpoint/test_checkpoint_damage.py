"""Damaged checkpoints are found, named in one sentence, and never resumed from."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app import checkpoint
from app.checkpoint import Commit, commit, export
from app.errors import UserError
from tests.app.checkpoint.kit import save, state_of
from tests.running import flip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(tmp_path, 1, 2, keep_last=2)
    return tmp_path


def newest(folder: Path) -> Commit:
    return checkpoint.commits(str(folder))[0]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
@pytest.mark.parametrize(
    ("damage", "words"),
    [(truncate, "bytes instead of"), (flip, "does not have the content it was"), (Path.unlink, "is missing")],
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
    bad = newest(folder)
    path = Path(bad.path, "__0_0.distcp")
    whole = path.read_bytes()
    refused = 0
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
