"""`python -m experiments.benchmarks NAME [OPTION …]` runs a benchmark.

Without a name it lists them.
"""

from __future__ import annotations

import importlib
import sys

from app.errors import EXIT_REFUSED, UserError, nearest

BENCHMARKS = {
    "figures": "the tables of RESULTS.md: how old each is, and --measure measures them anew",
    "step": "a step under each strategy or schedule, beside the same written by hand",
    "peers": "whole commands: the same training by hand, with other libraries, with Trireme",
    "timeline": "which process uses the processors when, from a command to its prompt",
    "gpu first": "the first minutes on a GPU: checks with predictions, as many as fit --budget",
    "one-gpu": "trainings on one GPU beside what the plan says of their step and memory",
    "published": "what the plain plan command says of published runs, by kind, size and GPU",
    "memory": "the allocator's peak in small trainings on CPUs beside what the plan says",
    "recomputation": "what activation checkpointing costs the host, which launches operations",
    "laws": "laws of scaling beside published series, fitted to their two smallest numbers of GPUs",
    "scale-out": "what the control plane costs up to 16,384 ranks, which are simulated",
    "scale-resume": "a checkpoint saved and read by real gloo ranks: what each tells and holds",
    "scale-failures": "a node, a rack and a hang of simulated ranks, until the supervisor decides",
    "scale-sweep": "what a sweep of a thousand trials costs its driver",
    "sweep-truth": "how far from the best setting ways to search end, on a grid that is known",
    "fork-truth": "what branches of a checkpoint answer, beside grids of branches that are known",
    "auto-batch": "train.batch_schedule=auto beside a fixed small batch: loss and steps",
    "scale-points": "MLflow's answers for a run of a million points",
    "scale-uploads": "whether MLflow keeps up with a run that logs a hundred steps a second",
    "width-transfer": "the best rate of each width, with optimizer.width_transfer and without",
    "chaos": "kills of anything at any moment: what is lost, and seconds to the next step",
}
"""By name, what a benchmark measures."""
MODULES = {
    "gpu first": "gpu_first.program",
    "one-gpu": "gpu_first.one_gpu",
    "peers": "peers.program",
    "timeline": "peers.timeline",
}
"""The modules of benchmarks that are not of this folder."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="\n\n")
        for name, description in BENCHMARKS.items():
            print(f"  {name:<16}{description}")
        return
    # A name has one word or two.
    words = 2 if " ".join(sys.argv[1:3]) in BENCHMARKS else 1
    name = " ".join(sys.argv[1 : 1 + words])
    if name not in BENCHMARKS:
        hint = f"{nearest(name, BENCHMARKS)}: write one of {', '.join(BENCHMARKS)}"
        sys.exit(f"{name!r} is not a benchmark{hint}")
    module_name = MODULES.get(name, name.replace("-", "_"))
    module = importlib.import_module(f"experiments.benchmarks.{module_name}")
    try:
        module.main(sys.argv[1 + words :], prog_name=f"benchmarks {name}")
    except UserError as error:
        print(f"benchmarks {name}: {error}", file=sys.stderr)
        sys.exit(EXIT_REFUSED)


if __name__ == "__main__":
    main()
