"""`python -m experiments.benchmarks NAME [OPTION …]` runs a benchmark; without a name it lists them."""

from __future__ import annotations

import difflib
import importlib
import sys

BENCHMARKS = {
    "step": ("step", "a step under each strategy, beside the same written by hand"),
    "tracking": ("overhead", "what logging every step costs training"),
    "saving": ("overhead", "what a checkpoint every 50 steps costs training"),
    "accelerators": ("overhead", "what each file of strategies/cpu_collectives brings to a step"),
    "checkpoint": ("checkpoint", "how long a save holds training up, beside torch's"),
    "start": ("start", "from the command to the first finished step, under every launcher"),
    "pipeline": ("pipeline", "our schedules beside torch.distributed.pipelining's"),
    "gpu": ("gpu", "a GPT on one GPU: tokens/s, MFU and memory, beside plain PyTorch and the plan"),
    "published": ("published", "the planner's tokens/s and memory beside a table of published runs"),
    "chaos": ("chaos.campaign", "kills of anything at any moment: what is lost, and seconds to the next step"),
}
"""Name → module, and what it measures."""


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        print(__doc__, end="\n\n")
        for name, (_, about) in BENCHMARKS.items():
            print(f"  {name:<12}{about}")
        return
    name = sys.argv[1]
    if name not in BENCHMARKS:
        near = difflib.get_close_matches(name, BENCHMARKS, 1)
        hint = f"did you mean {near[0]}?" if near else f"write one of {', '.join(BENCHMARKS)}"
        sys.exit(f"{name!r} is not a benchmark: {hint}")
    module = importlib.import_module(f"experiments.benchmarks.{BENCHMARKS[name][0]}")
    getattr(module, name if hasattr(module, name) else "main")(sys.argv[2:], prog_name=f"benchmarks {name}")


if __name__ == "__main__":
    main()
