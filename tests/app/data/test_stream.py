"""Streams, data sets of Hugging Face's library and mixtures: the same samples whatever the workers and the resumes."""

import io
import itertools
import json
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, TensorDataset

from app.data.loader import fetch, train_batches
from app.data.mixture import BLOCK, Mixture, order_of
from app.data.sets import column, files_key, is_dataset, open_dataset
from app.data.stream import TokenStream, continues_exactly
from app.data.text import encoder
from app.errors import UserError
from app.run.inputs import digest
from tests import running

pytestmark = pytest.mark.pure

BATCH = 8
SMALL = "sequence_length: 64, d_model: 32, n_layers: 2, n_heads: 2"


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """30 texts of one to 300 lines, in two JSONL files."""
    folder = tmp_path_factory.mktemp("documents")
    for part in range(2):
        rows = [{"number": i, "text": f"{i}: é\n" * (i * 77 % 300 + 1)} for i in range(15 * part, 15 * part + 15)]
        (folder / f"part-{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


class Numbers(IterableDataset[Any]):
    """0 … 29, each with a random number, and no state."""

    def __iter__(self) -> Iterator[Any]:
        return ((i, torch.rand(1)) for i in range(30))


class OnIterator(IterableDataset[Any]):
    """The same; its iterator has the state, as torchdata's protocol allows."""

    def __iter__(self) -> Any:
        return Position()


class Position:
    at = 0

    def __next__(self) -> Any:
        if self.at == 30:
            raise StopIteration
        self.at += 1
        return self.at - 1, torch.rand(1)

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def taken(data: Any, steps: int, *, ways: int = 1, seen: int = 0, mark: str = "") -> tuple[list[Any], str]:
    """(the global batch of each step as `ways` workers have it together, the mark after them)"""
    marks = [mark]
    given: dict[str, Any] = {"seed": 3, "global_batch_size": BATCH, "micro_batch_size": 2, "dp_size": ways}
    given |= {"device": torch.device("cpu"), "samples_seen": seen, "steps": steps, "mark": mark, "note": marks.append}
    shares = [list(train_batches(data, **given, dp_rank=rank)) for rank in range(ways)]

    def rows(batch: Any) -> Any:
        values = batch.values() if isinstance(batch, dict) else batch
        return zip(*(value.tolist() if isinstance(value, torch.Tensor) else list(value) for value in values))

    whole = [[row for share in shares for batch in share[step] for row in rows(batch)] for step in range(steps)]
    return whole, marks[-1]


def jsonl(documents: Path) -> Any:
    return open_dataset(f"{documents}/*.jsonl", stream=True)[0]


STREAMS: list[tuple[Callable[[Path], Any], bool]] = [
    (jsonl, True),
    (lambda documents: jsonl(documents).shuffle(seed=1, buffer_size=12), False),
    (lambda documents: Numbers(), False),
    (lambda documents: OnIterator(), True),
]


@pytest.mark.parametrize(("make", "exact"), STREAMS, ids=["datasets", "shuffle buffer", "no state", "on the iterator"])
def test_each_sample_once_whatever_the_workers_and_resumes(documents: Path, make: Any, exact: bool) -> None:
    assert continues_exactly(make(documents)) == exact
    whole, _ = taken(make(documents), 10)
    first, mark = taken(make(documents), 3, ways=2)
    assert (json.loads(mark)["state"] is not None) == exact
    then, mark = taken(make(documents), 4, ways=4, seen=3 * BATCH, mark=mark)
    last, _ = taken(make(documents), 3, seen=7 * BATCH, mark=mark)
    assert first + then + last == whole
    numbers = [sample[0] for sample in itertools.chain(*whole)]
    assert sorted(numbers[:30]) == sorted(numbers[30:60]) == list(range(30))


def test_texts_of_a_stream_are_cut_as_those_of_a_file(documents: Path) -> None:
    encode, size = encoder("bytes")
    rows = jsonl(documents)
    made = TokenStream(rows, column=column(rows, "text", "task_args.text"), encode=encode, sequence_length=128)
    assert size == 256 and continues_exactly(made)
    text = "".join(f"{row['text']}\n" for row in jsonl(documents)).encode()
    windows = [bytes(inputs.tolist()) for inputs, _ in made]
    assert b"".join(windows) == text[: len(windows) * 128] and len(text) - len(windows) * 128 <= 128
    whole, _ = taken(made, 30)
    _, mark = taken(made, 13, ways=2)
    assert taken(made, 17, seen=13 * BATCH, mark=mark)[0] == whole[13:]


def test_a_mixture_is_a_function_of_seed_and_position() -> None:
    parts = [TensorDataset(torch.arange(n) + at) for n, at in ((500, 0), (90, 1000), (7, 2000))]
    mixed = Mixture(parts, [6, 3, 1])
    order = order_of(mixed, 5)
    numbers = order.indices(0, 3 * BLOCK).tolist()
    values = fetch(mixed, [(number, at) for at, number in enumerate(numbers)])[0].tolist()
    assert Counter(value // 1000 for value in values) == {0: 1800, 1: 900, 2: 300}
    for part, (size, at) in enumerate(((500, 0), (90, 1000), (7, 2000))):
        own = [value - at for value in values if value // 1000 == part]
        for epoch in range(len(own) // size):
            assert len(set(own[size * epoch :][:size])) == size
    assert order.indices(995, 1010).tolist() == numbers[995:2005] != order_of(mixed, 6).indices(995, 1010).tolist()
    assert abs(Counter(value // 1000 for value in values[:200])[0] - 120) < 40
    assert taken(mixed, 4, ways=2)[0] == taken(mixed, 4)[0]
    with pytest.raises(UserError, match="thousandth"):
        Mixture(parts, [1, 1, 0.0001])


def test_where_data_sets_are_read_from(documents: Path, tmp_path: Path, bucket: str) -> None:
    import datasets
    import fsspec

    rows = datasets.load_dataset("json", data_files=f"{documents}/*.jsonl", split="train", cache_dir=str(tmp_path))
    rows.save_to_disk(tmp_path / "saved")
    parts = rows.train_test_split(0.2, shuffle=False)
    parts.save_to_disk(tmp_path / "parts")
    rows.to_parquet(f"{bucket}/rows.parquet")
    with fsspec.open(f"{bucket}/rows.tar", "wb") as file, tarfile.open(fileobj=file, mode="w") as shard:
        for row in rows:
            entry, content = tarfile.TarInfo(f"{row['number']:05d}.txt"), row["text"].encode()
            entry.size = len(content)
            shard.addfile(entry, io.BytesIO(content))
    texts = list(rows["text"])
    places = [f"{documents}/*.jsonl", str(tmp_path / "saved"), f"{bucket}/rows.parquet", f"{bucket}/rows.tar"]
    for place in places:
        assert is_dataset(place) and files_key(place) == files_key(place)
        name = "txt" if place.endswith("tar") else "text"
        read = [open_dataset(place, stream=stream)[0] for stream in (False, True)]
        assert continues_exactly(read[1])
        assert [[row[name] for row in each] for each in read] == [texts, texts], place
    assert not is_dataset("python") and not is_dataset(str(documents)) and len({*map(files_key, places)}) == 4
    train, held_out = open_dataset(str(tmp_path / "parts"))
    assert (len(train), len(held_out)) == (24, 6)
    assert digest(train) == digest(open_dataset(str(tmp_path / "parts"))[0]) != digest(held_out)
    with pytest.raises(UserError, match="cannot be read as a data set"):
        open_dataset(str(tmp_path / "none.parquet"))
    with pytest.raises(UserError, match="columns number, text"):
        column(train, "txt", "task_args.text")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "stream"), ("fsdp", "mixture")])
def test_to_the_last_bit_after_a_kill(documents: Path, tmp_path: Path, strategy: str, kind: str) -> None:
    """A language model's two workers killed, and the same command run again."""
    path = documents / "part-1.jsonl"
    data = {"stream": f"data: {path}, stream: true, eval_samples: 2", "mixture": f"data: {{{path}: 3, python: 1}}"}
    given = ["train", "task=language_modelling", f"task_args={{{data[kind]}, {SMALL}}}", "train.steps=150"]
    given += ["train.global_batch_size=8", "checkpoint.every_steps=10", "train.log_every=1", f"strategy={strategy}"]
    given += [f"run.storage={tmp_path}", "tracking.log_model=false"]
    running.kill_and_run_again(tmp_path, given)
    found = {each.tags[0].value: each.dataset for each in running.mlflow_run(tmp_path, "run").inputs.dataset_inputs}
    assert found.keys() == {"training", "evaluation"} and path.name in found["training"].name
    assert len(found["training"].digest) == 16
    assert (json.loads(found["training"].profile)["samples"] is None) == (kind == "stream")
