"""What a plan says where a model does not fit: the order, the figures, and plans that agree."""

from typing import Any

import pytest

from app.config.io import load_config
from app.planner.advice import advice, predict, settings_text
from app.planner.estimate import Estimate
from app.planner.machine import Machine, MachineOptions, find_machine
from app.planner.output import as_json, text
from app.planner.plan import GIB, Plan
from app.planner.read import Reader
from app.planner.remedies import Remedy, needs_remedies, remedies
from cluster.hardware import find_gpu
from strategies.layout import choose
from tests.app.planner.conftest import EXPERIMENT, gpus, plan_of, with_memory

ORDER = [
    "activation checkpointing",
    "16 bits",
    "smaller micro-batch",
    "activations to host",
    "LoRA",
    "offload",
    "more GPUs",
]
BATCH = ("train.precision=fp32", "train.global_batch_size=8")


@pytest.fixture(scope="module")
def tried(large: Reader) -> tuple[Plan, dict[str, Remedy]]:
    """A plan of one GPU on which the model does not fit, and what to try by name."""
    plan = plan_of(large, gpus(1, "rtx-4090"), *BATCH, fixed_keys=("train.precision",))
    in_order = list(remedies(plan))
    assert [remedy.name for remedy in in_order] == ORDER and needs_remedies(plan)
    return plan, {remedy.name: remedy for remedy in in_order}


def _bytes(remedy: Remedy) -> float:
    assert remedy.row is not None
    return remedy.row.memory_bytes


def test_each_thing_to_try_has_its_figures_and_stands_in_order(
    tried: tuple[Plan, dict[str, Remedy]],
) -> None:
    plan, by_name = tried
    sizes = [_bytes(by_name[name]) for name in ORDER[:3]]
    assert sizes[2] <= sizes[1], "with fewer samples at once"
    keys = [by_name[name].keys for name in ORDER[:3]]
    assert (
        keys[0].startswith("train.activation_checkpointing=") and keys[1] == "train.precision=bf16"
    )
    assert keys[2].startswith("train.micro_batch_size=") and "huggingface" in by_name["LoRA"].reason
    assert not any(by_name[name].fits for name in ORDER[:5]), "the state alone is too much"
    assert by_name["activations to host"].keys == "train.activation_offloading=true"
    shown = text(plan)
    rows = [
        next(line for line in shown.splitlines() if line.startswith(f"{name}  ")) for name in ORDER
    ]
    assert [shown.index(row) for row in rows] == sorted(shown.index(row) for row in rows)
    for row, remedy in zip(rows, by_name.values()):
        if remedy.row is not None:
            assert remedy.row.verdict in row and f"{remedy.row.step_seconds:.3g}" in row
    in_json = as_json(plan, 1)["remedies"]
    offload = in_json[ORDER.index("offload")]
    assert [one["name"] for one in in_json] == ORDER and offload["fits"]
    assert offload["step_seconds"] == by_name["offload"].row.step_seconds  # type: ignore[union-attr]


def test_offloading_says_how_much_host_memory_it_takes(
    tried: tuple[Plan, dict[str, Remedy]], large: Reader
) -> None:
    plan, by_name = tried
    row = by_name["offload"].row
    assert row is not None and row.fits and row.candidate.dims.world_size == 1
    state = 16 * plan.reader.parameters  # a weight, its gradient and two moments, in float32
    assert row.host_memory_bytes == pytest.approx(state, rel=0.01)
    layout = plan.layout(row)
    assert layout["host_memory_share"] is None and layout["host_memory_bytes"] == int(
        row.host_memory_bytes
    )
    assert f"{row.host_memory_bytes / GIB:.1f} GiB of state in each host's memory" in settings_text(
        row
    )
    four = plan_of(
        large,
        gpus(4, "rtx-4090"),
        *BATCH,
        "parallel.offload=true",
        fixed_keys=("parallel.offload",),
    )
    assert four.rows[0].host_memory_bytes == pytest.approx(state, rel=0.01), (
        "of four GPUs in one host"
    )
    kept = predict(plan.config, large.task, choose("single", 1), plan.machine, large)
    moved = predict(
        load_config([EXPERIMENT], [*BATCH, "parallel.offload=true"]),
        large.task,
        choose("fsdp", 1),
        plan.machine,
        large,
    )
    assert moved.memory["activations"] >= kept.memory["activations"], (
        "what backward needs is on the GPU all the same"
    )
    without_offload = plan_of(
        large,
        gpus(4, "rtx-4090"),
        *BATCH,
        "parallel.offload=false",
        fixed_keys=("parallel.offload",),
    )
    assert (
        without_offload.layout(without_offload.rows[0])["host_memory_share"]
        == without_offload.rows[0].host_memory_bytes
        == 0
    )


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.95, 0.45, 0.2])
def test_the_number_of_gpus_named_is_the_fewest_that_a_plan_of_that_many_finds(
    small: Reader, share: float
) -> None:
    """It was 8 without offloading, where a plan of 4 found a layout with it."""
    one = plan_of(
        small, gpus(1), *BATCH, "parallel.offload=false", fixed_keys=("parallel.offload",)
    )
    memory = share * min(row.memory_bytes for row in one.rows)

    def planned(count: int) -> Plan:
        options = MachineOptions(gpus=count, gpu="h100-80gb", interconnect="3200Gb")
        return plan_of(small, with_memory(find_machine(options, "auto"), memory), *BATCH)

    plan = planned(1)
    # A plan does not look for activations in host memory by itself.
    searched = (remedy for remedy in remedies(plan) if remedy.name != "activations to host")
    named = {remedy.gpus: remedy for remedy in searched if remedy.fits}
    assert needs_remedies(plan) and named
    for count in (1, 2, 4, 8, 16):
        best = planned(count).best
        assert (best is None) == (count < min(named)), f"{count} GPUs"
        if best is not None and count in named:
            row = named[count].row
            assert row is not None
            if not row.candidate.offload and row.step_seconds < best.step_seconds:
                # The plan has taken what fits for certain before what is faster and close.
                assert (row.verdict, best.verdict) == ("close", "fits")
        if count == max(named):
            assert named[count].name == "more GPUs" and not named[count].row.candidate.offload  # type: ignore[union-attr]
            break
    words = " ".join(advice(plan))
    assert (plan.best is None) == ("What would fit: " in words)


def test_ways_to_save_activations_are_compared_in_a_sentence(small: Reader) -> None:
    batch = ("train.precision=bf16", "train.global_batch_size=64")
    fixed = ("parallel.offload", "train.activation_checkpointing", "train.micro_batch_size")
    kept = plan_of(
        small,
        gpus(1),
        *batch,
        "train.micro_batch_size=64",
        "parallel.offload=false",
        "train.activation_checkpointing=none",
        fixed_keys=fixed,
    ).rows[0]
    state = sum(kept.memory.values()) - kept.memory["activations"] - kept.memory["margin"]
    machine = with_memory(gpus(1), 0.5 * state)
    (sentence,) = [one for one in advice(plan_of(small, machine, *batch)) if "With all" in one]
    assert sentence.startswith("With all activations on the GPU single in bf16 needs ")
    ways = ("checkpointing (", "offloading activations (", "both (", "accumulation (micro-batches ")
    for way in ways:
        (clause,) = [part for part in sentence.split("; ") if f"with {way}" in part]
        assert "it does not fit (" in clause, "the state alone is too much"
        times = float(clause.split(" and takes ")[1].split(" times")[0])
        assert times > 0.99, clause
    plan = plan_of(small, gpus(1), *batch, "parallel.offload=false", fixed_keys=fixed[:1])
    assert not any("With all" in one for one in advice(plan)), "it fits without any of them"


def test_a_layout_that_nobody_has_to_keep_comes_first(small: Reader) -> None:
    unrestricted = plan_of(small, gpus(4), *BATCH, "strategy=ddp", fixed_keys=("strategy",))
    machine = with_memory(gpus(4), 0.7 * min(row.memory_bytes for row in unrestricted.rows))
    plan = plan_of(small, machine, *BATCH, "strategy=ddp", fixed_keys=("strategy",))
    first = next(remedies(plan))
    assert (
        first.name == "another layout"
        and first.fits
        and first.keys.endswith("instead of strategy=ddp")
    )
    best = plan_of(
        small, machine, *BATCH, "parallel.offload=false", fixed_keys=("parallel.offload",)
    ).best
    assert best is not None and first.row is not None
    assert first.row.candidate.layout == best.candidate.layout and "another layout" in " ".join(
        advice(plan)
    )


@pytest.mark.parametrize("strategy", ["fsdp", "zero3", "ddp", "zero1"])
def test_a_strategy_of_several_workers_can_be_planned_for_one(small: Reader, strategy: str) -> None:
    given = ("strategy", "parallel.offload")
    plan = plan_of(small, gpus(1), f"strategy={strategy}", fixed_keys=given)
    assert plan.best is not None and not plan.best.candidate.offload
    if strategy == "ddp":
        return
    offloaded = plan_of(
        small, gpus(1), f"strategy={strategy}", "parallel.offload=true", fixed_keys=given
    ).best
    assert (
        offloaded is not None
        and offloaded.candidate.strategy.is_sharded
        and offloaded.host_memory_bytes > 0
    )
    assert offloaded.memory["parameters"] == offloaded.memory["optimizer"] == 0


def test_hsdp_over_a_slow_network_beats_fsdp_by_what_the_link_of_a_node_carries(
    large: Reader,
) -> None:
    """By hand, for P parameters on 2 nodes of 8, gathered in bf16 and reduced in float32.

    fsdp: a ring over 16 passes 15/16 of every tensor over each node's link, 2·P bytes gathered once
    (they are kept until backward) and 4·P bytes scattered: 15/16 · 6·P. hsdp gathers and scatters
    inside a node. 8 groups of 2 average an eighth of the gradients each: a rank sends half of it
    and gets the other half's sum, twice: 8 · 2 · 1/2 · 4·P/8 = 4·P, two thirds of 6·P.
    """
    machine = gpus(16, across="400Gb")
    reader, links = large, machine.links
    config = load_config([EXPERIMENT], ["train.precision=bf16", "train.global_batch_size=64"])
    parameters = reader.parameters
    rate = 400e9 / 8 * machine.device.across

    gathered, scattered = links.gather(2 * parameters, 16, 1), links.gather(4 * parameters, 16, 1)
    fsdp_seconds = 15 / 16 * 6 * parameters / rate
    assert gathered + scattered == pytest.approx(fsdp_seconds, rel=0.01)
    averaged = links.reduce(4 * parameters / 8, 2, 8)
    assert averaged == pytest.approx(4 * parameters / rate, rel=0.01)
    assert averaged < 0.75 * (gathered + scattered)
    inside = links.gather(4 * parameters, 8, 1)
    assert (
        inside == pytest.approx(7 / 8 * 4 * parameters / links.within, rel=0.01)
        and inside < averaged / 5
    )

    def planned(name: str, **degrees: int) -> Estimate:
        layout = choose(name, 16, **degrees)
        return predict(config, reader.task, layout, machine, reader)

    fsdp, hsdp = planned("fsdp"), planned("hsdp", dp_replicate=2, dp_shard=8)
    assert (
        hsdp.seconds["shard"] + hsdp.seconds["contention"]
        < fsdp.seconds["shard"] + fsdp.seconds["contention"]
    )
    assert hsdp.step_seconds < fsdp.step_seconds
    # An all-to-all sends from each of a node's 8 ranks the half that is for the other node.
    assert links.exchange(1e9, 16, 1) == pytest.approx(8 * 1e9 / 2 / rate, rel=0.01)
    assert (links.nodes(16, 1), links.nodes(4, 2), links.nodes(2, 8)) == (2, 1, 2)
    # What is sent once to a node waits for the links inside it, if these pass on more.
    sent_once = links.exchange(1e9, 16, 1, share_within=0.9, share_across=0.5)
    assert sent_once == pytest.approx(8 * 1e9 / 4 / rate, rel=0.01)
    passed_on = links.exchange(1e9, 16, 1, share_within=0.9, share_across=0.0)
    assert passed_on == pytest.approx(0.9 * 1e9 * 15 / 16 / links.within, rel=0.02)


def test_a_name_of_several_gpus_says_which_one_is_taken() -> None:
    def assumed(name: str, **more: Any) -> tuple[str, Machine]:
        machine = find_machine(MachineOptions(gpus=8, gpu=name, **more), "auto")
        return machine.assumption, machine

    for name, taken, other in (
        ("A100", "a100-40gb", "a100-80gb"),
        ("V100", "v100-16gb", "v100-32gb"),
    ):
        sentence, machine = assumed(name)
        assert sentence.startswith(f"{name} is taken for {taken}: write ") and other in sentence
        assert machine.device.gpu == find_gpu(taken) and find_gpu(other).name == other
    assert assumed("h100")[0].endswith("h100-pcie or h100-nvl for another.")
    for name in (
        "a100-40gb",
        "NVIDIA A100-SXM4-80GB",
        "rtx-4090",
        "a10",
        "A100 80GB",
        "NVIDIA H100 80GB HBM3",
    ):
        assert assumed(name)[0] == "", name
