"""What a study says: whether more workers pay, and what to use. Pure functions."""

import math
import statistics
from collections.abc import Mapping

from app.launchers.pays import PAYS
from experiments.scale.laws import MIN_COUNTS, MIN_REPEATS, Law, Speeds


def verdict(law: Law) -> str:
    """Whether twice the largest number of workers that was measured pays, in a sentence.

    There is no verdict where the interval does not allow one.
    """
    workers = 2 * law.largest
    gain = law.speedup(workers) / law.speedup(law.largest)
    prediction = f"{workers} workers would do {gain:.2f} times the work of {law.largest}"
    spread = law.spread(workers)
    if spread is None:
        needed = f"{MIN_COUNTS} numbers of workers, each measured {MIN_REPEATS} times"
        return f"By the {law.name} law {prediction}. A verdict needs {needed}."
    low = gain * (1 - spread)
    high = gain * (1 + spread)
    cost = f"at {2 / gain:.2f} times the cost per sample"
    prediction += f" ({low:.2f} to {high:.2f}), {cost}"
    if high <= 1:
        prediction += "; more is slower"
    if low < PAYS <= high:
        return f"Whether the next doubling pays cannot be told: {prediction}."
    pays = "pays" if low >= PAYS else "does not pay"
    return f"The next doubling {pays}: {prediction}."


def recommend(speeds: Mapping[str, Speeds]) -> str:
    """Which strategy to use on how many workers, in a sentence.

    It is the fastest strategy, on the largest number of workers up to which every doubling does at
    least `PAYS` times the work.

    Args:
        speeds: What was measured, by strategy.
    """
    best: dict[int, tuple[float, str]] = {}
    for strategy, measured in speeds.items():
        for workers, repeats in measured.items():
            candidate = statistics.median(repeats), strategy
            best[workers] = max(best.get(workers, candidate), candidate)
    least = chosen = min(best)
    for workers in sorted(best)[1:]:
        doublings = math.log2(workers / chosen)
        if best[workers][0] / best[chosen][0] >= PAYS**doublings:
            chosen = workers
    speed, strategy = best[chosen]
    choice = f"{strategy} on {chosen} workers" if chosen > 1 else "1 worker"
    sentence = f"Use {choice}: {speed:,.0f} samples/s"
    if chosen > least:
        gain = speed / best[least][0]
        efficiency = f"{gain / chosen * least:.0%} efficiency"
        sentence += f", {gain:.2f} times the throughput of {least}, at {efficiency}"
    sentence += "."
    if any(len(repeats) == 1 for measured in speeds.values() for repeats in measured.values()):
        doubt = "Some points were measured once only, so another measurement may say otherwise."
        sentence += f" {doubt}"
    return sentence
