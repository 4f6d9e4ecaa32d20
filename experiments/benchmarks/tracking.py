"""`tracking`: what logging every step costs, beside logging none.

Every step logs loss, rate, gradient norm and learning rate to the spool, from which the writer process feeds MLflow.
How both are measured in one run: pairs.py.
"""

from __future__ import annotations

from experiments.benchmarks import pairs

main = pairs.command("tracking", "gpt")

if __name__ == "__main__":
    main()
