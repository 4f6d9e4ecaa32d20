"""`python -m experiments.benchmarks NAME [OPTION …]` runs a benchmark; without a name it lists them."""

from __future__ import annotations

import importlib
import sys

from app.errors import nearest

BENCHMARKS = {
    "step": "a step under each strategy or schedule, beside the same written by hand",
    "gpu first": "the first minutes on a GPU: checks with predictions, as many as fit --budget",
    "published": "what the plain plan command says of published runs, by kind, size, sequence and GPU",
    "laws": "laws of scaling, fitted to the two smallest numbers of GPUs of published series, on the others",
    "chaos": "kills of anything at any moment: what is lost, and seconds to the next step",
}
"""A module of this folder (the first 30 minutes: the folder gpu_first), and what it measures."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="\n\n")
        for name, about in BENCHMARKS.items():
            print(f"  {name:<12}{about}")
        return
    words = 2 if " ".join(sys.argv[1:3]) in BENCHMARKS else 1
    name = " ".join(sys.argv[1 : 1 + words])
    if name not in BENCHMARKS:
        sys.exit(f"{name!r} is not a benchmark{nearest(name, BENCHMARKS)}: write one of {', '.join(BENCHMARKS)}")
    module = "gpu_first.program" if name == "gpu first" else name
    arguments = sys.argv[1 + words :]
    importlib.import_module(f"experiments.benchmarks.{module}").main(arguments, prog_name=f"benchmarks {name}")


if __name__ == "__main__":
    main()
