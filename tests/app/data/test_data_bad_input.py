"""The sentence that each file that is no good gets: images, tables, texts and tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.data.files import package_file
from app.data.images import read_images
from app.data.tables import read_table
from app.data.text import find_files, open_tokens, tokenise
from app.errors import UserError
from tests.app.data.test_data_images import LABELS, NAMED, PIXELS, TENSORS, idx, save, write_idx
from tests.app.data.test_data_text import npy, write

pytestmark = pytest.mark.usefixtures("own_cache")
IMAGES, OF_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"


def spoilt(folder: Path, name: str, change: Callable[[bytes], bytes]) -> str:
    write_idx(folder, compress=name.endswith(".gz"))
    write(folder / name, change((folder / name).read_bytes()))
    return str(folder)


def without_labels(folder: Path) -> str:
    write_idx(folder)
    (folder / OF_LABELS).unlink()
    return str(folder)


def image_file(folder: Path, **changes: Any) -> str:
    return save(folder / "a.npz", NAMED | changes)


BAD: list[tuple[Callable[[Any], Any], Callable[[Path], Any], str]] = [
    (read_images, lambda at: str(at / "nowhere"), "there is no '.*nowhere'"),
    (read_images, without_labels, "has no train-labels-idx1-ubyte"),
    (read_images, lambda at: spoilt(at, IMAGES, lambda b: b"\x89PNG" + b[4:]), "begins with 89 50 4e 47, not with 00"),
    (read_images, lambda at: spoilt(at, IMAGES, lambda b: b[:10]), "ends within its header"),
    (read_images, lambda at: spoilt(at, IMAGES, lambda b: b[:-1]), "has 255 bytes, but its header promises 256"),
    (
        read_images,
        lambda at: spoilt(at, f"{IMAGES.replace('-idx', '.idx')}.gz", lambda b: b[:-20]),
        "gz cannot be read",
    ),
    (read_images, lambda at: spoilt(at, OF_LABELS, lambda b: idx(LABELS[:5].astype("u1"))), "6 images but 5 labels"),
    (read_images, lambda at: image_file(at, images=PIXELS[:0], labels=LABELS[:0]), "no images"),
    (read_images, lambda at: save(at / "a.npz", {"pixels": PIXELS}), "holds pixels; it must hold images and labels"),
    (read_images, lambda at: image_file(at, images=PIXELS.reshape(6, 40)), r"shape \(6, 40\)"),
    (read_images, lambda at: image_file(at, labels=LABELS / 2), "one whole number per image"),
    (read_images, lambda at: image_file(at, images=PIXELS * np.nan), "not finite"),
    (read_images, lambda at: write(at / "a.pt", b"PK\x03\x04 no data"), "cannot be read as a .pt file"),
    (read_images, lambda at: save(at / "a.pt", TENSORS[0]), "holds one tensor; it must hold images and labels"),
    (read_images, lambda at: write(at / "a.jpg", ""), "is not image data"),
    (read_table, lambda at: write(at / "a.xlsx", "x"), "is not a table"),
    (read_table, lambda at: write(at / "a.csv", "a,b\n"), "has no rows"),
    (read_table, lambda at: write(at / "a.csv", "a,b\n1,2\n3\n"), "cannot be read as CSV"),
    (read_table, lambda at: write(at / "a.csv", "a,a\n1,2\n"), "more than one column 'a'"),
    (read_table, lambda at: write(at / "a.parquet", "no"), "cannot be read as Parquet"),
    (open_tokens, lambda at: write(at / "a.bin", b"odd"), "has 3 bytes, not a multiple of 2 as uint16 has"),
    (open_tokens, lambda at: write(at / "a.bin", b""), "holds no tokens"),
    (open_tokens, lambda at: write(at / "a.npy", b"what is this?"), "cannot be read as a .npy file"),
    (open_tokens, lambda at: npy(at, np.zeros((2, 3), dtype=np.int64)), "must hold one row of whole numbers"),
    (open_tokens, lambda at: npy(at, np.zeros(3)), "must hold one row of whole numbers, not float64"),
    (open_tokens, lambda at: npy(at, np.zeros(0, dtype=np.int64)), "holds no tokens"),
    (find_files, lambda at: "nowhere.txt", "there is no 'nowhere.txt'"),
    (find_files, lambda at: "*.nothing", r"no file matches '\*.nothing'"),
    (find_files, lambda at: [], r"task_args.data is \[\]"),
    (find_files, lambda at: [""], "write a path or glob"),
    (find_files, lambda at: ".", r"'\.' is a folder; write a glob such as"),
    (tokenise, lambda at: [write(at / "empty.txt", "")], "there is no text in "),
    (
        lambda given: tokenise([], given),
        lambda at: write(at / "own.json", "{}"),
        "is not a Hugging Face tokenizers file",
    ),
    (lambda given: tokenise([], given), lambda at: "gpt2", r"task_args.tokenizer: there is no 'gpt2'"),
    (lambda package: package_file(package, "", data="a", install="b"), lambda at: "sknothing", "run pip install b"),
]


@pytest.mark.parametrize(("read", "make", "says"), BAD, ids=[says for *_, says in BAD])
def test_bad_data_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Any], Any], make: Callable[[Path], Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    given = make(tmp_path)
    with pytest.raises(UserError, match=says) as raised:
        read(str(given) if read in (read_images, read_table) else given)
    assert "\n" not in str(raised.value)
