"""`saving`: what a checkpoint every 50 steps costs, beside none.

A block is a whole number of 50 steps and its saves lie in the middle of them, so each block has as many. How both are
measured in one run: pairs.py. The stall of one save beside torch's own: `checkpoint`.
"""

from __future__ import annotations

from experiments.benchmarks import pairs

main = pairs.command("saving", "mnist")

if __name__ == "__main__":
    main()
