"""Images, tables, texts and tokens: reading every kind of source, the cache, and bad files."""

import datetime
import gzip
import os
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.trainers import BpeTrainer

from app.data import tables, text
from app.data.files import cached, package_file
from app.data.images import ImageSet, read_images
from app.data.tables import Column, Encoding, read_table
from app.data.text import TokenFile, TokenWindows, find_files, open_tokens, tokenise
from app.errors import UserError

pytestmark = [pytest.mark.pure, pytest.mark.usefixtures("own_cache")]


def write(path: Path, content: str | bytes) -> Path:
    """Writes a file, and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def save(path: Path, content: Any) -> Path:
    """Writes arrays in the format of the path's suffix, and returns the path."""
    match path.suffix:
        case ".npy":
            np.save(path, content)
        case ".npz":
            np.savez(path, **content)
        case _:
            torch.save(content, path)
    return path


PIXELS = np.arange(6 * 8 * 5, dtype=np.uint8).reshape(6, 8, 5)
LABELS = np.array([0, 1, 2, 0, 1, 2])
COLOUR_LAST = np.stack([PIXELS] * 3, axis=-1)
NAMED = {"images": PIXELS, "labels": LABELS}
TENSORS = (torch.from_numpy(PIXELS), torch.from_numpy(LABELS))


def idx(array: np.ndarray, kind: int = 8) -> bytes:
    """The array in the IDX format of MNIST; kind 8 is uint8, and 13 is float32."""
    header = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


IDX = idx(PIXELS)
IDX_LABELS = idx(LABELS.astype(np.uint8))


def idx_folder(
    folder: Path,
    images: Any = IDX,
    labels: Any = IDX_LABELS,
    part: str = "train",
    compress: Any = None,
) -> Path:
    """Writes a folder of IDX files. Compressed ones have the other names that are in use."""
    for name, content in (("images-idx3-ubyte", images), ("labels-idx1-ubyte", labels)):
        if compress:
            write(folder / f"{part}-{name.replace('-idx', '.idx')}.gz", compress(content))
        else:
            write(folder / f"{part}-{name}", content)
    return folder


def assert_same(image_set: ImageSet | None, images: np.ndarray = PIXELS[:, None]) -> None:
    assert image_set is not None
    assert image_set.images.dtype == images.dtype
    assert np.array_equal(image_set.images, images)
    assert image_set.labels.dtype == np.int64 and np.array_equal(image_set.labels, LABELS)


@pytest.mark.parametrize("compress", [None, gzip.compress])
def test_folders_of_idx_files_are_read(tmp_path: Path, compress: Any) -> None:
    train, held_out = read_images(str(idx_folder(tmp_path, compress=compress)))
    assert_same(train)
    assert held_out is None
    assert_same(read_images(str(idx_folder(tmp_path, part="t10k", compress=compress)))[1])
    floats = idx_folder(tmp_path, idx(PIXELS.astype(">f4"), kind=13), compress=compress)
    assert_same(read_images(str(floats))[0], PIXELS[:, None].astype(np.float32))


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
def test_files_of_arrays_are_read(
    tmp_path: Path, file: str, content: Any, images: np.ndarray
) -> None:
    train, held_out = read_images(str(save(tmp_path / file, content)))
    assert_same(train, images)
    assert held_out is None


def test_built_in_sets_are_real_and_parsed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count, size in (("mnist", 5000, 28), ("digits", 1797, 8)):
        image_set = read_images(name)[0]
        assert image_set.images.shape == (count, 1, size, size)
        assert image_set.images.dtype == np.uint8
        assert len(np.bincount(image_set.labels)) == 10
        assert np.bincount(image_set.labels).min() > count // 11
    monkeypatch.delattr(np, "loadtxt")
    from_cache = read_images("digits")[0]
    assert np.array_equal(image_set.images, from_cache.images)
    assert np.array_equal(image_set.labels, from_cache.labels)
    diamonds = read_table("diamonds")[0]
    assert len(diamonds["price"].values) == 53_940
    names = [name for name, column in diamonds.items() if not column.numeric]
    assert names == ["cut", "color", "clarity"]


def test_a_file_of_the_cache_is_made_once_for_all_that_ask_at_once(own_cache: Path) -> None:
    paths_made = []

    def make(path: Path, fail: bool = False) -> None:
        paths_made.append(path)
        path.write_text("half")
        time.sleep(0.1)
        path.write_text("1" / 0 if fail else "whole")  # type: ignore[operator]

    with pytest.raises(TypeError):
        cached("thing", lambda path: make(path, fail=True))
    files = (own_cache / "trireme").iterdir()
    assert not [path for path in files if not path.name.endswith(".lock")]
    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(lambda _: cached("thing", make).read_text(), range(4))) == {"whole"}
    assert len(paths_made) == 2


CSV = b"size,colour,day,ok\n1,red,2024-01-01,true\n2.5,,2024-01-02,false\n,blue,,true\n"


@pytest.mark.parametrize(
    ("name", "content"), [("a.csv", CSV), ("a.csv.gz", gzip.compress(CSV, mtime=0))]
)
def test_columns_of_csv_are_numbers_texts_dates_and_booleans(
    tmp_path: Path, name: str, content: bytes
) -> None:
    columns, _ = read_table(str(write(tmp_path / name, content)))
    assert list(columns) == ["size", "colour", "day", "ok"]
    assert np.array_equal(columns["size"].values, [1, 2.5, np.nan], equal_nan=True)
    assert columns["colour"].values.tolist() == ["red", None, "blue"]
    assert columns["day"].values[1] - columns["day"].values[0] == 86400
    assert np.array_equal(columns["ok"].values, [1, 0, 1])


def test_parquet_columns_of_every_kind_are_read(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 1, 1, 12, tzinfo=datetime.UTC)
    kinds = {
        "huge": ([2**62 + 1, None], float(2**62)),
        "money": ([Decimal("1.5"), None], 1.5),
        "when": (pa.array([moment, None], pa.timestamp("ns", "UTC")), moment.timestamp()),
        "kind": (pa.array(["a", None]).dictionary_encode(), "a"),
    }
    arrays = {name: values for name, (values, _) in kinds.items()}
    parquet.write_table(pa.table(arrays | {"nothing": pa.nulls(2)}), tmp_path / "a.parquet")
    columns, _ = read_table(str(tmp_path / "a.parquet"))
    assert columns["nothing"].missing().all()
    for name, (_, first) in kinds.items():
        assert columns[name].values[0] == first, name
        assert columns[name].missing().tolist() == [False, True], name


def test_encoding_uses_the_training_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    number = Column("n", np.array([1.0, 3.0, np.nan, 100.0, np.inf]))
    complete = Column("c", np.array([1.0, 1.0, 1.0, 2.0, np.nan]))
    names = Column("t", np.array(["a", "b", "a", "new", None], dtype=object))
    nothing = [Column("n", np.full(5, np.nan)), Column("t", np.array([None] * 5, dtype=object))]
    columns = [number, complete, names, *nothing]
    train = np.array([0, 1, 2])
    inputs = [Encoding.fit(column, train).encode(column.values) for column in columns]
    assert np.concatenate(inputs, 1).tolist() == [
        [-1, 0, 0, 1, 0, 0, 1, 1],
        [1, 0, 0, 0, 1, 0, 1, 1],
        [0, 1, 0, 1, 0, 0, 1, 1],
        [98, 0, 1, 0, 0, 0, 1, 1],
        [0, 1, 0, 0, 0, 0, 1, 1],
    ]
    # Beyond the limit, rare, missing and unknown names share an input.
    monkeypatch.setattr(tables, "MOST_CATEGORIES", 2)
    names = Column("t", np.array(["a", "a", "b", "b", "c", None, "never seen"], dtype=object))
    encoded = Encoding.fit(names, np.arange(6)).encode(names.values)
    assert encoded.argmax(axis=1).tolist() == [0, 0, 1, 1, 2, 2, 2]
    assert encoded.sum(axis=1).tolist() == [1] * 7


def test_globs_lists_and_pythons_library_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / name, name) for name in ("a.txt", "b.txt", "deep/down/c.txt", "d.md")]
    assert find_files(str(tmp_path / "**/*.txt")) == paths[:3]
    assert find_files([str(paths[3]), str(tmp_path / "*.txt")]) == [paths[3], *paths[:2]]
    # The names of folders above the library do not matter.
    library = tmp_path / "site-packages" / "test" / "lib"
    sources = ["argparse.py", "json/a.py", "test.py", "z.py"]
    ignored = ["c.so", "test/a.py", "site-packages/b.py", "x/tests/c.py"]
    files = {name: write(library / name, name) for name in [*sources, *ignored]}
    monkeypatch.setattr(text.sysconfig, "get_path", {"stdlib": str(library)}.get)
    assert find_files("python") == [files[name] for name in sources]


def test_bytes_are_tokenised_once_until_a_text_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = write(tmp_path / "a.txt", "second")
    first = write(tmp_path / "b.txt", b"first\xff\0")
    tokens = tokenise([first, second])
    assert bytes(tokens[0].windows([0], 13)[0].tolist()) == b"first\xff\0second"
    assert tokens[0].dtype == "uint8"
    assert tokens[1:] == (256, 13)
    with monkeypatch.context() as patched:

        def fail(files: Any) -> Any:
            for file in files:
                pytest.fail(f"{file} is read again")
                yield b""

        patched.setattr(text, "_byte_chunks", fail)
        copied = tokenise([first, write(tmp_path / "copy.txt", "second")])
        assert copied == tokens, "the cache knows a file by its content, not by its name"
    os.utime(write(second, "2econd"), ns=(1, 1))
    assert bytes(tokenise([first, second])[0].windows([7], 6)[0].tolist()) == b"2econd"


def test_a_tokenizer_of_hugging_face_reads_texts_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece cuts a word, and nothing is lost."""
    monkeypatch.setattr(text, "CHUNK", 7)
    corpus = "the quick brown fox jumps over the lazy dog\n" * 20
    corpus += "x" * 100 + "é\n" * 40 + "the end"
    path = write(tmp_path / "a.txt", corpus)
    model = Tokenizer(BPE(unk_token="[UNK]"))
    model.pre_tokenizer = Split(Regex(r"\S+|\s"), "isolated")
    trainer = BpeTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False)
    model.train_from_iterator([corpus], trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    tokens, vocab_size, size = tokenise([path], str(tmp_path / "tokenizer.json"))
    assert tokens.windows([0], tokens.length)[0].tolist() == model.encode(corpus).ids
    assert vocab_size == model.get_vocab_size() and size == len(corpus.encode())


def test_windows_are_consecutive_shifted_by_one_and_never_span_files(tmp_path: Path) -> None:
    def binary(name: str, numbers: np.ndarray) -> Path:
        return write(tmp_path / name, numbers.tobytes())

    files = [
        open_tokens(binary("a.bin", np.arange(10, dtype=np.uint8)), "uint8"),
        open_tokens(binary("b.bin", np.arange(100, 103, dtype=np.uint16))),
        open_tokens(save(tmp_path / "c.npy", np.arange(200, 221))),
        open_tokens(binary("d.bin", np.arange(300, 309, dtype=np.uint32)), "uint32"),
    ]
    windows = TokenWindows(files, 4, vocab_size=500)
    starts = [0, 4, 200, 204, 208, 212, 216, 300, 304]
    assert [windows[i][0].tolist()[0] for i in range(len(windows))] == starts
    inputs, targets = windows.__getitems__([8, 0, 2])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [list(range(start, start + 4)) for start in (304, 0, 200)]
    assert torch.equal(targets, inputs + 1) and torch.equal(windows[8][1], targets[0])
    part = windows.part(7, 9)
    assert [part[i][0].tolist()[0] for i in range(len(part))] == [300, 304]


def test_a_corpus_far_larger_than_memory_stays_on_disk(tmp_path: Path) -> None:
    """Reads 4,000 windows of a sparse file of 64 GiB.

    They are 8 MiB in all, and would be 260 MiB of pages if the file were mapped and pages kept.
    """
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(64 << 30)
    windows = TokenWindows([open_tokens(path)], 1024, vocab_size=10)
    assert len(windows) == (32 << 30) // 1024 - 1
    step = len(windows) // 4000
    windows.__getitems__(list(range(0, len(windows), len(windows) // 16)))
    before = psutil.Process().memory_info().rss
    for begin in range(0, len(windows) - 16 * step, 16 * step):
        assert windows.__getitems__([begin + step * i for i in range(16)])[0].shape == (16, 1024)
    assert psutil.Process().memory_info().rss - before < 20 << 20


def test_a_token_outside_the_vocabulary_is_refused_when_it_is_read(tmp_path: Path) -> None:
    numbers = np.zeros(100, dtype=np.uint16)
    numbers[50] = 77
    file = open_tokens(write(tmp_path / "a.bin", numbers.tobytes()))
    windows = TokenWindows([file], 9, vocab_size=77)
    windows.__getitems__([0, 9])
    with pytest.raises(UserError, match=r"a\.bin holds token 77, but vocab_size is 77"):
        windows.__getitems__([0, 5])
    write(file.path, np.full(100, -1, dtype=np.int16).tobytes())
    with pytest.raises(UserError, match="holds token -1"):
        TokenWindows([TokenFile(file.path, "int16", 100)], 9, vocab_size=77)[0]


def images(folder: Path, **arrays: Any) -> Path:
    """Writes a .npz file of images, with some arrays replaced."""
    return save(folder / "a.npz", NAMED | arrays)


def cut_off(content: bytes) -> bytes:
    """A gzip file that lacks its end."""
    return gzip.compress(content)[:-20]


BAD: list[tuple[Callable[[Any], Any], Callable[[Path], Any], str]] = [
    (read_images, lambda at: at / "nowhere", "there is no '.*nowhere'"),
    (
        read_images,
        lambda at: write(at / "train-images-idx3-ubyte", IDX).parent,
        "has no train-labels-idx1-ubyte",
    ),
    (
        read_images,
        lambda at: idx_folder(at, b"\x89PNG" + IDX[4:]),
        "begins with 89 50 4e 47, not with 00",
    ),
    (read_images, lambda at: idx_folder(at, IDX[:10]), "ends within its header"),
    (
        read_images,
        lambda at: idx_folder(at, IDX[:-1]),
        "has 255 bytes, but its header promises 256",
    ),
    (read_images, lambda at: idx_folder(at, compress=cut_off), "gz cannot be read"),
    (
        read_images,
        lambda at: idx_folder(at, labels=idx(LABELS[:5].astype("u1"))),
        "6 images but 5 labels",
    ),
    (read_images, lambda at: images(at, images=PIXELS[:0], labels=LABELS[:0]), "no images"),
    (
        read_images,
        lambda at: save(at / "a.npz", {"pixels": PIXELS}),
        "holds pixels; it must hold images and labels",
    ),
    (read_images, lambda at: images(at, images=PIXELS.reshape(6, 40)), r"shape \(6, 40\)"),
    (read_images, lambda at: images(at, labels=LABELS / 2), "one whole number per image"),
    (read_images, lambda at: images(at, images=PIXELS * np.nan), "not finite"),
    (
        read_images,
        lambda at: write(at / "a.pt", b"PK\x03\x04 no data"),
        "cannot be read as a .pt file",
    ),
    (
        read_images,
        lambda at: save(at / "a.pt", TENSORS[0]),
        "holds one tensor; it must hold images and labels",
    ),
    (read_images, lambda at: write(at / "a.jpg", ""), "is not image data"),
    (read_table, lambda at: write(at / "a.xlsx", "x"), "is not a table"),
    (read_table, lambda at: write(at / "a.csv", "a,b\n"), "has no rows"),
    (read_table, lambda at: write(at / "a.csv", "a,b\n1,2\n3\n"), "cannot be read as CSV"),
    (read_table, lambda at: write(at / "a.csv", "a,a\n1,2\n"), "more than one column 'a'"),
    (read_table, lambda at: write(at / "a.parquet", "no"), "cannot be read as Parquet"),
    (
        open_tokens,
        lambda at: write(at / "a.bin", b"odd"),
        "has 3 bytes, not a multiple of 2 as uint16 has",
    ),
    (open_tokens, lambda at: write(at / "a.bin", b""), "holds no tokens"),
    (
        open_tokens,
        lambda at: write(at / "a.npy", b"what is this?"),
        "cannot be read as a .npy file",
    ),
    (
        open_tokens,
        lambda at: save(at / "a.npy", np.zeros((2, 3), np.int64)),
        "must hold one row of whole numbers",
    ),
    (
        open_tokens,
        lambda at: save(at / "a.npy", np.zeros(3)),
        "must hold one row of whole numbers, not float64",
    ),
    (find_files, lambda at: "nowhere.txt", "there is no 'nowhere.txt'"),
    (find_files, lambda at: "*.nothing", r"no file matches '\*.nothing'"),
    (find_files, lambda at: [], r"task_args.data is \[\]"),
    (find_files, lambda at: [""], "write a path or glob"),
    (find_files, lambda at: ".", r"'\.' is a folder; write a glob such as"),
    (tokenise, lambda at: [write(at / "empty.txt", "")], "there is no text in "),
    (
        lambda file: tokenise([], file),
        lambda at: write(at / "own.json", "{}"),
        "is not a Hugging Face tokenizers file",
    ),
    (
        lambda file: tokenise([], file),
        lambda at: "gpt2",
        r"task_args.tokenizer: there is no 'gpt2'",
    ),
    (
        lambda package: package_file(package, "", data="a", install="b"),
        lambda at: "sknothing",
        "run pip install b",
    ),
]


@pytest.mark.parametrize(
    ("read", "write_source", "message"), BAD, ids=[message for *_, message in BAD]
)
def test_bad_data_is_answered_with_one_sentence(
    tmp_path: Path, monkeypatch: Any, read: Any, write_source: Any, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write_source(tmp_path)
    with pytest.raises(UserError, match=message) as raised:
        read(str(source) if read in (read_images, read_table) else source)
    assert "\n" not in str(raised.value)
