"""Plans of a mixture of experts: split experts take less memory and send tokens; active parameters are counted."""

from app.config_io import load_config
from app.flops import multiplied
from app.planner.plan import make_plan
from app.tasks import load_task
from strategies.expert.exchange import exchanged_bytes
from strategies.mixtures import find_mixtures
from tests.app.planner.conftest import gpus, read
from tests.running import ROOT

MIXTURE = str(ROOT / "experiments" / "mixture.yaml")
LARGE = [
    "task_args.d_model=512",
    "task_args.n_layers=2",
    "task_args.mixture.n_experts=16",
    "task_args.sequence_length=512",
    "train.precision=bf16",
]


def test_split_experts_take_less_memory_and_time_to_send_tokens() -> None:
    reader = read((MIXTURE,), *LARGE)
    config = load_config((MIXTURE,), LARGE)
    given = frozenset({"train.precision", "train.activation_checkpointing"})
    plan = make_plan(config, reader.task, gpus(8), given=given, reader=reader)
    found = (row for row in plan.rows if row.candidate.dims.dp_replicate == 8 and row.candidate.micro_batch == 1)
    rows = {row.candidate.dims.ep: row for row in found}
    assert set(rows) == {1, 2, 4, 8}
    held = sum(p.bytes for p in reader.size.parameters if p.is_expert)
    assert rows[1].memory["parameters"] - rows[8].memory["parameters"] == held - held // 8
    assert rows[1].seconds["expert"] == 0 < rows[2].seconds["expert"] < rows[8].seconds["expert"]
    assert reader.exchanged == 2 * exchanged_bytes(512, 2, 512, 1)


def test_active_parameters_are_counted() -> None:
    model = load_task("language_modelling", {"data": "python", "mixture": {"n_experts": 8, "top_k": 2}}).build_model()
    experts = sum(p.numel() for found in find_mixtures(model) for p in found.experts.parameters())
    whole = sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()  # type: ignore[union-attr, operator]
    assert multiplied(model) == whole - experts * 3 // 4
