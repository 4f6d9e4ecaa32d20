"""The arithmetic of the GPU benchmark, and that it runs without Ray and MLflow; on a GPU, what it must reach there."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from app.models.gpt import GPT
from experiments.benchmarks.gpu import SHAPES, run, shown
from tests.running import ROOT

NEITHER = """
import runpy, sys
sys.modules |= {"ray": None, "mlflow": None}
sys.argv = ["gpu", "--model", "tiny", "--blocks", "1", "--steps", "2", "--no-compile"]
runpy.run_module("experiments.benchmarks.gpu", run_name="__main__")
"""


def test_the_formula_counts_what_the_model_computes() -> None:
    shape = SHAPES["124m"]
    with torch.device("meta"):
        model = GPT(vocab_size=shape.vocab_size, **shape.model())
        tokens = torch.zeros(shape.batch, shape.sequence_length, dtype=torch.long)
    with FlopCounterMode(display=False) as counted:
        model(tokens).sum().backward()
    parameters = sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()
    assert counted.get_total_flops() == pytest.approx(shape.flops(parameters, causal=False), rel=0.02)


def test_it_needs_neither_ray_nor_mlflow() -> None:
    done = subprocess.run([sys.executable, "-c", NEITHER], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert [line.split("|")[2].strip() for line in done.stdout.splitlines()[4:]] == ["by hand", "trireme", "predicted"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_the_13_b_gpt_reaches_more_than_half_of_the_peak() -> None:
    found = run("1.3b", 3, 5, compiled=True)
    seconds = min(found["seconds"]["trireme"])
    assert found["flops"]["mfu"] / seconds / found["peak_flops"] >= 0.55, shown({"1.3b": found})
