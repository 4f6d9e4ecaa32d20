"""Text and token files: found, tokenised once, read in windows without filling memory.

Bad ones: test_data_bad_input.py."""

import os
from pathlib import Path

import numpy as np
import psutil
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


def test_bytes_are_tokens_in_the_order_of_the_files(tmp_path: Path) -> None:
    second, first = write(tmp_path / "a.txt", "second"), write(tmp_path / "b.txt", b"first\xff\0")
    tokens, vocab_size, size = tokenise([first, second])
    assert bytes(tokens.windows([0], tokens.length)[0].astype(np.uint8)) == b"first\xff\0second"
    assert (vocab_size, size, tokens.dtype) == (256, 13, "uint8")


def test_globs_lists_folders_below_and_pythons_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write(tmp_path / name, name) for name in ("a.txt", "b.txt", "deep/down/c.txt", "d.md")]
    assert find_files(str(tmp_path / "**/*.txt")) == paths[:3]
    assert find_files([str(paths[3]), str(tmp_path / "*.txt")]) == [paths[3], *paths[:2]]
    library = tmp_path / "site-packages" / "test" / "lib"  # folders above it are no reason to leave it out
    names = ("z.py", "json/a.py", "argparse.py", "test.py", "c.so", "test/a.py", "site-packages/b.py", "x/tests/c.py")
    files = {name: write(library / name, name) for name in names}
    monkeypatch.setattr(text.sysconfig, "get_path", {"stdlib": str(library)}.get)
    assert find_files("python") == [files[name] for name in ("argparse.py", "json/a.py", "test.py", "z.py")]


def test_text_is_tokenised_once_and_again_when_it_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.txt", "one text")
    first = tokenise([path])[0]
    with monkeypatch.context() as patched:
        patched.setattr(text, "_byte_chunks", lambda files: (pytest.fail(f"{file}: again") for file in files))
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
    model = Tokenizer(BPE(unk_token="[UNK]"))
    model.pre_tokenizer = Split(Regex(r"\S+|\s"), "isolated")
    model.train_from_iterator([corpus], BpeTrainer(vocab_size=300, special_tokens=["[UNK]"], show_progress=False))
    model.save(str(tmp_path / "tokenizer.json"))
    tokens, vocab_size, size = tokenise([path], str(tmp_path / "tokenizer.json"))
    assert tokens.windows([0], tokens.length)[0].tolist() == model.encode(corpus).ids
    assert vocab_size == model.get_vocab_size() and size == len(corpus.encode())


def test_windows_are_consecutive_shifted_by_one_and_never_span_files(tmp_path: Path) -> None:
    files = [
        open_tokens(write(tmp_path / "a.bin", np.arange(10, dtype=np.uint8).tobytes()), "uint8"),
        open_tokens(write(tmp_path / "b.bin", np.arange(100, 103, dtype=np.uint16).tobytes())),
        open_tokens(npy(tmp_path, np.arange(200, 221))),
        open_tokens(write(tmp_path / "d.bin", np.arange(300, 309, dtype=np.uint32).tobytes()), "uint32"),
    ]
    windows = TokenWindows(files, 4, vocab_size=500)
    starts = [0, 4, 200, 204, 208, 212, 216, 300, 304]
    assert [windows[i][0].tolist()[0] for i in range(len(windows))] == starts
    inputs, targets = windows.__getitems__([8, 0, 2])
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.tolist() == [list(range(start, start + 4)) for start in (304, 0, 200)]
    assert torch.equal(targets, inputs + 1) and torch.equal(windows[8][1], targets[0])
    assert [windows.part(7, 9)[i][0].tolist()[0] for i in range(len(windows.part(7, 9)))] == [300, 304]


def test_a_corpus_far_larger_than_memory_stays_on_disk(tmp_path: Path) -> None:
    """64 GiB (sparse) of tokens; 4,000 windows all over it are 8 MiB, and 260 MiB of pages if mapped and kept."""
    path = tmp_path / "huge.bin"
    with open(path, "wb") as file:
        file.truncate(64 << 30)
    windows = TokenWindows([open_tokens(path)], 1024, vocab_size=10)
    assert len(windows) == (32 << 30) // 1024 - 1
    step = len(windows) // 4000
    windows.__getitems__(list(range(0, len(windows), len(windows) // 16)))
    before = psutil.Process().memory_info().rss
    for begin in range(0, len(windows) - 16 * step, 16 * step):
        inputs, _ = windows.__getitems__([begin + step * i for i in range(16)])
        assert inputs.shape == (16, 1024)
    assert psutil.Process().memory_info().rss - before < 20 << 20


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
