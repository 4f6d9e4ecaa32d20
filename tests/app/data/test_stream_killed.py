"""A language model on a stream of documents: its two workers killed, and the same command run again."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path

import pytest

from tests.running import (
    committed,
    curve,
    end_tree,
    finish,
    mlflow_run,
    same_bits,
    start,
    torchrun_program,
    wait_until,
    weights,
)

SMALL = "sequence_length: 64, d_model: 32, n_layers: 2, n_heads: 2"


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "kind"), [("ddp", "stream"), ("fsdp", "mixture")])
def test_to_the_last_bit_after_a_kill(tmp_path: Path, strategy: str, kind: str) -> None:
    pytest.importorskip("datasets")
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:40]
    rows = [json.dumps({"text": path.read_text(errors="replace")}) for path in files]
    (tmp_path / "docs.jsonl").write_text("\n".join(rows) + "\n")
    path = f"{tmp_path}/docs.jsonl"
    data = {"stream": f"data: {path}, stream: true, eval_samples: 2", "mixture": f"data: {{{path}: 3, python: 1}}"}
    given = ["train", "task=language_modelling", f"task_args={{{data[kind]}, {SMALL}}}", "train.steps=150"]
    given += ["train.global_batch_size=8", "checkpoint.every_steps=10", "train.log_every=1", f"strategy={strategy}"]
    given += [f"run.storage={tmp_path}", "tracking.log_model=false"]
    truth = finish(start([*given, "run.name=truth"], program=torchrun_program()))
    assert truth.code == 0, truth.out + truth.err
    process = start([*given, "run.name=run"], program=torchrun_program())
    wait_until(lambda: committed(tmp_path / "run"))
    end_tree(process.pid)
    process.wait()
    again = finish(start([*given, "run.name=run"], program=torchrun_program()))
    assert again.code == 0 and "continuing after step" in again.out, again.out + again.err
    assert same_bits(weights(tmp_path / "run"), weights(tmp_path / "truth"))
    assert curve(tmp_path, "run") == curve(tmp_path, "truth")
    found = {each.tags[0].value: each.dataset for each in mlflow_run(tmp_path, "run").inputs.dataset_inputs}
    assert found.keys() == {"training", "evaluation"} and "docs.jsonl" in found["training"].name
    assert len(found["training"].digest) == 16
    assert (json.loads(found["training"].profile)["samples"] is None) == (kind == "stream")
