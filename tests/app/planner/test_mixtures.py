"""Plans of a mixture of experts: split experts take less memory and send tokens; active parameters are counted."""

from app.cli.plan import _fixed_by_file
from app.config_io import load_config
from app.flops import multiplied
from app.planner.layouts import Space, enumerate_layouts
from app.planner.output import families
from app.planner.picture import content
from app.planner.plan import make_plan
from app.planner.read import CAST
from app.tasks import load_task
from experiments.report.page import render
from strategies.expert.exchange import exchanged_bytes
from strategies.mixtures import find_mixtures
from tests.app.planner.conftest import gpus, read
from tests.running import ROOT

MIXTURE = str(ROOT / "experiments" / "mixture.yaml")


def test_split_experts_take_less_memory_and_time_to_send_tokens() -> None:
    args = ("d_model=512", "n_layers=2", "mixture.n_experts=16", "sequence_length=512")
    changes = [*(f"task_args.{arg}" for arg in args), "train.precision=bf16"]
    reader = read((MIXTURE,), *changes)
    config = load_config((MIXTURE,), changes)
    given = frozenset({"train.precision", "train.activation_checkpointing"})
    plan = make_plan(config, reader.task, gpus(8), given=given, reader=reader)
    found = (row for row in plan.rows if row.candidate.dims.dp_replicate == 8 and row.candidate.micro_batch == 1)
    rows = {row.candidate.dims.ep: row for row in found}
    assert set(rows) == {1, 2, 4, 8}
    held = sum(p.bytes for p in reader.size.parameters if p.is_expert)
    assert rows[1].memory["parameters"] - rows[8].memory["parameters"] == held - held // 8
    assert rows[1].seconds["expert"] == 0 < rows[2].seconds["expert"] < rows[8].seconds["expert"]
    assert reader.exchanged == 2 * exchanged_bytes(512, 2, 512, 1)
    again = plan.estimator.estimate(rows[4].candidate._replace(checkpointing="full"))
    assert 1.3 < again.seconds["expert"] / rows[4].seconds["expert"] <= 1.5, "recomputing exchanges again"
    page = render(content(plan, rows[4]))
    assert "4 of 16 experts in each of 2 layers" in page and page.count("<rect") == 2 * 8
    assert families(plan)["context"].startswith("of 512 tokens a worker would have fewer than 4,096")


def test_a_mixture_of_the_librarys_is_read_without_running_it() -> None:
    sizes = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4"
    sizes += ", num_key_value_heads: 4, n_routed_experts: 6, n_group: 1, topk_group: 1, num_experts_per_tok: 2"
    args = f"{{model: deepseek_v3, config: {{{sizes}, first_k_dense_replace: 1}}, data: python, tokenizer: bytes}}"
    reader = read((), "task=huggingface", f"task_args={args}", "task_args.sequence_length=16")
    assert reader.costs(CAST).parts and not reader.note and reader.mixtures
    assert {p.split_dim for p in reader.size.parameters if p.is_expert} == {0}


def test_workers_that_experts_are_split_over_by_tp_and_ep_get_equally_many() -> None:
    space = Space(8, 8, 32, 2, 4, None, True, ("fp32",), experts=6, by_tp=6)
    ways = {(found.dims.tp, found.dims.ep) for found in enumerate_layouts(space, {})}
    assert ways == {(1, 1), (1, 2), (2, 1)}


def test_degrees_of_a_file_stay_when_its_largest_batch_is_looked_for() -> None:
    config = load_config((MIXTURE,), ["parallel.ep=2", "parallel.cp=2"])
    assert {"strategy", "parallel.ep", "parallel.cp"} <= _fixed_by_file(config)


def test_active_parameters_are_counted() -> None:
    model = load_task("language_modelling", {"data": "python", "mixture": {"n_experts": 8, "top_k": 2}}).build_model()
    experts = sum(p.numel() for found in find_mixtures(model) for p in found.experts.parameters())
    whole = sum(p.numel() for p in model.parameters()) - model.embed.weight.numel()  # type: ignore[union-attr, operator]
    assert multiplied(model) == whole - experts * 3 // 4
