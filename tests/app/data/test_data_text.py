"""Text and token files: found, tokenised once, read in windows without filling memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Regex, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Split
from tokenizers.trainers import BpeTrainer

from app.data import text
from app.data.text import TokenFile, TokenWindows, find_files, open_tokens, tokenise
from app.errors import UserError

pytestmark = pytest.mark.usefixtures("own_cache")


def write(path: Path, content: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def npy(folder: Path, array: np.ndarray) -> Path:
    np.save(folder / "a.npy", array)
    return folder / "a.npy"


def make_tokenizer(path: Path, corpus: str) -> str:
    tokenizer = Tokenizer(BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Split(Regex(r"\S+|\s"), "isolated")
    tokenizer.train_from_iterator([corpus], BpeTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False))
    tokenizer.save(str(path))
    return str(path)


def test_bytes_are_tokens_in_the_order_of_the_files(tmp_path: Path) -> None:
    second, first = write(tmp_path / "a.txt", "second"), write(tmp_path / "b.txt", b"first\xff\0")
    tokens, vocab_size, size = tokenise([first, second])
    assert bytes(tokens.windows([0], tokens.length)[0].astype(np.uint8)) == b"first\xff\0second"
    assert (vocab_size, size, tokens.dtype) == (256, 13, "uint8")


def test_globs_lists_folders_below_and_pythons_library(tmp_path: Path) -> None:
    paths = [write(tmp_path / name, name) for name in ("a.txt", "b.txt", "deep/down/c.txt", "d.md")]
    assert find_files(str(tmp_path / "**/*.txt")) == paths[:3]
    assert find_files([str(paths[3]), str(tmp_path / "*.txt")]) == [paths[3], *paths[:2]]
    files = find_files("python")
    assert len(files) > 300 and "argparse.py" in {file.name for file in files}
    assert not any("site-packages" in file.parts for file in files)


def test_text_is_tokenised_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "one text")
    first = tokenise([path])[0]

    with monkeypatch.context() as patched:
        patched.setattr(
            text, "_byte_chunks", lambda files: (pytest.fail(f"{file} is tokenised again") for file in files)
        )
        assert tokenise([path])[0] == first
        assert tokenise([write(tmp_path / "copy.txt", "one text")])[0] == first, "found by content, not by name"
    write(path, "two text")
    os.utime(path, ns=(1, 1))
    changed = tokenise([path])[0]
    assert changed != first and bytes(changed.windows([0], 3)[0].astype(np.uint8)) == b"two"


def test_hugging_face_tokenizers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece at a time, which cuts no word and loses nothing."""
    monkeypatch.setattr(text, "CHUNK", 7)
    corpus = "the quick brown fox jumps over the lazy dog\n" * 20 + "x" * 100 + "é\n" * 40 + "the end"
    path = write(tmp_path / "a.txt", corpus)
    file = make_tokenizer(tmp_path / "tokenizer.json", corpus)
    tokens, vocab_size, size = tokenise([path], file)
    model = Tokenizer.from_file(file)
    assert tokens.windows([0], tokens.length)[0].tolist() == model.encode(corpus).ids
    assert vocab_size == model.get_vocab_size() and size == len(corpus.encode())


@pytest.mark.parametrize("dtype", ["uint8", "uint32", "npy"])
def test_windows_are_consecutive_and_shifted_by_one(tmp_path: Path, dtype: str) -> None:
    numbers = np.arange(50)
    if dtype == "npy":
        file = open_tokens(npy(tmp_path, numbers))
    else:
        file = open_tokens(write(tmp_path / "a.bin", numbers.astype(dtype).tobytes()), dtype)
    windows = TokenWindows([file], 7, vocab_size=50)
    assert len(windows) == 7
    inputs, targets = windows.__getitems__([0, 6, 3])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [list(range(start, start + 7)) for start in (0, 42, 21)]
    assert torch.equal(targets, inputs + 1)
    assert torch.equal(windows[6][0], inputs[1])
    tail = windows.part(5, 7)
    assert len(tail) == 2 and torch.equal(tail[1][0], inputs[1])


def test_windows_never_span_files(tmp_path: Path) -> None:
    files = []
    for number, length in enumerate((10, 3, 21)):
        tokens = np.arange(length, dtype=np.uint16) + 100 * number
        files.append(open_tokens(write(tmp_path / f"{number}.bin", tokens.tobytes())))
    windows = TokenWindows(files, 4, vocab_size=500)
    assert [windows[i][0].tolist()[0] for i in range(len(windows))] == [0, 4, 200, 204, 208, 212, 216]
    together = windows.__getitems__([6, 0, 2])
    assert together[0][:, 0].tolist() == [216, 0, 200]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_corpus_far_larger_than_memory_stays_on_disk(tmp_path: Path) -> None:
    """64 GiB (sparse) of tokens; 4,000 windows all over it are 8 MiB, and 260 MiB of pages if mapped and kept."""
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(64 << 30)
    windows = TokenWindows([open_tokens(path)], 1024, vocab_size=10)
    assert len(windows) == (32 << 30) // 1024 - 1
    step = len(windows) // 4000
    windows.__getitems__(list(range(0, len(windows), len(windows) // 16)))
    before = resident_bytes()
    for begin in range(0, len(windows) - 16 * step, 16 * step):
        inputs, _ = windows.__getitems__([begin + step * i for i in range(16)])
        assert inputs.shape == (16, 1024)
    assert resident_bytes() - before < 20 << 20


def test_a_token_outside_the_vocabulary_is_found_where_it_is_read(tmp_path: Path) -> None:
    tokens = np.zeros(100, dtype=np.uint16)
    tokens[50] = 77
    file = open_tokens(write(tmp_path / "a.bin", tokens.tobytes()))
    windows = TokenWindows([file], 9, vocab_size=77)
    windows.__getitems__([0, 9])
    with pytest.raises(UserError, match=r"a\.bin holds token 77, but vocab_size is 77"):
        windows.__getitems__([0, 5])
    signed = TokenFile(file.path, "int16", 100)
    write(file.path, np.full(100, -1, dtype=np.int16).tobytes())
    with pytest.raises(UserError, match="holds token -1"):
        TokenWindows([signed], 9, vocab_size=77)[0]


BAD: list[tuple[Callable[[Path], Any], str]] = [
    (lambda at: open_tokens(write(at / "a.bin", b"odd")), "has 3 bytes, not a multiple of 2 as uint16 has"),
    (lambda at: open_tokens(write(at / "a.bin", b"")), "holds no tokens"),
    (lambda at: open_tokens(write(at / "a.npy", b"what is this?")), "cannot be read as a .npy file"),
    (lambda at: open_tokens(npy(at, np.zeros((2, 3), dtype=np.int64))), "must hold one row of whole numbers"),
    (lambda at: open_tokens(npy(at, np.zeros(3))), "must hold one row of whole numbers, not float64"),
    (lambda at: open_tokens(npy(at, np.zeros(0, dtype=np.int64))), "holds no tokens"),
    (lambda at: find_files("nowhere.txt"), "there is no 'nowhere.txt'"),
    (lambda at: find_files("*.nothing"), r"no file matches '\*.nothing'"),
    (lambda at: find_files([]), r"task_args.data is \[\]"),
    (lambda at: find_files([""]), "write a path or glob"),
    (lambda at: find_files("."), r"'\.' is a folder; write a glob such as"),
    (lambda at: tokenise([write(at / "empty.txt", "")]), "there is no text in "),
    (lambda at: tokenise([], str(write(at / "own.json", "{}"))), "is not a Hugging Face tokenizers file"),
    (lambda at: tokenise([], "gpt2"), r"task_args.tokenizer: there is no 'gpt2'"),
]


@pytest.mark.parametrize(("read", "says"), BAD, ids=[says for _, says in BAD])
def test_bad_text_and_token_files_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], Any], says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=says) as raised:
        read(tmp_path)
    assert "\n" not in str(raised.value)
