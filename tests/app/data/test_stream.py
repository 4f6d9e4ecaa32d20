"""Streams, data sets of `datasets` and mixtures: the same samples for any workers and resumes."""

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

from app.config.batch_schedule import BatchSchedule
from app.data.loader import fetch, train_batches
from app.data.mixture import BLOCK, DERIVED_SEEDS, SEED_PLUS_NUMBER, Mixture, order_of
from app.data.order import Order
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
    """A folder with 30 texts of one to 300 lines, in two JSONL files."""
    folder = tmp_path_factory.mktemp("documents")
    for part in range(2):
        rows = [
            {"number": i, "text": f"{i}: é\n" * (i * 77 % 300 + 1)}
            for i in range(15 * part, 15 * part + 15)
        ]
        (folder / f"part-{part}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


class Numbers(IterableDataset[Any]):
    """0 … 29, each with a random number, and no state."""

    def __iter__(self) -> Iterator[Any]:
        return ((i, torch.rand(1)) for i in range(30))


class OnIterator(IterableDataset[Any]):
    """The same numbers; the iterator has the state, as torchdata's protocol allows."""

    def __iter__(self) -> Any:
        return Position()


class Position:
    """An iterator over the numbers that keeps its position."""

    position = 0

    def __next__(self) -> Any:
        if self.position == 30:
            raise StopIteration
        self.position += 1
        return self.position - 1, torch.rand(1)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def train_in_steps(
    data: Any, steps: int, *, workers: int = 1, samples_seen: int = 0, state_mark: str = ""
) -> tuple[list[Any], str]:
    """Reads some steps by several workers.

    Returns:
        The global batch of each step, and the stream's mark after the last step.
    """
    marks = [state_mark]
    options: dict[str, Any] = {
        "seed": 3,
        "batches": BatchSchedule.constant(BATCH),
        "micro_batch_size": 2,
        "dp_size": workers,
        "device": torch.device("cpu"),
        "samples_seen": samples_seen,
        "steps": steps,
        "mark": state_mark,
        "note": marks.append,
    }
    shares = [list(train_batches(data, **options, dp_rank=rank)) for rank in range(workers)]

    def rows(batch: Any) -> Any:
        columns = []
        for value in batch.values() if isinstance(batch, dict) else batch:
            columns.append(value.tolist() if isinstance(value, torch.Tensor) else list(value))
        return zip(*columns)

    global_batches: list[Any] = [[] for _ in range(steps)]
    for step, global_batch in enumerate(global_batches):
        for share in shares:
            for batch in share[step]:
                global_batch += rows(batch)
    return global_batches, marks[-1]


def jsonl(documents: Path) -> Any:
    """The documents as a stream of `datasets`."""
    return open_dataset(f"{documents}/*.jsonl", stream=True)[0]


STREAMS: list[tuple[Callable[[Path], Any], bool]] = [
    (jsonl, True),
    (lambda documents: jsonl(documents).shuffle(seed=1, buffer_size=12), False),
    (lambda documents: Numbers(), False),
    (lambda documents: OnIterator(), True),
]


@pytest.mark.parametrize(
    ("make", "exact"), STREAMS, ids=["datasets", "shuffle buffer", "no state", "on the iterator"]
)
def test_each_sample_comes_once_for_any_number_of_workers_and_resumes(
    documents: Path, make: Any, exact: bool
) -> None:
    assert continues_exactly(make(documents)) == exact
    uninterrupted, _ = train_in_steps(make(documents), 10)
    first, state_mark = train_in_steps(make(documents), 3, workers=2)
    assert (json.loads(state_mark)["state"] is not None) == exact
    second, state_mark = train_in_steps(
        make(documents), 4, workers=4, samples_seen=3 * BATCH, state_mark=state_mark
    )
    last, _ = train_in_steps(make(documents), 3, samples_seen=7 * BATCH, state_mark=state_mark)
    assert first + second + last == uninterrupted
    numbers = [sample[0] for sample in itertools.chain(*uninterrupted)]
    assert sorted(numbers[:30]) == sorted(numbers[30:60]) == list(range(30))


def test_texts_of_a_stream_are_split_into_the_sequences_of_a_file(documents: Path) -> None:
    encode, size = encoder("bytes")
    rows = jsonl(documents)
    stream = TokenStream(
        rows, column=column(rows, "text", "task_args.text"), encode=encode, sequence_length=128
    )
    assert size == 256 and continues_exactly(stream)
    text = "".join(f"{row['text']}\n" for row in jsonl(documents)).encode()
    windows = [bytes(inputs.tolist()) for inputs, _ in stream]
    assert b"".join(windows) == text[: len(windows) * 128] and len(text) - len(windows) * 128 <= 128
    uninterrupted, _ = train_in_steps(stream, 30)
    _, state_mark = train_in_steps(stream, 13, workers=2)
    assert (
        train_in_steps(stream, 17, samples_seen=13 * BATCH, state_mark=state_mark)[0]
        == uninterrupted[13:]
    )


def test_a_mixture_is_a_function_of_seed_and_position() -> None:
    sizes = [(500, 0), (90, 1000), (7, 2000)]
    parts = [TensorDataset(torch.arange(size) + offset) for size, offset in sizes]
    mixed = Mixture(parts, [6, 3, 1])
    order = order_of(mixed, 5)
    numbers = order.indices(0, 3 * BLOCK).tolist()
    picks = [(number, position) for position, number in enumerate(numbers)]
    values = fetch(mixed, picks)[0].tolist()
    assert Counter(value // 1000 for value in values) == {0: 1800, 1: 900, 2: 300}
    for part, (size, offset) in enumerate(sizes):
        values_of_part = [value - offset for value in values if value // 1000 == part]
        for epoch in range(len(values_of_part) // size):
            assert len(set(values_of_part[size * epoch :][:size])) == size
    assert order.indices(995, 1010).tolist() == numbers[995:2005]
    assert order_of(mixed, 6).indices(995, 1010).tolist() != numbers[995:2005]
    assert abs(Counter(value // 1000 for value in values[:200])[0] - 120) < 40
    assert train_in_steps(mixed, 4, workers=2)[0] == train_in_steps(mixed, 4)[0]
    with pytest.raises(UserError, match="thousandth"):
        Mixture(parts, [1, 1, 0.0001])


def test_no_set_of_a_mixture_has_the_order_of_another_one_under_any_seed() -> None:
    """Nor that of a block's places, of which there are as many as samples in a set of its size."""
    parts = [TensorDataset(torch.arange(BLOCK)) for _ in range(3)]
    mixed = Mixture(parts, [1, 1, 1])

    def orders(version: int) -> list[tuple[int, ...]]:
        mixtures = [mixed.order(seed, version) for seed in range(3)]
        sets = [tuple(part.indices(0, BLOCK)) for order in mixtures for part in order.parts]
        return sets + [tuple(Order(BLOCK, seed).indices(0, BLOCK)) for seed in range(3)]

    assert len({*orders(DERIVED_SEEDS)}) == 12
    assert len({*orders(SEED_PLUS_NUMBER)}) == 5, "runs that were begun so go on so"


def test_data_sets_are_read_from_files_folders_and_buckets(
    documents: Path, tmp_path: Path, bucket: str
) -> None:
    import datasets
    import fsspec

    files: Any = {"data_files": f"{documents}/*.jsonl", "cache_dir": str(tmp_path)}
    rows = datasets.load_dataset("json", split="train", **files)
    rows.save_to_disk(tmp_path / "saved")
    parts = rows.train_test_split(0.2, shuffle=False)
    parts.save_to_disk(tmp_path / "parts")
    rows.to_parquet(f"{bucket}/rows.parquet")
    with (
        fsspec.open(f"{bucket}/rows.tar", "wb") as file,
        tarfile.open(fileobj=file, mode="w") as shard,
    ):
        for row in rows:
            entry = tarfile.TarInfo(f"{row['number']:05d}.txt")
            content = row["text"].encode()
            entry.size = len(content)
            shard.addfile(entry, io.BytesIO(content))
    texts = list(rows["text"])
    sources = [
        f"{documents}/*.jsonl",
        str(tmp_path / "saved"),
        f"{bucket}/rows.parquet",
        f"{bucket}/rows.tar",
    ]
    for source in sources:
        assert is_dataset(source) and files_key(source) == files_key(source)
        name = "txt" if source.endswith("tar") else "text"
        for streamed in (False, True):
            data_set, _ = open_dataset(source, stream=streamed)
            assert [row[name] for row in data_set] == texts, source
        assert continues_exactly(open_dataset(source, stream=True)[0])
    assert not is_dataset("python")
    assert not is_dataset(str(documents))
    assert len({*map(files_key, sources)}) == 4
    train, held_out = open_dataset(str(tmp_path / "parts"))
    assert (len(train), len(held_out)) == (24, 6)
    assert digest(train) == digest(open_dataset(str(tmp_path / "parts"))[0]) != digest(held_out)
    with pytest.raises(UserError, match="cannot be read as a data set"):
        open_dataset(str(tmp_path / "none.parquet"))
    with pytest.raises(UserError, match="columns number, text"):
        column(train, "txt", "task_args.text")


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "stream"), ("fsdp", "mixture")])
def test_a_killed_run_on_a_stream_or_mixture_continues_to_the_last_bit(
    documents: Path, tmp_path: Path, strategy: str, kind: str
) -> None:
    """The two workers of a language model are killed, and the same command is run again."""
    path = documents / "part-1.jsonl"
    data = {
        "stream": f"data: {path}, stream: true, eval_samples: 2",
        "mixture": f"data: {{{path}: 3, python: 1}}",
    }
    arguments = [
        "train",
        "task=language_modelling",
        f"task_args={{{data[kind]}, {SMALL}}}",
        "train.steps=150",
        "train.global_batch_size=8",
        "checkpoint.every_steps=10",
        "train.log_every=1",
        f"strategy={strategy}",
        f"run.storage={tmp_path}",
        "tracking.log_model=false",
    ]
    running.kill_and_run_again(tmp_path, arguments)
    logged = running.mlflow_run(tmp_path, "run").inputs.dataset_inputs
    inputs = {dataset.tags[0].value: dataset.dataset for dataset in logged}
    assert inputs.keys() == {"training", "evaluation"} and path.name in inputs["training"].name
    assert len(inputs["training"].digest) == 16
    assert (json.loads(inputs["training"].profile)["samples"] is None) == (kind == "stream")
