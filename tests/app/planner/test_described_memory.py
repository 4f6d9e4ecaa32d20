"""What trainers other than Trireme keep in memory, as --assume describes them."""

from typing import Any

import pytest

from app.planner.assumptions import apply_assumptions
from app.planner.estimator import Estimator
from app.planner.layouts import Candidate
from app.planner.read import CAST, Reader
from strategies.layout import choose
from strategies.options import Options
from tests.app.planner.conftest import gpus

pytestmark = pytest.mark.pure


def estimator_of(reader: Reader, *assumptions: str) -> Estimator:
    """Estimates layouts of the model on eight GPUs.

    Args:
        reader: The model.
        assumptions: As --assume takes them.
    """
    machine = gpus(8)
    options = Options(reshard_after_forward=True)
    estimator = Estimator(reader=reader, machine=machine, options=options)
    return estimator.changed(apply_assumptions(machine.device, assumptions), None)


def candidate_of(name: str, workers: int, precision: str = "bf16", **degrees: int) -> Candidate:
    """A layout with eight micro-batches of one sample; a pipeline has one chunk a stage."""
    schedule = "1f1b" if degrees.get("pp", 1) > 1 or name == "pipeline" else ""
    return Candidate(choose(name, workers, **degrees), 1, 8, "none", precision, schedule, 1)


def numbers(reader: Reader, *, blocks: bool) -> int:
    """How many parameters are in blocks, or outside of them."""
    return sum(size.numel for size in reader.size.parameters if bool(size.unit) == blocks)


def test_kept_eight_bit_copies_are_of_the_blocks_and_of_products_in_eight_bits(
    small: Reader,
) -> None:
    for precision, copies in (("fp8", 2), ("bf16", 0)):
        candidate = candidate_of("single", 1, precision)
        plain = estimator_of(small).estimate(candidate).memory
        described = estimator_of(small, "weight_copies=2").estimate(candidate).memory
        added = described.pop("parameters") - plain.pop("parameters")
        assert added == copies * numbers(small, blocks=True)


def test_kept_weights_are_those_of_all_blocks(small: Reader) -> None:
    candidate = candidate_of("fsdp", 8)
    estimator = estimator_of(small)
    sizes = estimator._case(candidate, estimator._stages(estimator._work(candidate), 1, "", 1))
    blocks = [unit.gathered for unit, part in zip(sizes.units, sizes.parts) if part.is_block]
    plain = estimator.estimate(candidate).memory["communication"]
    described = estimator_of(small, "kept_weights=1").estimate(candidate).memory["communication"]
    # Of equal blocks two are gathered at once anyway.
    assert described - plain == pytest.approx(2 * (small.blocks - 2) * blocks[0])


def test_an_embedding_that_is_not_split_is_whole_on_each_worker(small: Reader) -> None:
    candidate = candidate_of("tensor", 4)
    memory: dict[str, Any] = {}
    for name in ("0", "1"):
        estimate = estimator_of(small, f"whole_embedding={name}").estimate(candidate)
        memory[name] = estimate.memory
    embedding = max(size.bytes for size in small.size.parameters if not size.unit)
    for kind, copies in (("parameters", 1), ("gradients", 1), ("optimizer", 2)):
        added = memory["1"][kind] - memory["0"][kind]
        assert added == pytest.approx(copies * embedding * 3 / 4, rel=0.01), kind


def test_sixteen_bit_weights_beside_float32_are_what_the_whole_model_computes_with(
    small: Reader,
) -> None:
    candidate = candidate_of("single", 1)
    plain = estimator_of(small)
    described = estimator_of(small, "shared_copies=1")
    added = described.estimate(candidate).memory["parameters"] - sum(
        size.bytes for size in small.size.parameters
    )
    assert added == 2 * sum(size.numel for size in small.size.parameters)
    assert described._work(candidate).variant.casting == CAST
    assert plain._work(candidate).variant.casting != CAST
    # Sharded strategies gather such weights anyway.
    sharded = candidate_of("fsdp", 8)
    assert plain.estimate(sharded).memory == described.estimate(sharded).memory


def test_the_memory_of_a_stage_is_that_of_the_watched_one(small: Reader) -> None:
    candidate = candidate_of("pipeline", 2)
    estimator = estimator_of(small)
    fullest = estimator.estimate(candidate).memory_bytes
    device = estimator.machine.device
    of_stages = [
        estimator.changed(device, None, watched_stage=stage).estimate(candidate).memory_bytes
        for stage in range(2)
    ]
    assert fullest == max(of_stages) > min(of_stages)
