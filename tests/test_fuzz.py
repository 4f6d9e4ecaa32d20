"""Mutated input of every kind: whatever a file holds, one sentence of ours or a good reading.

No traceback, no hang, and no file is changed by being read. Longer: TRIREME_FUZZ=2000 examples of
each target.
"""

import gzip
import io
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from app.config import Config, RunConfig
from app.config.check import unfit_for_training
from app.config.io import explain, load_config
from app.data.loader import fetch
from app.errors import UserError
from app.run.manifest import Run
from app.tasks import load_task
from cluster import ClusterError
from cluster.files import own_files, read_cluster
from strategies.layout import LayoutError
from tests.running import ROOT

EXAMPLES = int(os.environ.get("TRIREME_FUZZ", "20"))
SENTENCES = (UserError, ClusterError, LayoutError)
AWKWARD = ["", "0", "-1", "null", "true", "1e999", ".nan", "[]", "{}", "[[1]]", "{a: {b: 1}}"]
AWKWARD += ["!!python/object:os.x", "9" * 20, "é", "\x00", "*a", "&a [*a]", "${x}"]
AWKWARD += ["${oc.env:HOME}", "'", '"', "? x", "- -", "%", "\t", "NaN", "2024-01-01", "0x7f"]
AWKWARD += ["..", "/", "a" * 300, "<<: *x", "\ufeff", "???"]
"""Values that a reader must take or refuse, wherever they stand."""
Files = dict[str, bytes]


def read_arguments(folder: Path, name: str) -> None:
    """As a command line with one argument per line of the file."""
    lines = (folder / name).read_bytes().decode(errors="replace").split("\n")
    unfit_for_training(load_config([], [line for line in lines if "=" in line]))


def read_configuration(folder: Path, name: str) -> None:
    config = load_config([folder / name])
    unfit_for_training(config)
    explain(config)


def training(task: str, **arguments: Any) -> Callable[[Path, str], None]:
    """What the first step does with the data: a model, and a batch's loss."""

    def read(folder: Path, name: str) -> None:
        loaded = load_task(task, {"data": str(folder / name), **arguments})
        data = loaded.train_data()
        items = [(index % len(data), index) for index in range(4)]  # type: ignore[arg-type]
        batch = fetch(data, items)
        torch.manual_seed(0)
        loaded.loss(loaded.build_model(), batch)

    return read


def read_run(folder: Path, name: str) -> None:
    run = Run(Config(run=RunConfig(name=folder.name, storage=str(folder.parent))))
    run.lease.refuse_if_held(seconds=0.0)
    manifest = run.manifest
    assert type(run.finished) is bool
    assert type(manifest.starts + manifest.steps) is int
    assert type(manifest.status + manifest.uid) is str
    assert type(manifest.summary) is dict


# --- good files -----------------------------------------------------------------------------------


def contents(files: Iterable[Path]) -> Files:
    return {path.name: path.read_bytes() for path in sorted(files)}


def written_bytes(write: Callable[[io.BytesIO], object]) -> bytes:
    into = io.BytesIO()
    write(into)
    return into.getvalue()


def arrays() -> Files:
    by_name: dict[str, Any] = {
        "images": np.arange(320, dtype=np.uint8).reshape(20, 4, 4),
        "labels": np.arange(20) % 3,
    }
    tensors = {name: torch.from_numpy(array) for name, array in by_name.items()}
    return {
        "a.npz": written_bytes(lambda file: np.savez(file, **by_name)),
        "c.pt": written_bytes(lambda file: torch.save(tensors, file)),
    }


def table() -> Files:
    rows = [
        f"{index % 7},{'xz'[index % 2]},{index * 0.5},2024-01-{index % 27 + 1:02}"
        for index in range(40)
    ]
    text = ("\n".join(["a,kind,y,day", *rows]) + "\n").encode()
    return {"table.csv": text, "table.csv.gz": gzip.compress(text)}


def run_folder() -> Files:
    identity = {"task": "", "train.seed": 0, "optimizer.name": "adamw"}
    manifest = {
        "name": "run",
        "uid": "0" * 32,
        "created": 1.0,
        "identity": identity,
        "status": "failed",
        "starts": 2,
    }
    manifest |= {"steps": 10, "mlflow_run_id": None, "summary": {"step": 3}}
    lease = {
        "attempt": "a",
        "host": "elsewhere",
        "pid": 1,
        "process_started": 1.0,
        "time": time.time() - 3600,
    }
    return {
        "run.json": json.dumps(manifest, indent=1).encode(),
        "lease.json": json.dumps(lease).encode(),
    }


ARGUMENTS = b"""task=image_classification
train.steps=10
train.global_batch_size=16
optimizer.betas=[0.9,0.99]
resources_per_worker.CPU=0.5
parallel.stages=[1,2]
checkpoint.load=runs/other
tracking.tags.team=a
strategy=fsdp"""
MLP: dict[str, Any] = {"model": "mlp", "model_args": {"hidden": [4]}}
TARGETS: dict[str, tuple[Files, Callable[[Path, str], object]]] = {
    "arguments": ({"arguments": ARGUMENTS}, read_arguments),
    "configuration": (contents(ROOT.glob("experiments/*.yaml")), read_configuration),
    "cluster files": (
        contents(own_files().values()),
        lambda folder, name: read_cluster(folder / name),
    ),
    "arrays": (arrays(), training("image_classification", **MLP)),
    "tables": (table(), training("tabular", target="y", model_args={"hidden": [4]})),
    "run folders": (run_folder(), read_run),
}


# --- mutations ------------------------------------------------------------------------------------


@st.composite
def mutated(draw: st.DrawFn, files: Files) -> tuple[str, bytes]:
    """One file's name, and what it holds now.

    Bytes are replaced, put in, cut out, cut off or doubled, and in texts a value is replaced by an
    awkward one.
    """
    name = draw(st.sampled_from(sorted(files)))
    content = files[name]
    for _ in range(draw(st.integers(1, 4))):
        values: list[int] = []
        if b"\x00" not in content:
            values = [index + 1 for index, byte in enumerate(content) if byte in b":=,"]
        if values and draw(st.booleans()):
            start = draw(st.sampled_from(values))
            value = draw(st.sampled_from(AWKWARD)).encode()
            content = content[:start] + value + content[content.find(b"\n", start) :]
            continue
        is_in_header = draw(st.booleans())  # it comes first
        last = min(len(content), 40) if is_in_header else len(content)
        position = draw(st.integers(0, last))
        inserted = draw(st.binary(min_size=1))
        before = content[:position]
        after = content[position:]
        count = draw(st.integers(1, 64))
        ways = [
            before + inserted + after,
            before + inserted + after[len(inserted) :],
            before + after[count:],
            before,
        ]
        content = draw(st.sampled_from([*ways, before + after[:count] + after]))
    return name, content


def write_files(folder: Path, files: Files) -> None:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)


@pytest.mark.parametrize("name", TARGETS)
def test_mutated_input_ends_in_a_sentence_or_a_good_reading(
    name: str, tmp_path: Path, own_cache: None
) -> None:
    files, read = TARGETS[name]
    folder = tmp_path / "read"
    refused = []

    @seed(11)
    @settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(HealthCheck))
    @given(mutated(files))
    def read_mutated(mutation: tuple[str, bytes]) -> None:
        changed, content = mutation
        write_files(folder, files | {changed: content})
        before = contents(folder.iterdir())
        try:
            read(folder, changed)
        except SENTENCES as error:
            lines = str(error).splitlines()
            assert all(line[:1] not in ("", " ", "\t") for line in lines), "a line for each mistake"
            refused.append(changed)
        after = contents(folder.iterdir())
        still_there = before.keys() & after.keys()
        assert all(after[file] == before[file] for file in still_there), "changed by reading"

    read_mutated()
    assert refused or name == "run folders", "the mutations do break something"


# --- regressions: each input here once ended in a traceback ---------------------------------------

TENFOLD = [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 9)]
HUGE_LABEL = written_bytes(
    lambda file: np.savez(file, images=np.zeros((2, 2, 2), np.uint8), labels=np.array([0, 10**16]))
)
LAUGHS = "\n".join(["a0: &a0 [x, x]", *TENFOLD]).encode()
LOCAL = b"cluster_name: a\nprovider: {type: local, head_ip: 10.0.0.1, worker_ips: []}\nauth: {}\n"
REGRESSIONS: list[tuple[str, str, bytes, str]] = [
    ("arguments", "arguments", b"task=a\ntrain.steps=${x}", "cannot be resolved"),
    ("arguments", "arguments", b"task=a\nresources_per_worker.CPU={a: {b: 1}}", "must be"),
    ("configuration", "gpt.yaml", b"task: " + b"[" * 2000 + b"]" * 2000, "recursion"),
    ("cluster files", "laptop.yaml", b"cluster_name: a\x0c", "YAML"),
    ("cluster files", "laptop.yaml", b"cluster_name: &a\n  x: *a\n", "aml:2: "),
    ("cluster files", "laptop.yaml", b"a: &a\n  <<: *a\n", "contain itself"),
    ("cluster files", "laptop.yaml", b"a: " + b"[" * 3000 + b"]" * 3000, "nested too deeply"),
    ("cluster files", "laptop.yaml", LAUGHS, "more than 50,000 values"),
    ("cluster files", "laptop.yaml", b"", "is empty"),
    ("cluster files", "laptop.yaml", b"- a\n- b\n", "not a cluster file: it is a list"),
    (
        "cluster files",
        "laptop.yaml",
        b"task: image_classification\n",
        "it has task, but neither cluster_name",
    ),
    ("cluster files", "laptop.yaml", b"cluster_name: [x\nprovider: {", "this is not YAML"),
    ("cluster files", "laptop.yaml", b"cluster_name: b\n" + LOCAL, "written twice"),
    ("cluster files", "laptop.yaml", LOCAL, "auth lacks the key 'ssh_user'"),
    (
        "cluster files",
        "laptop.yaml",
        b"apiVersion: v1\nkind: Namespace\nmetadata: {name: x}\n",
        "make a Ray cluster",
    ),
    ("tables", "table.csv", b"a,\xc0,y\n1,2,3\n", "is not UTF-8"),
    ("arrays", "a.npz", HUGE_LABEL, "label 1e\\+16"),
]


@pytest.mark.parametrize(
    ("name", "file", "content", "words"), REGRESSIONS, ids=[words for *_, words in REGRESSIONS]
)
@pytest.mark.usefixtures("own_cache")
def test_input_that_once_ended_in_a_traceback_is_refused_in_one_sentence(
    name: str, file: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_bytes(content)
    _, read = TARGETS[name]
    recursion_limit = sys.getrecursionlimit()
    sys.setrecursionlimit(1000)  # Python's own; libraries that other tests import raise it
    try:
        with pytest.raises(SENTENCES, match=words) as caught:
            read(tmp_path, file)
    finally:
        sys.setrecursionlimit(recursion_limit)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "lease", [b"4", b"[]", b"{}", b'{"attempt": 1}', b"\xff", b'{"attempt": "a", "host": "h"}']
)
def test_a_damaged_lease_does_not_refuse_a_start(lease: bytes, tmp_path: Path) -> None:
    write_files(tmp_path, run_folder() | {"lease.json": lease})
    read_run(tmp_path, "lease.json")
