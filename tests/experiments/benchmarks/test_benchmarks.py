"""The harness (who runs when, what a ratio and its interval are), and every benchmark once in its smallest form."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch.utils.flop_counter import FlopCounterMode

from app.models.gpt import GPT
from experiments.benchmarks import gpu, harness, published
from tests.running import ROOT, environment


def test_a_ratio_is_that_of_neighbouring_blocks_whatever_the_machine_does_meanwhile() -> None:
    speed = [1.0, 1.0, 3.0, 3.0, 9.0, 9.0, 2.0, 2.0]
    sides = harness.beside({"A": speed, "B": [1.1 * each for each in speed]}, "A")
    assert sides["B"]["ratio"] == pytest.approx(1.1) and sides["B"]["interval"] == pytest.approx((1.1, 1.1))
    assert sides["A"]["ratio"] == 1.0 and sides["A"]["ms"] == 2500.0
    low, high = harness.interval([1.0] * 40, [1.0, 1.0, 1.4, 1.4] * 10)
    assert low == pytest.approx(1.0) and high == pytest.approx(1.4), "half of the blocks say this, half that"


def test_the_flops_of_a_step_are_what_the_model_computes() -> None:
    shape = gpu.SHAPES["124m"]
    with torch.device("meta"):
        model = GPT(vocab_size=shape.vocab_size, **shape.model())  # type: ignore[arg-type]
        tokens = torch.zeros(shape.batch, shape.sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(tokens).sum().backward()
    parameters = sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()
    assert counted.get_total_flops() == pytest.approx(shape.flops(parameters), rel=0.02)


def test_a_table_of_published_runs_is_compared(tmp_path: Path) -> None:
    columns = "d_model,n_layers,n_heads,vocab_size,seq_len,gpus,micro_batch_size,grad_accum,model,gpu,precision"
    values = "1024,6,16,1000,512,8,8,2,x,a100_80gb,bf16"
    table = tmp_path / "runs.csv"
    table.write_text(
        f"{columns},sharding,activation_checkpointing,tokens_per_s_per_gpu\n{values},FULL_SHARD,True,50000\n"
    )
    found = json.loads(CliRunner().invoke(published.main, [str(table), "--json"]).stdout)["found"]
    assert found["rows"] == 1 and found["not_fitting"] == 0 and -1 < found["median error"]["held out"] < 10


SMALLEST = {
    "step": "--model gpt --strategy zbv --blocks 1",
    "overhead": "--of saving --of allocator --runs 1 --steps 60",
    "start": "--rounds 1",
    "gpu": "--model tiny --blocks 1 --steps 2 --no-compile",
    "chaos": "--seed 5 --kills 18 --each 3",
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SMALLEST)
def test_a_benchmark_runs(name: str) -> None:
    """In a process of its own, in which `gpu` finds neither Ray nor MLflow; chaos ends with 1 if anything is lost."""
    program = f"import sys; sys.modules.update(dict.fromkeys({('ray', 'mlflow') if name == 'gpu' else ()}))"
    program += f"; sys.argv = {['benchmarks', name, *SMALLEST[name].split(), '--json']}"
    program += "; from experiments.benchmarks.__main__ import main; main()"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.splitlines()[-1])
    assert said["benchmark"] == name and said["versions"]["torch"] == torch.__version__
    assert said["command"].startswith(f"python -m experiments.benchmarks {name}") and "cores" in said["machine"]
    assert said["found"] and "NaN" not in json.dumps(said["found"])
