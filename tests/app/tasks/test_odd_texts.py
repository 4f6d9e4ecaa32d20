"""Texts as users have them: documents, conversations, labelled texts and pairs.

They are read as they are meant, or refused with one sentence.
"""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet
from tokenizers import Tokenizer, models, pre_tokenizers

from app.data.loader import fetch
from app.data.stream import examples
from app.errors import UserError
from app.tasks import load_task
from app.tasks.huggingface.conversations import IGNORED
from tests.app.tasks.test_tasks_huggingface import SMALL

pytestmark = pytest.mark.usefixtures("own_cache")

N = 60
LENGTH = 16
SIZES: dict[str, Any] = {
    "d_model": 16,
    "n_layers": 1,
    "n_heads": 2,
    "sequence_length": LENGTH,
    "eval_samples": 0,
}
TEXT = "grün, 5 € "


def lines(rows: list[Any]) -> bytes:
    """JSON lines of these rows."""
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def language(path: Path, content: bytes, **task_args: Any) -> Any:
    """A task of language modelling on a file with this content."""
    path.write_bytes(content)
    return load_task("language_modelling", {"data": str(path), **SIZES, **task_args})


def learnt_text(task: Any) -> bytes:
    """The text that is learnt: all of it but what does not fill a last sequence."""
    data = task.train_data()
    return b"".join(bytes(data[i][0].tolist()) for i in range(len(data)))


def streamed_text(task: Any) -> bytes:
    """The text of the first two samples of a stream."""
    return b"".join(bytes(inputs.tolist()) for inputs, _ in examples(task.train_data(), 2))


def assert_learns(task: Any, text: str) -> None:
    content = learnt_text(task)
    expected = text.encode()
    assert expected.startswith(content) and len(expected) - len(content) <= LENGTH


def refusal(make: Callable[[], Any], folder: Path) -> str:
    """The sentence that refuses to make a task, without the folder's path."""
    with pytest.raises(UserError) as raised:
        make()
    sentence = str(raised.value).replace(f"{folder}/", "")
    assert "\n" not in sentence and len(sentence) < 400 and not sentence.endswith(".")
    return sentence


# --- documents ------------------------------------------------------------------------------------

ROWS = [{"text": f"{TEXT}{i}"} for i in range(N)]
WHOLE = "".join(f"{TEXT}{i}\n" for i in range(N))
METAS = [None, 1, "a", {"b": 1}, [2]]
DOCUMENTS: list[tuple[str, bytes]] = [
    ("a.jsonl", lines(ROWS)),
    ("a.JSONL", lines(ROWS)),
    ("a.ndjson", lines(ROWS)),
    ("a.jsonl", b"\xef\xbb\xbf" + lines(ROWS)),
    ("a.jsonl", b"\n\n" + lines(ROWS).replace(b"\n", b"\r\n\r\n")),
    ("a.jsonl", gzip.compress(lines(ROWS))),
    ("a.jsonl.gz", gzip.compress(lines(ROWS))),
    ("a.jsonl", lines(ROWS).decode().encode("utf-16")),
    ("a.json", json.dumps(ROWS, indent=1).encode()),
    ("a.jsonl", json.dumps([row["text"] for row in ROWS]).encode()),
    ("a.jsonl", lines([{"text": None}, *ROWS, {"other": 1}, {"text": None}])),
    ("a.jsonl", lines([{"meta": METAS[i % 5], **row} for i, row in enumerate(ROWS)])),
]


@pytest.mark.parametrize(("name", "content"), DOCUMENTS, ids=[name for name, _ in DOCUMENTS])
def test_json_documents_are_read(tmp_path: Path, name: str, content: bytes) -> None:
    assert_learns(language(tmp_path / name, content), WHOLE)
    assert_learns(load_task("language_modelling", {"data": f"{tmp_path}/a.*", **SIZES}), WHOLE)


def test_a_column_may_be_null_for_longer_than_readers_look_ahead(tmp_path: Path) -> None:
    """Hugging Face's library decides by the first 10 MB which type a column has."""
    rows = lines([{"text": "early", "meta": None, "pad": "x" * 1000}] * 12_000)
    assert len(rows) > 10 << 20
    late = lines([{"text": "late", "meta": "a"}, {"text": "latest", "meta": {"a": 1}}])
    task = language(tmp_path / "a.jsonl", rows + late, sequence_length=6)
    assert learnt_text(task).endswith(b"early\nlate\nl") and len(task.train_data()) == 12_001


BAD_DOCUMENTS: list[tuple[bytes, str]] = [
    (lines([{"text": None}] * N), "there is no text in a.jsonl"),
    (lines([{"text": 1}] * N), "a.jsonl:1: column 'text' holds 1 (int), not a text"),
    (lines([*ROWS, {"text": ["a"]}]), "a.jsonl:61: column 'text' holds ['a'] (list), not a text"),
    (
        lines([*ROWS, {"text": {"a": 1}}]),
        "a.jsonl:61: column 'text' holds {'a': 1} (dict), not a text",
    ),
    (
        lines(ROWS) + rb'{"text": "\ud800"}',
        r"a.jsonl:61: column 'text' holds \ud800, half of a surrogate pair",
    ),
    (
        lines([{"body": "x", "title": "y"}] * N),
        "'text', but the data has the columns body, title: name one",
    ),
    (lines([1, 2]), "a.jsonl:1 is not an object such as {'text': …}"),
    (b"\n\n", "a.jsonl has no rows"),
    (b"", "a.jsonl has no rows"),
    (lines(ROWS)[:-5], "a.jsonl:60 is not JSON: Unterminated string"),
    (lines(ROWS).decode().encode("cp1252"), "a.jsonl, line 1: "),
    (lines(ROWS).decode().encode("utf-16-le"), "a.jsonl is not a text file: it begins with"),
]


@pytest.mark.parametrize(
    ("content", "message"), BAD_DOCUMENTS, ids=[message for _, message in BAD_DOCUMENTS]
)
def test_json_without_documents_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    assert message in refusal(lambda: language(tmp_path / "a.jsonl", content), tmp_path)


def test_a_missing_column_is_noticed_before_the_whole_file_is_read(tmp_path: Path) -> None:
    broken = lines([{"body": "x"}] * 10_001) + b"never read"
    message = refusal(lambda: language(tmp_path / "a.jsonl", broken), tmp_path)
    assert "has the columns body" in message


@pytest.mark.parametrize("streamed", [False, True])
def test_parquet_documents_are_read_and_other_types_refused(tmp_path: Path, streamed: bool) -> None:
    def read(texts: Any, name: str = "a.parquet") -> Any:
        parquet.write_table(pa.table({"text": texts}), tmp_path / name)
        args = {"data": str(tmp_path / name), **SIZES, "stream": streamed}
        task = load_task("language_modelling", args)
        if streamed:
            return streamed_text(task)
        return learnt_text(task)[: 2 * LENGTH]

    expected = WHOLE.encode()[: 2 * LENGTH]
    texts = [row["text"] for row in ROWS]
    assert read(texts) == expected
    assert read([None, *texts]) == expected
    assert read(pa.array(texts).dictionary_encode()) == expected
    assert read(texts, "a.pq") == expected
    for values, shown in (
        (list(range(N)), "0 (int)"),
        ([b"ab"] * N, "b'ab' (bytes)"),
        ([["a"]] * N, "['a'] (list)"),
    ):
        message = refusal(partial(read, values), tmp_path)
        assert f"column 'text' holds {shown}, not a text" in message


def test_streams_of_unusual_json_are_read_or_refused(tmp_path: Path) -> None:
    """They have forms that Hugging Face's library does not read."""

    def read(content: bytes) -> bytes:
        return streamed_text(language(tmp_path / "a.jsonl", content, stream=True))

    expected = WHOLE.encode()[: 2 * LENGTH]
    nulls = lines([{"text": None}, *ROWS])
    for content in (lines(ROWS), nulls, b"\xef\xbb\xbf" + lines(ROWS), b"\n\n" + lines(ROWS)):
        assert read(content) == expected
    text = lines(ROWS).decode()
    compressed = "a.jsonl is gzip, which is not read as a stream; leave stream out"
    for content, message in (
        (gzip.compress(lines(ROWS)), compressed),
        (text.encode("utf-16"), "a.jsonl is utf-16, which is not read as a stream"),
        (text.encode("cp1252"), "a.jsonl, line 1: "),
        (b"\n", "a.jsonl has no rows"),
        (lines([{"text": 1}] * N), "column 'text' holds 1 (int), not a text"),
        (lines([{"body": "x"}] * N), "has the columns body"),
        (lines(ROWS) + b'{"text": "x', "cannot be read"),
    ):
        assert message in refusal(partial(read, content), tmp_path)


def test_a_tar_with_missing_members_and_names_that_leave_its_folder_is_read(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "a folder" / "of data"
    folder.mkdir(parents=True)
    with tarfile.open(folder / "inner.tar", "w") as shard:
        for i in range(N):
            members = {"txt": f"{TEXT}{i}".encode(), "cls": b"1"}
            for extension, content in list(members.items())[: 1 if i == 7 else 2]:
                entry = tarfile.TarInfo(f"../../climbed/{i:03d}.{extension}")
                entry.size = len(content)
                shard.addfile(entry, io.BytesIO(content))
    args = {"data": str(folder / "inner.tar"), "text": "txt", **SIZES}
    task = load_task("language_modelling", args)
    assert_learns(task, WHOLE)
    assert not list(tmp_path.rglob("climbed*"))


# --- plain texts ----------------------------------------------------------------------------------

PROSE = "grüne Wörter 5 € \n" * 40


def save_word_tokenizer(path: Path, *words: str) -> str:
    """Saves a tokenizer of these words, numbered from 0, and returns its path."""
    vocabulary = {word: number for number, word in enumerate([*words, "[UNK]"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)


@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
@pytest.mark.parametrize("form", ["plain", "mark", "gzip", "utf-16"])
def test_a_text_is_the_same_in_every_encoding(tmp_path: Path, form: str, tokenizer: str) -> None:
    content = {
        "plain": PROSE.encode(),
        "mark": b"\xef\xbb\xbf" + PROSE.encode(),
        "gzip": gzip.compress(PROSE.encode()),
        "utf-16": PROSE.encode("utf-16"),
    }[form]
    if tokenizer == "bytes":
        task = language(tmp_path / "a.txt", content)
        assert_learns(task, PROSE)
        assert task.bytes_per_token == 1
        return
    tokenizer_file = save_word_tokenizer(tmp_path / "own.json", "grüne", "Wörter", "5", "€")
    task = language(tmp_path / "a.txt", content, tokenizer=tokenizer_file)
    assert task.train_data()[0][0].tolist() == [0, 1, 2, 3] * 4
    assert task.bytes_per_token == len(PROSE.encode()) / 160
    latin = b"gr\xfcn\n" * 99
    read_latin = partial(language, tmp_path / "latin.txt", latin, tokenizer=tokenizer_file)
    message = refusal(read_latin, tmp_path)
    assert "latin.txt, line 1: " in message and "is not UTF-8" in message


def test_a_mixtures_tokens_are_those_of_all_its_sources(tmp_path: Path) -> None:
    """The vocabulary's size and the bytes per token do not depend on the order of the sources."""
    tokenizer = save_word_tokenizer(tmp_path / "own.json", "ab", "longer")
    short, long, tokens = (str(tmp_path / name) for name in ("short.txt", "long.txt", "tokens.bin"))
    Path(short).write_text("ab " * 161)  # 3 bytes per token, 10 sequences
    Path(long).write_text("longer " * 481)  # 7 bytes per token, 30 sequences
    Path(tokens).write_bytes(bytes(2 * 161))

    def mixed(*order: str, vocab_size: int | None = None) -> Any:
        args = {
            "data": dict.fromkeys(order, 1.0),
            "tokenizer": tokenizer,
            "vocab_size": vocab_size,
        }
        return load_task("language_modelling", {**SIZES, **args, "eval_samples": None})

    for order in ((short, long), (long, short)):
        assert mixed(*order).bytes_per_token == (1 * 3 + 3 * 7) / 4
    for order in ((short, tokens), (tokens, short)):
        assert mixed(*order, vocab_size=3).bytes_per_token is None
        message = refusal(partial(mixed, *order, vocab_size=2), tmp_path)
        assert "vocab_size is 2, but the tokenizer has 3 tokens" in message
    assert "task_args.data is an empty mapping" in refusal(lambda: mixed(), tmp_path)


# --- conversations, labels and pairs --------------------------------------------------------------

ASKED = {"role": "user", "content": "größer?"}
ANSWERED = {"role": "assistant", "content": "ja"}
TEN = lines([{"messages": [ASKED, ANSWERED]}] * 10)
ARRAY = [{"messages": [ASKED, ANSWERED]}] * 10
GPT2: dict[str, Any] = {
    "model": "gpt2",
    "kind": "instructions",
    "config": {"n_embd": 16, "n_layer": 1, "n_head": 2},
    "tokenizer": "bytes",
    "sequence_length": 64,
    "eval_samples": 0,
}


def conversations_of(path: Path, content: bytes) -> Any:
    """A task that learns the conversations of a file with this content."""
    path.write_bytes(content)
    return load_task("huggingface", {"data": str(path), **GPT2})


def with_parts(*parts: Any) -> bytes:
    """Ten conversations whose question has these parts."""
    return lines([{"messages": [{"role": "user", "content": list(parts)}, ANSWERED]}] * 10)


CONVERSATIONS: dict[str, bytes] = {
    "mark": b"\xef\xbb\xbf" + TEN,
    "blank lines": b"\n" + TEN.replace(b"\n", b"\r\n\r\n") + b"  \n",
    "gzip": gzip.compress(TEN),
    "utf-16": TEN.decode().encode("utf-16"),
    "array": json.dumps(ARRAY).encode(),
    "array with mark": b"\xef\xbb\xbf\n" + json.dumps(ARRAY, indent=2).encode(),
    "parts": with_parts({"type": "text", "text": "größ"}, {"type": "text", "text": "er?"}),
    "plain parts": with_parts("größer", "?"),
    "empty extras": lines(
        [{"messages": [ASKED, {**ANSWERED, "tool_calls": [], "weight": 1}], "tools": None}] * 10
    ),
}


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_conversations_are_read_in_every_form(tmp_path: Path, form: str) -> None:
    plain_task = conversations_of(tmp_path / "plain.jsonl", TEN)
    task = conversations_of(tmp_path / "odd.jsonl", CONVERSATIONS[form])
    (tokens, _), targets = fetch(task.train_data(), [(0, 0)])
    assert "größer?" in task.tokenizer.decode(tokens[0])
    assert task.tokenizer.decode(targets[targets != IGNORED]).startswith("ja")
    plain_rows = torch.from_numpy(np.array(plain_task.train_data().rows))
    rows = torch.from_numpy(np.array(task.train_data().rows))
    assert torch.equal(plain_rows, rows)


def ten_and(*messages: Any, **keys: Any) -> bytes:
    """Ten good conversations, and one of these messages."""
    return TEN + lines([{"messages": list(messages), **keys}])


BAD_CONVERSATIONS: list[tuple[bytes, str]] = [
    (ten_and(), "a.jsonl:11 is not a conversation with an answer"),
    (ten_and(ASKED), "a.jsonl:11 is not a conversation with an answer"),
    (
        ten_and(ASKED, ANSWERED | {"content": None}),
        "a.jsonl:11 is not a conversation with an answer",
    ),
    (ten_and(ASKED | {"content": []}, ANSWERED), "a.jsonl:11 is not a conversation with an answer"),
    (ten_and({"content": "?"}, ANSWERED), "a.jsonl:11 is not a conversation with an answer"),
    (TEN + b"3\n", "a.jsonl:11 is not a conversation with an answer"),
    (
        ten_and(ASKED, {"role": "assistant", "content": None, "tool_calls": [{}]}),
        "a message with tool_calls, which",
    ),
    (
        ten_and(ASKED, ANSWERED | {"function_call": {"name": "f"}}),
        "a.jsonl:11 has a message with function_call",
    ),
    (ten_and(ASKED, ANSWERED, tools=[{"type": "function"}]), "a.jsonl:11 has tools"),
    (ten_and(ASKED, ANSWERED | {"weight": 0}), "a.jsonl:11 has a message of weight 0"),
    (
        ten_and(ASKED | {"content": [{"type": "image_url"}]}, ANSWERED),
        "a part of type 'image_url'; only text",
    ),
    (
        lines([{"conversations": [{"from": "human", "value": "?"}]}]),
        "a.jsonl:1 has `conversations`, as ShareGPT",
    ),
    (
        TEN + rb'{"messages": [{"role": "assistant", "content": "\ud800"}]}',
        r"content' holds \ud800",
    ),
    (TEN.decode().encode("cp1252"), "a.jsonl, line 1: "),
    (TEN + b'{"mess', "a.jsonl:11 is not JSON"),
    (b"PAR1\0\0", "a.jsonl is not a text file"),
    (b"", "has 0 conversations"),
]


@pytest.mark.parametrize(("content", "message"), BAD_CONVERSATIONS)
def test_a_conversation_that_would_lose_something_is_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    assert message in refusal(lambda: conversations_of(tmp_path / "a.jsonl", content), tmp_path)


def test_pairs_are_learnt_as_they_are_written(tmp_path: Path) -> None:
    """Also numbers, dates, and words that other readers take for missing values."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    path = tmp_path / "a.csv"

    def pairs(row: str, **options: Any) -> set[tuple[str, str]]:
        path.write_text("text;target\n" + f"{row}\n" * 20, **options)
        args = {
            "model": "t5",
            "config": sizes,
            "data": str(path),
            "tokenizer": "bytes",
            "sequence_length": 16,
        }
        return set(load_task("huggingface", args).train_data().pairs)

    assert pairs("007;14") == {("007", "14")}
    assert pairs("2024-01-02;true") == {("2024-01-02", "true")}
    assert pairs("1,50;NA") == {("1,50", "NA")}
    assert pairs('"a;\nb";é', encoding="utf-16") == {("a;\nb", "é")}
    assert "a.csv, line 2: " in refusal(lambda: pairs("é;a", encoding="latin-1"), tmp_path)


def test_labelled_texts_are_read_in_every_form(tmp_path: Path) -> None:
    def read(name: str, content: bytes) -> Any:
        (tmp_path / name).write_bytes(content)
        args = {
            "model": "bert",
            "config": SMALL,
            "data": str(tmp_path / name),
            "tokenizer": "bytes",
        }
        return load_task("huggingface", {**args, "sequence_length": LENGTH})

    def table(**columns: Any) -> bytes:
        sink = io.BytesIO()
        parquet.write_table(pa.table(columns), sink)
        return sink.getvalue()

    rows = "text;label\n" + "".join(f"grün, {i};{10_000_000 + i % 2}\n" for i in range(20))
    for content in (rows.encode(), rows.encode("utf-16"), gzip.compress(rows.encode())):
        task = read("a.csv", content)
        assert task.config.id2label == {0: "10000000", 1: "10000001"}, "names are not rounded"
        assert all(text.startswith("grün, ") for text in task.train_data().texts)
    assert "a.csv, line 2: " in refusal(lambda: read("a.csv", rows.encode("cp1252")), tmp_path)
    unused_columns = table(text=["x"] * 8, label=[0, 1] * 4, odd=[[1]] * 8, more=[b"x"] * 8)
    assert len(read("a.parquet", unused_columns).train_data()) > 0
    for texts, kind in (([b"x"] * 8, "binary"), ([["x"]] * 8, "nested")):
        content = table(text=texts, label=[0, 1] * 4)
        message = refusal(partial(read, "a.parquet", content), tmp_path)
        assert f"column 'text' is {kind}" in message
