"""A slice of the fuzzing, and what it has found: each input here once ended in a traceback."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.errors import UserError
from cluster.errors import ClusterError
from experiments.benchmarks.chaos.fuzz import Result, Target, attempt, fuzz, report
from experiments.benchmarks.chaos.targets import ROOT, targets


def test_a_slice_of_mutated_input_ends_in_sentences(tmp_path: Path, own_cache: None) -> None:
    result = Result()
    for target in targets(tmp_path):
        fuzz(target, tmp_path / target.name.replace(" ", "-"), 20, 11, result)
    assert not result.found, report(result, None)
    assert all(count >= 20 for count in result.examples.values()) and len(result.examples) == 10
    assert sum(result.refused.values()) >= 60, "the mutations do break something"


def test_the_fuzzer_notices_tracebacks_hangs_and_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experiments.benchmarks.chaos.fuzz.HANG_SECONDS", 0.05)

    def read(folder: Path, name: str) -> None:
        content = (folder / name).read_bytes() if (folder / name).exists() else b""
        if len(content) % 4 == 1:
            raise KeyError("oh")
        if len(content) % 4 == 2:
            (folder / name).write_bytes(b"")
        while len(content) % 4 == 3:
            pass

    result = Result()
    fuzz(Target("a target", {"file": b"12345678" * 8}, read), tmp_path, 60, 0, result)
    errors = " ".join(found.error for found in result.found.values())
    assert "KeyError" in errors and "Hang" in errors and "reading changed file" in errors
    assert attempt(lambda: (_ for _ in ()).throw(UserError("two\nlines")))[1].startswith("a sentence of several lines")


TENFOLD = [f"a{i}: &a{i} [" + ",".join([f"*a{i - 1}"] * 10) + "]" for i in range(1, 9)]
LAUGHS = "\n".join(["a0: &a0 [x, x]", *TENFOLD]).encode()


def mapped(cloud: str, key: str) -> bytes:
    """The shipped file of a cloud, with a mapping where a machine's name belongs."""
    text = (ROOT / "cluster" / f"{cloud}.yaml").read_text()
    return re.sub(f"{key}: [^,}}\n]+", f"{key}: {{a: b}}", text, count=1).encode()


FOUND: list[tuple[str, str, bytes, type[Exception], str]] = [
    ("arguments", "arguments", b"task=a\ntrain.steps=${x}", UserError, "cannot be resolved"),
    ("arguments", "arguments", b"task=a\nresources_per_worker.CPU={a: {b: 1}}", UserError, "must be"),
    ("configuration", "gpt.yaml", b"task: " + b"[" * 2000 + b"]" * 2000, UserError, "nested too deeply"),
    ("cluster files", "laptop.yaml", b"cluster_name: a\x0c", ClusterError, "this is not YAML"),
    ("cluster files", "laptop.yaml", b"cluster_name: &a\n  x: *a\n", ClusterError, "aml:2: what stands here"),
    ("cluster files", "laptop.yaml", b"a: &a\n  <<: *a\n", ClusterError, "contains itself"),
    ("cluster files", "laptop.yaml", b"a: " + b"[" * 3000 + b"]" * 3000, ClusterError, "nested too deeply"),
    ("cluster files", "laptop.yaml", LAUGHS, ClusterError, "more than 50,000 values"),
    ("cluster files", "azure.yaml", mapped("azure", "vmSize"), ClusterError, "does not say what machine it is"),
    ("cluster files", "aws.yaml", mapped("aws", "InstanceType"), ClusterError, "does not say what machine it is"),
    ("cluster files", "gcp.yaml", mapped("gcp", "machineType"), ClusterError, "does not say what machine it is"),
    ("tables", "table.csv", b"a,\xc0,y\n1,2,3\n", UserError, "not UTF-8"),
]


@pytest.mark.parametrize(("name", "file", "content", "kind", "words"), FOUND)
def test_what_was_found_is_refused(
    name: str, file: str, content: bytes, kind: Any, words: str, tmp_path: Path, own_cache: None
) -> None:
    target = next(target for target in targets(tmp_path) if target.name == name)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(kind, match=words) as caught:
        target.read(tmp_path, file)
    assert "\n" not in str(caught.value)


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    import numpy as np

    np.savez(tmp_path / "a.npz", images=np.zeros((4, 2, 2), np.uint8), labels=np.array([0, 1, 2, 10**16]))
    target = next(target for target in targets(tmp_path) if target.name == "NumPy images")
    with pytest.raises(UserError, match="has the label 1e\\+16; labels must be numbers of classes"):
        target.read(tmp_path, "a.npz")


@pytest.mark.parametrize("lease", [b"4", b"[]", b"{}", b'{"attempt": 1}', b"\xff", b'{"attempt": "a", "host": "h"}'])
def test_a_damaged_lease_keeps_nobody_out(lease: bytes, tmp_path: Path) -> None:
    target = next(target for target in targets(tmp_path) if target.name == "run folders")
    for name, content in target.files.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "lease.json").write_bytes(lease)
    target.read(tmp_path, "lease.json")
