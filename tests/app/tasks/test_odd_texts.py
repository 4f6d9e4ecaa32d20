"""Texts that tasks get from people: documents, conversations, labelled texts and pairs. They are learnt as they are
meant, or answered with one sentence."""

import gzip
import io
import json
import tarfile
from collections.abc import Callable
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
SIZES: dict[str, Any] = {"d_model": 16, "n_layers": 1, "n_heads": 2, "sequence_length": LENGTH, "eval_samples": 0}
TEXT = "grün, 5 € "


def lines(rows: list[Any]) -> bytes:
    return "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows).encode()


def language(path: Path, content: bytes, **more: Any) -> Any:
    path.write_bytes(content)
    return load_task("language_modelling", {"data": str(path), **SIZES, **more})


def learnt(task: Any) -> bytes:
    """The whole text, but for what does not fill a last sequence."""
    data = task.train_data()
    return b"".join(bytes(data[i][0].tolist()) for i in range(len(data)))


def assert_learns(task: Any, text: str) -> None:
    found = learnt(task)
    expected = text.encode()
    assert expected.startswith(found) and len(expected) - len(found) <= LENGTH


def refusal(make: Callable[[], Any], folder: Path) -> str:
    with pytest.raises(UserError) as raised:
        make()
    sentence = str(raised.value).replace(f"{folder}/", "")
    assert "\n" not in sentence and len(sentence) < 400 and not sentence.endswith(".")
    return sentence


# --- documents ------------------------------------------------------------------------------------------------------

ROWS = [{"text": f"{TEXT}{i}"} for i in range(N)]
WHOLE = "".join(f"{TEXT}{i}\n" for i in range(N))
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
    ("a.jsonl", lines([{"meta": [None, 1, "a", {"b": 1}, [2]][i % 5], **row} for i, row in enumerate(ROWS)])),
]


@pytest.mark.parametrize(("name", "content"), DOCUMENTS, ids=[name for name, _ in DOCUMENTS])
def test_json_documents(tmp_path: Path, name: str, content: bytes) -> None:
    assert_learns(language(tmp_path / name, content), WHOLE)
    assert_learns(load_task("language_modelling", {"data": f"{tmp_path}/a.*", **SIZES}), WHOLE)


def test_a_column_may_be_null_for_longer_than_any_reader_looks(tmp_path: Path) -> None:
    """Hugging Face's library decides by the first 10 MB what a column is."""
    rows = lines([{"text": "early", "meta": None, "pad": "x" * 1000}] * 12_000)
    assert len(rows) > 10 << 20
    late = lines([{"text": "late", "meta": "a"}, {"text": "latest", "meta": {"a": 1}}])
    task = language(tmp_path / "a.jsonl", rows + late, sequence_length=6)
    assert learnt(task).endswith(b"early\nlate\nl") and len(task.train_data()) == 12_001


BAD_DOCUMENTS: list[tuple[bytes, str]] = [
    (lines([{"text": None}] * N), "there is no text in a.jsonl"),
    (lines([{"text": 1}] * N), "a.jsonl:1: column 'text' holds 1 (int), not a text"),
    (lines([*ROWS, {"text": ["a"]}]), "a.jsonl:61: column 'text' holds ['a'] (list), not a text"),
    (lines([*ROWS, {"text": {"a": 1}}]), "a.jsonl:61: column 'text' holds {'a': 1} (dict), not a text"),
    (lines(ROWS) + rb'{"text": "\ud800"}', r"a.jsonl:61: column 'text' holds \ud800, half of a surrogate pair"),
    (lines([{"body": "x", "title": "y"}] * N), "'text', but the data has the columns body, title: name one"),
    (lines([1, 2]), "a.jsonl:1 is not an object such as {'text': …}"),
    (b"\n\n", "a.jsonl has no rows"),
    (b"", "a.jsonl has no rows"),
    (lines(ROWS)[:-5], "a.jsonl:60 is not JSON: Unterminated string"),
    (lines(ROWS).decode().encode("cp1252"), "a.jsonl, line 1: "),
    (lines(ROWS).decode().encode("utf-16-le"), "a.jsonl is not a text file: it begins with"),
]


@pytest.mark.parametrize(("content", "says"), BAD_DOCUMENTS, ids=[says for _, says in BAD_DOCUMENTS])
def test_json_that_is_not_documents(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in refusal(lambda: language(tmp_path / "a.jsonl", content), tmp_path)


def test_a_column_that_no_row_has_is_missed_early(tmp_path: Path) -> None:
    broken = lines([{"body": "x"}] * 10_001) + b"never read"
    assert "has the columns body" in refusal(lambda: language(tmp_path / "a.jsonl", broken), tmp_path)


@pytest.mark.parametrize("streamed", [False, True])
def test_parquet_documents(tmp_path: Path, streamed: bool) -> None:
    def read(texts: Any, name: str = "a.parquet") -> Any:
        parquet.write_table(pa.table({"text": texts}), tmp_path / name)
        args = {"data": str(tmp_path / name), **SIZES, "stream": streamed}
        task = load_task("language_modelling", args)
        if streamed:
            first = examples(task.train_data(), 2)
            return b"".join(bytes(inputs.tolist()) for inputs, _ in first)
        return learnt(task)[: 2 * LENGTH]

    start = WHOLE.encode()[: 2 * LENGTH]
    texts = [row["text"] for row in ROWS]
    assert read(texts) == read([None, *texts]) == read(pa.array(texts).dictionary_encode()) == start
    assert read(texts, "a.pq") == start
    for wrong, shown in ((list(range(N)), "0 (int)"), ([b"ab"] * N, "b'ab' (bytes)"), ([["a"]] * N, "['a'] (list)")):
        assert f"column 'text' holds {shown}, not a text" in refusal(lambda each=wrong: read(each), tmp_path)


def test_streams_of_json_that_the_library_does_not_read(tmp_path: Path) -> None:
    def read(content: bytes) -> bytes:
        task = language(tmp_path / "a.jsonl", content, stream=True)
        return b"".join(bytes(inputs.tolist()) for inputs, _ in examples(task.train_data(), 2))

    start = WHOLE.encode()[: 2 * LENGTH]
    nulls = lines([{"text": None}, *ROWS])
    for content in (lines(ROWS), nulls, b"\xef\xbb\xbf" + lines(ROWS), b"\n\n" + lines(ROWS)):
        assert read(content) == start
    for content, says in (
        (gzip.compress(lines(ROWS)), "a.jsonl is gzip, which is not read as a stream; leave stream out"),
        (lines(ROWS).decode().encode("utf-16"), "a.jsonl is utf-16, which is not read as a stream"),
        (lines(ROWS).decode().encode("cp1252"), "a.jsonl, line 1: "),
        (b"\n", "a.jsonl has no rows"),
        (lines([{"text": 1}] * N), "column 'text' holds 1 (int), not a text"),
        (lines([{"body": "x"}] * N), "has the columns body"),
        (lines(ROWS) + b'{"text": "x', "cannot be read"),
    ):
        assert says in refusal(lambda each=content: read(each), tmp_path)


def test_a_tar_whose_names_climb_out_and_whose_members_are_missing(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "inner.tar", "w") as shard:
        for i in range(N):
            members = {"txt": f"{TEXT}{i}".encode(), "cls": b"1"}
            for extension, content in list(members.items())[: 1 if i == 7 else 2]:
                entry = tarfile.TarInfo(f"../../climbed/{i:03d}.{extension}")
                entry.size = len(content)
                shard.addfile(entry, io.BytesIO(content))
    before = set(tmp_path.parent.parent.rglob("climbed*"))
    task = load_task("language_modelling", {"data": str(tmp_path / "inner.tar"), "text": "txt", **SIZES})
    assert_learns(task, WHOLE)
    assert set(tmp_path.parent.parent.rglob("climbed*")) == before == set()


# --- plain texts ----------------------------------------------------------------------------------------------------

PROSE = "grüne Wörter 5 € \n" * 40


@pytest.mark.parametrize("tokenizer", ["bytes", "own"])
@pytest.mark.parametrize("form", ["plain", "mark", "gzip", "utf-16"])
def test_a_texts_form_is_not_learnt(tmp_path: Path, form: str, tokenizer: str) -> None:
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
    words = Tokenizer(models.WordLevel({"grüne": 0, "Wörter": 1, "5": 2, "€": 3, "[UNK]": 4}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "own.json"))
    task = language(tmp_path / "a.txt", content, tokenizer=str(tmp_path / "own.json"))
    assert task.train_data()[0][0].tolist() == [0, 1, 2, 3] * 4
    assert task.bytes_per_token == len(PROSE.encode()) / 160
    latin = tmp_path / "latin.txt"
    says = refusal(lambda: language(latin, b"gr\xfcn\n" * 99, tokenizer=str(tmp_path / "own.json")), tmp_path)
    assert "latin.txt, line 1: " in says and "is not UTF-8" in says


def test_a_mixtures_tokens_are_those_of_all_its_sources(tmp_path: Path) -> None:
    """The size of the vocabulary and the bytes per token, in whatever order the sources are written."""
    words = Tokenizer(models.WordLevel({"ab": 0, "longer": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = str(tmp_path / "own.json")
    words.save(tokenizer)
    short, long, tokens = (str(tmp_path / name) for name in ("short.txt", "long.txt", "tokens.bin"))
    Path(short).write_text("ab " * 161)  # 3 bytes per token, 10 sequences
    Path(long).write_text("longer " * 481)  # 7 bytes per token, 30 sequences
    Path(tokens).write_bytes(bytes(2 * 161))

    def mixed(*sources: str, vocab_size: int | None = None) -> Any:
        args = {"data": dict.fromkeys(sources, 1.0), "tokenizer": tokenizer, "vocab_size": vocab_size}
        return load_task("language_modelling", {**SIZES, **args, "eval_samples": None})

    for sources in ((short, long), (long, short)):
        assert mixed(*sources).bytes_per_token == (1 * 3 + 3 * 7) / 4
    for sources in ((short, tokens), (tokens, short)):
        assert mixed(*sources, vocab_size=3).bytes_per_token is None
        says = refusal(lambda sources=sources: mixed(*sources, vocab_size=2), tmp_path)  # type: ignore[misc]
        assert "vocab_size is 2, but the tokenizer has 3 tokens" in says
    assert "task_args.data is an empty mapping" in refusal(lambda: mixed(), tmp_path)


# --- conversations, labels and pairs --------------------------------------------------------------------------------

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


def talk(path: Path, content: bytes) -> Any:
    path.write_bytes(content)
    return load_task("huggingface", {"data": str(path), **GPT2})


def with_parts(*parts: Any) -> bytes:
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
    "empty extras": lines([{"messages": [ASKED, {**ANSWERED, "tool_calls": [], "weight": 1}], "tools": None}] * 10),
}


@pytest.mark.parametrize("form", CONVERSATIONS)
def test_conversations_in_every_form(tmp_path: Path, form: str) -> None:
    tasks = [talk(tmp_path / "plain.jsonl", TEN), talk(tmp_path / "odd.jsonl", CONVERSATIONS[form])]
    (tokens, _), targets = fetch(tasks[1].train_data(), [(0, 0)])
    assert "größer?" in tasks[1].tokenizer.decode(tokens[0])
    assert tasks[1].tokenizer.decode(targets[targets != IGNORED]).startswith("ja")
    plain, odd = (torch.from_numpy(np.array(task.train_data().rows)) for task in tasks)
    assert torch.equal(plain, odd)


def one_more(*messages: Any, **more: Any) -> bytes:
    return TEN + lines([{"messages": list(messages), **more}])


BAD_CONVERSATIONS: list[tuple[bytes, str]] = [
    (one_more(), "a.jsonl:11 is no conversation with an answer"),
    (one_more(ASKED), "a.jsonl:11 is no conversation with an answer"),
    (one_more(ASKED, ANSWERED | {"content": None}), "a.jsonl:11 is no conversation with an answer"),
    (one_more(ASKED | {"content": []}, ANSWERED), "a.jsonl:11 is no conversation with an answer"),
    (one_more({"content": "?"}, ANSWERED), "a.jsonl:11 is no conversation with an answer"),
    (TEN + b"3\n", "a.jsonl:11 is no conversation with an answer"),
    (one_more(ASKED, {"role": "assistant", "content": None, "tool_calls": [{}]}), "a message with tool_calls, which"),
    (one_more(ASKED, ANSWERED | {"function_call": {"name": "f"}}), "a.jsonl:11 has a message with function_call"),
    (one_more(ASKED, ANSWERED, tools=[{"type": "function"}]), "a.jsonl:11 has tools"),
    (one_more(ASKED, ANSWERED | {"weight": 0}), "a.jsonl:11 has a message of weight 0"),
    (one_more(ASKED | {"content": [{"type": "image_url"}]}, ANSWERED), "a part of type 'image_url'; only text"),
    (lines([{"conversations": [{"from": "human", "value": "?"}]}]), "a.jsonl:1 has `conversations`, as ShareGPT"),
    (TEN + rb'{"messages": [{"role": "assistant", "content": "\ud800"}]}', r"content' holds \ud800"),
    (TEN.decode().encode("cp1252"), "a.jsonl, line 1: "),
    (TEN + b'{"mess', "a.jsonl:11 is not JSON"),
    (b"PAR1\0\0", "a.jsonl is not a text file"),
    (b"", "has 0 conversations"),
]


@pytest.mark.parametrize(("content", "says"), BAD_CONVERSATIONS)
def test_what_would_be_lost_of_a_conversation(tmp_path: Path, content: bytes, says: str) -> None:
    assert says in refusal(lambda: talk(tmp_path / "a.jsonl", content), tmp_path)


def test_pairs_are_learnt_as_they_are_written(tmp_path: Path) -> None:
    """Numbers, dates and words that stand for nothing elsewhere."""
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    path = tmp_path / "a.csv"

    def pairs(row: str, **more: Any) -> set[tuple[str, str]]:
        path.write_text("text;target\n" + f"{row}\n" * 20, **more)
        args = {"model": "t5", "config": sizes, "data": str(path), "tokenizer": "bytes", "sequence_length": 16}
        return set(load_task("huggingface", args).train_data().pairs)

    assert pairs("007;14") == {("007", "14")}
    assert pairs("2024-01-02;true") == {("2024-01-02", "true")}
    assert pairs("1,50;NA") == {("1,50", "NA")}
    assert pairs('"a;\nb";é', encoding="utf-16") == {("a;\nb", "é")}
    assert "a.csv, line 2: " in refusal(lambda: pairs("é;a", encoding="latin-1"), tmp_path)


def test_labelled_texts(tmp_path: Path) -> None:
    def read(name: str, content: bytes) -> Any:
        (tmp_path / name).write_bytes(content)
        args = {"model": "bert", "config": SMALL, "data": str(tmp_path / name), "tokenizer": "bytes"}
        return load_task("huggingface", {**args, "sequence_length": LENGTH})

    def table(**columns: Any) -> bytes:
        sink = io.BytesIO()
        parquet.write_table(pa.table(columns), sink)
        return sink.getvalue()

    rows = "text;label\n" + "".join(f"grün, {i};{10_000_000 + i % 2}\n" for i in range(20))
    for content in (rows.encode(), rows.encode("utf-16"), gzip.compress(rows.encode())):
        task = read("a.csv", content)
        assert task.config.id2label == {0: "10000000", 1: "10000001"}, "no two of one name"
        assert all(text.startswith("grün, ") for text in task.train_data().texts)
    assert "a.csv, line 2: " in refusal(lambda: read("a.csv", rows.encode("cp1252")), tmp_path)
    beside = table(text=["x"] * 8, label=[0, 1] * 4, odd=[[1]] * 8, more=[b"x"] * 8)
    assert len(read("a.parquet", beside).train_data()) > 0
    for texts, says in (([b"x"] * 8, "binary"), ([["x"]] * 8, "nested")):
        wrong = table(text=texts, label=[0, 1] * 4)
        assert f"column 'text' is {says}" in refusal(lambda each=wrong: read("a.parquet", each), tmp_path)
