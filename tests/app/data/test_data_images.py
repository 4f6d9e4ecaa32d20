"""Images from every kind of source, and the cache of what was made of them. Bad ones: test_data_bad_input.py."""

import gzip
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.data.files import cached
from app.data.images import ImageSet, read_images
from app.data.tables import read_table

PIXELS = np.arange(6 * 8 * 5, dtype=np.uint8).reshape(6, 8, 5)
LABELS = np.array([0, 1, 2, 0, 1, 2])

pytestmark = pytest.mark.usefixtures("own_cache")


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    header = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_idx(folder: Path, images: bytes = idx(PIXELS), part: str = "train", compress: bool = False) -> None:
    """Compressed files have the other names that are in use."""
    labels = idx(LABELS.astype(np.uint8))
    for name, content in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
        if compress:
            (folder / f"{name.replace('-idx', '.idx')}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / name).write_bytes(content)


def save(path: Path, content: Any) -> str:
    if path.suffix == ".npz":
        np.savez(path, **content)
    else:
        torch.save(content, path)
    return str(path)


def assert_same(found: ImageSet | None, images: np.ndarray = PIXELS[:, None]) -> None:
    assert found is not None and found.images.dtype == images.dtype and np.array_equal(found.images, images)
    assert found.labels.dtype == np.int64 and np.array_equal(found.labels, LABELS)


@pytest.mark.parametrize("compress", [False, True])
def test_idx_folders(tmp_path: Path, compress: bool) -> None:
    write_idx(tmp_path, compress=compress)
    train, held = read_images(str(tmp_path))
    assert_same(train)
    assert held is None
    write_idx(tmp_path, part="t10k", compress=compress)
    assert_same(read_images(str(tmp_path))[1])
    write_idx(tmp_path, idx(PIXELS.astype(">f4"), kind=13), compress=compress)
    assert_same(read_images(str(tmp_path))[0], PIXELS[:, None].astype(np.float32))


COLOUR_LAST = np.stack([PIXELS] * 3, axis=-1)
NAMED = {"images": PIXELS, "labels": LABELS}
TENSORS = (torch.from_numpy(PIXELS), torch.from_numpy(LABELS))


@pytest.mark.parametrize(
    ("file", "content", "images"),
    [
        ("a.npz", NAMED | {"labels": LABELS[:, None] * 1.0}, PIXELS[:, None]),
        ("a.npz", NAMED | {"images": COLOUR_LAST}, COLOUR_LAST.transpose(0, 3, 1, 2)),
        ("a.npz", NAMED | {"images": PIXELS[:, None]}, PIXELS[:, None]),
        ("a.pt", TENSORS, PIXELS[:, None]),
        ("a.pth", {"data": TENSORS[0], "targets": TENSORS[1]}, PIXELS[:, None]),
    ],
)
def test_array_files(tmp_path: Path, file: str, content: Any, images: np.ndarray) -> None:
    train, held = read_images(save(tmp_path / file, content))
    assert_same(train, images)
    assert held is None


def test_built_in_sets_are_real_and_parsed_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count, size in (("mnist", 5000, 28), ("digits", 1797, 8)):
        found = read_images(name)[0]
        assert found.images.shape == (count, 1, size, size) and found.images.dtype == np.uint8
        assert len(np.bincount(found.labels)) == 10 and np.bincount(found.labels).min() > count // 11
        assert list((own_cache / "trireme").glob(f"{name}-*.npy"))
    monkeypatch.delattr(np, "loadtxt")
    again = read_images("digits")[0]
    assert np.array_equal(found.images, again.images) and np.array_equal(found.labels, again.labels)
    diamonds = read_table("diamonds")[0]
    assert len(diamonds["price"].values) == 53_940
    assert [name for name, column in diamonds.items() if not column.numeric] == ["cut", "color", "clarity"]


def test_the_cache_is_made_once_and_whole_by_all_that_ask_at_once(own_cache: Path) -> None:
    made = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_text("half")
        time.sleep(0.1)
        path.write_text("whole")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        cached("thing", fail)
    assert not [path for path in (own_cache / "trireme").iterdir() if not path.name.endswith(".lock")]
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: cached("thing", make).read_text(), range(4)))
    assert found == ["whole"] * 4 and len(made) == 1
