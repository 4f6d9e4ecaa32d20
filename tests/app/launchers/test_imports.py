"""What the start of a training may import: nothing that it does not need."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = (
    "fastapi",
    "matplotlib",
    "mlflow",
    "numpy",
    "optuna",
    "pandas",
    "pyarrow",
    "ray",
    "ray.data",
    "ray.train",
    "ray.tune",
    "scipy",
    "sympy",
    "torch",
    "torch._dynamo",
    "torch._inductor",
    "torch.distributed.tensor",
    "transformers",
)
"""Packages that take from a tenth of a second to some seconds to import."""
ALLOWED = {
    "app.cli": [],
    "app.launchers.train": [],
    "app.tracking.writer": [],
    "app.tasks.language": ["numpy", "torch"],
    "app.models.prediction": ["numpy", "torch"],
    "app.models.mixture": ["numpy", "torch"],
    "app.run.prepare": ["numpy", "sympy", "torch", "torch.distributed.tensor"],
    "app.training.loop": ["numpy", "sympy", "torch", "torch.distributed.tensor"],
    "app.launchers.actors": ["numpy", "ray", "sympy", "torch", "torch.distributed.tensor"],
    "app.launchers.ray_launch": ["numpy", "ray", "sympy", "torch", "torch.distributed.tensor"],
}
"""Of HEAVY, what may be imported after a module and those above it: the command itself, a checked
configuration, MLflow's writer, a task and what MLflow keeps of it, the built-in language models
(which are built, as the writer does), the data and the first step, a worker, and the workers'
driver."""
BUILD = """
from app.models.gpt import GPT
from app.models.mixture import MixtureGPT
GPT(vocab_size=16, d_model=16, n_layers=1, n_heads=2)
MixtureGPT(vocab_size=16, d_model=16, n_layers=1, n_heads=2, n_experts=2, top_k=1)
"""


def test_a_start_imports_only_what_it_needs() -> None:
    program = f"""
import importlib, json, sys
heavy = {{}}
for module in {list(ALLOWED)}:
    importlib.import_module(module)
    if module == "app.models.mixture":
        exec({BUILD!r})
    heavy[module] = [name for name in {HEAVY} if name in sys.modules]
print(json.dumps(heavy))
"""
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert json.loads(process.stdout) == ALLOWED


def test_the_writer_of_mlflow_does_without_torch() -> None:
    """The driver writes what takes torch of a model, which takes the longest to import."""
    program = "import sys, app.tracking.uploader; print('torch' in sys.modules)"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=240
    )
    assert process.stdout == "False\n"
