"""`python -m experiments.benchmarks NAME [OPTION …]` runs a benchmark; without a name it lists them."""

from __future__ import annotations

import importlib
import sys

from app.errors import nearest

BENCHMARKS = {
    "step": "a step under each strategy or schedule, beside the same written by hand",
    "overhead": "what tracking and saving cost a run, and what each file of strategies/cpu_collectives brings",
    "start": "from the command to the first finished step, under every launcher",
    "gpu": "a GPT on one GPU: tokens/s, MFU and memory, beside plain PyTorch and the plan",
    "published": "the planner's tokens/s and memory beside a table of published runs",
    "chaos": "kills of anything at any moment: what is lost, and seconds to the next step",
}
"""A module of this folder, and what it measures."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="\n\n")
        for name, about in BENCHMARKS.items():
            print(f"  {name:<12}{about}")
        return
    name = sys.argv[1]
    if name not in BENCHMARKS:
        sys.exit(f"{name!r} is not a benchmark{nearest(name, BENCHMARKS)}: write one of {', '.join(BENCHMARKS)}")
    importlib.import_module(f"experiments.benchmarks.{name}").main(sys.argv[2:], prog_name=f"benchmarks {name}")


if __name__ == "__main__":
    main()
