"""Hugging Face models as tasks: built the same everywhere, split as their plans say."""

import copy
import functools
import json
import math
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from app.config.io import load_config, to_dict
from app.errors import UserError
from app.models.grouped_linear import grouped_linear
from app.models.prediction import Predictor, call_model, logits_of
from app.planner.read import CAST, PLAIN, Reader
from app.tasks.huggingface.experts import group_experts
from app.tasks.huggingface.plan import tensor_plan
from app.tasks.huggingface.task import HuggingFace
from experiments.parity.curves import Curve, difference, train
from experiments.parity.experiment import make_trial
from strategies import ddp, fsdp
from strategies.dims import LayoutError
from strategies.mixtures import find_mixtures
from strategies.parallelize import Options, choose
from strategies.tensor.apply import one_part
from strategies.tensor.plan import make_plan
from strategies.torch_internals import reduce_scatter_into
from tests.app.tasks.test_tasks import CPU, built, one_batch
from tests.pool import run_distributed
from tests.running import same_bits

SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
GROUPED = SMALL | {"num_key_value_heads": 2}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2 |= {"summary_first_dropout": 0.0}
FALCON = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_hidden_size": 32}
"""Of the models that look their attention up in a table of their own."""
OF_FOUR = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
QWEN_MOE = OF_FOUR | {"num_experts": 4, "head_dim": 4, "decoder_sparse_step": 1}
DEEPSEEK = SMALL | OF_FOUR | {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
DEEPSEEK |= {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
DEEPSEEK |= {"num_key_value_heads": 4}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}
READS: dict[str, dict[str, Any]] = {
    "text.txt": {"sequence_length": 8},
    "reviews.csv": {"kind": "sequence_classification"},
    "digits": {},
    "talk.jsonl": {"kind": "instructions", "sequence_length": 160},
    "pairs.csv": {},
}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama tied": ("llama", GROUPED | {"tie_word_embeddings": True}, "text.txt"),
    "gpt2": ("gpt2", GPT2, "text.txt"),
    "gemma2": ("gemma2", GROUPED | {"head_dim": 4, "query_pre_attn_scalar": 4}, "text.txt"),
    "phi3": ("phi3", GROUPED | {"resid_pdrop": 0.0}, "text.txt"),
    "falcon": ("falcon", FALCON, "text.txt"),
    "mixtral": ("mixtral", GROUPED | BALANCED | {"num_local_experts": 2}, "text.txt"),
    "bert": ("bert", SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, "reviews.csv"),
    "llama classifier": ("llama", GROUPED, "reviews.csv"),
    "gpt2 classifier": ("gpt2", GPT2, "reviews.csv"),
    "vit": ("vit", SMALL | {"patch_size": 4}, "digits"),
    "resnet": ("resnet", {"embedding_size": 4, "hidden_sizes": [4, 8], "depths": [1, 1]}, "digits"),
    "llama": ("llama", GROUPED, "text.txt"),
    "qwen3": ("qwen3", GROUPED | {"head_dim": 4}, "text.txt"),
    "mistral": ("mistral", GROUPED, "text.txt"),
    "mixtral of 4": ("mixtral", GROUPED | BALANCED | {"num_local_experts": 4}, "text.txt"),
    "qwen3 moe": ("qwen3_moe", GROUPED | QWEN_MOE, "text.txt"),
    "olmoe": ("olmoe", GROUPED | {"num_experts": 4, "num_experts_per_tok": 2}, "text.txt"),
    "deepseek": ("deepseek_v3", DEEPSEEK, "text.txt"),
    "instructions": ("llama", GROUPED, "talk.jsonl"),
    "gpt2 instructions": ("gpt2", GPT2, "talk.jsonl"),
    "t5": ("t5", T5, "pairs.csv"),
    "bart": ("bart", BART, "pairs.csv"),
    "lora": ("base", {}, "text.txt"),
    "lora classifier": ("base", {}, "reviews.csv"),
    "lora instructions": ("base", {}, "talk.jsonl"),
}


def arguments(name: str, data: Path) -> dict[str, Any]:
    model, config, file = MODELS[name]
    given: dict[str, Any] = {"model": model, "config": config}
    if model == "base":
        given = {"model": str(data / "base"), "pretrained": True, "lora": {"r": 2, "alpha": 4}}
    return given | READS[file] | {"data": file if file == "digits" else str(data / file)}


def made(name: str, data: Path) -> Any:
    return HuggingFace(**arguments(name, data))


@pytest.mark.parametrize("name", [*MODELS][:11])  # the others are made in the same ways
def test_builds_and_has_gradients(name: str, data: Path) -> None:
    task = made(name, data)
    model, empty = built(task), task.structure()
    assert same_bits(model.state_dict(), built(task).state_dict()) and model.training
    assert {n: p.shape for n, p in empty.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(p.is_meta for p in empty.parameters()) and {p.dtype for p in model.parameters()} == {torch.float32}
    batch = one_batch(task)
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.dim() == 0 and all(p.grad is not None for p in model.parameters())
    asked: Any = task.preprocessor()
    assert len(Predictor(model.eval(), asked).predict(asked.example)) == 1
    classes = logits_of(call_model(model, asked(asked.example))).shape[-1]
    model.train()
    expected = {"text.txt": 256, "digits": 10, "reviews.csv": 2}[MODELS[name][2]]
    assert classes == expected and loss.item() == pytest.approx(math.log(classes), rel=0.35)
    figures = task.metrics(model, batch)
    assert "loss" in figures and all(value.dim() == 0 for value in figures.values())
    blocks = task.blocks(model)
    assert blocks is None or (len(blocks) == 2 and all(model.get_submodule(block) for block in blocks))


def test_loss_is_the_librarys_own(data: Path) -> None:
    """With `labels` the library shifts and averages itself; ours takes targets that are shifted already."""
    task = made("llama", data)
    model, (inputs, targets) = built(task), one_batch(task)
    whole = torch.cat([inputs, targets[:, -1:]], 1)
    library = model(input_ids=whole, labels=whole).loss
    assert task.loss(model, (inputs, targets)).item() == pytest.approx(library.item(), rel=1e-6)
    assert task.items((inputs, targets)) == targets.numel() and task.unit == "tokens"
    assert set(task.metrics(model, (inputs, targets))) == {"loss", "bits_per_byte"}
    assert task.derived({"loss": 1.0}) == {"perplexity": pytest.approx(math.e)}


def test_experts_are_balanced(data: Path) -> None:
    task = made("mixtral", data)
    model, batch = built(task), one_batch(task)
    output = model(input_ids=batch[0], output_router_logits=True)
    plain = F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten())
    assert task.loss(model, batch).item() == pytest.approx((plain + 0.1 * output.aux_loss).item(), rel=1e-6)
    assert task.metrics(model, batch)["loss"].item() == pytest.approx(plain.item(), rel=1e-6)
    reader = Reader(made("deepseek", data))
    assert reader.costs(CAST).parts and not reader.note and reader.mixtures, "the planner reads them without a run"
    assert {p.split_dim for p in reader.size.parameters if p.is_expert} == {0}


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_grouped_as_the_library_computes_them(kind: str) -> None:
    """Also in copies, and in 16 bits under autocast; gpt-oss has biases, so it is left alone."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = GROUPED | {"vocab_size": 32, "head_dim": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    ours = copy.deepcopy(model)
    group_experts(ours)
    ours = pickle.loads(pickle.dumps(copy.deepcopy(ours)))
    tokens = torch.randint(0, 32, (2, 8))
    for each in (model, ours):
        each(tokens, labels=tokens).loss.backward()
    for found, wanted in zip(ours.parameters(), model.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, atol=1e-7)
    grouped = [found.experts for found in find_mixtures(ours) if "forward" in vars(found.experts)]
    assert len(grouped) == (0 if kind == "gpt_oss" else 2)
    product = mock.Mock(wraps=grouped_linear)
    with torch.autocast("cpu", torch.bfloat16), mock.patch("app.tasks.huggingface.experts.grouped_linear", product):
        for experts in grouped:
            experts(torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    assert {call.args[0].dtype for call in product.mock_calls} == ({torch.bfloat16} if grouped else set())


@pytest.mark.parametrize("name", ["bert", "llama classifier", "gpt2 classifier"])
def test_padding_does_not_count(name: str, data: Path) -> None:
    """A text's logits are the same beside a longer one, in models that look from both sides and in one direction."""
    task = made(name, data)
    model, data_set = built(task).eval(), task.train_data()
    lengths = [len(text) for text in data_set.texts]
    (tokens, mask), _ = data_set.__getitems__([lengths.index(min(lengths)), lengths.index(max(lengths))])
    assert mask[0].sum() < mask[1].sum() and (tokens[0][mask[0] == 0] == task.config.pad_token_id).all()
    together = model(input_ids=tokens, attention_mask=mask).logits[0]
    assert torch.allclose(together, model(tokens[:1, : int(mask[0].sum())]).logits[0], atol=1e-6)


def test_causal_models_do_not_see_ahead_and_the_one_that_people_get_heeds_padding(data: Path) -> None:
    encoder = HuggingFace(model="bert", config=SMALL, kind="causal_lm", data=str(data / "text.txt"), sequence_length=8)
    model, tokens = built(encoder).eval(), one_batch(encoder)[0]
    changed = tokens.clone()
    changed[:, -1] += 1
    assert torch.equal(model(input_ids=tokens).logits[:, :-1], model(input_ids=changed).logits[:, :-1])
    trained, ids = made("llama", data).build_trained().eval(), torch.tensor([[9, 9, 5, 6, 7]])
    padded = trained(input_ids=ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1]])).logits[:, -1]
    assert torch.allclose(padded, trained(input_ids=ids[:, 2:]).logits[:, -1], atol=1e-6)


ALONG = {"split_input": 1, "gather": 4, "sequence": 5}
"""Of two layers: the first one's input is split, attention and feed-forward gather, and all norms work on a part."""
PLANS = {
    "llama": {"embedding": 1, "head": 1, "colwise": 10, "rowwise": 4, **ALONG},
    "qwen3": {"embedding": 1, "head": 1, "colwise": 10, "rowwise": 4, "partial": 4, **ALONG},
    "gemma2": {"head": 1, "colwise": 10, "rowwise": 4, **ALONG, "sequence": 9},  # the table scales, so it stays whole
    "phi3": {"embedding": 1, "head": 1, "colwise_gather": 8},  # fused projections: gathered
    "mixtral": {"embedding": 1, "head": 1, "colwise": 6, "rowwise": 2, "experts": 2},
    "llama classifier": {"embedding": 1, "colwise": 10, "rowwise": 4},  # its head is no vocabulary
    "gpt2": None,
}


@pytest.mark.parametrize("name", PLANS)
def test_plan(name: str, data: Path) -> None:
    task = made(name, data)
    model = task.structure()
    plan = task.tensor_plan(model)
    counted = None if plan is None else {value: list(plan.values()).count(value) for value in plan.values()}
    assert counted == PLANS[name]
    attention_is_split = plan is not None and "model.layers.0.self_attn.q_proj" in plan
    assert task.heads() == (2 if attention_is_split else None)  # 4 heads, 2 of keys and values
    made_of_it = make_plan(model, plan, True)  # every name is a module that its value fits
    if name == "gpt2":  # whose transposed layers are split too
        assert made_of_it.styles["transformer.h.0.attn.c_attn"] == "colwise_gather"
        assert made_of_it.dims["transformer.h.0.attn.c_attn.weight"] == 1  # (in, out)
        assert made_of_it.dims["transformer.h.0.attn.c_attn.bias"] == 0
        split = sum(p.numel() for name, p in model.named_parameters() if name in made_of_it.dims)
        assert split > 0.9 * sum(p.numel() for p in model.parameters())


def test_a_split_layer_keeps_a_part_of_the_residual_stream_and_the_planner_counts_it(data: Path) -> None:
    """What a Llama's layers hand on is split along the sequence, and whole without sequence parallelism."""
    task = HuggingFace(**arguments("llama", data) | {"config": GROUPED | {"num_hidden_layers": 3}})
    seen, saved = [], []
    for sequence_parallel in (True, False):
        model = built(task)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, y: seen.append(tuple(y.shape)))
        one_part(model, task.tensor_plan(model), 2, sequence_parallel=sequence_parallel)
        model(one_batch(task)[0])
        costs = Reader(task, sequence_parallel=sequence_parallel).costs(PLAIN)
        assert len(set(costs.order[1:])) == 1, "the first layer splits its input"
        saved.append(costs.parts[costs.order[-1]].at(4, 2)["saved"])
    assert seen == [(4, 4, 16)] * 3 + [(4, 8, 16)] * 3
    assert saved[0] < 0.85 * saved[1]


def test_half_a_pair_is_gathered() -> None:
    """A colwise layer must not stay split where what follows it is split in a way that we have no equal for."""
    model: Any = nn.Module()
    part = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "norm": nn.LayerNorm(8)})
    model.parts, model.table = nn.ModuleList([part]), nn.Embedding(4, 4)
    words = {"up": "colwise", "down": "packed_rowwise", "norm": "replicated_with_grad_allreduce"}
    model.tp_plan = {f"parts.*.{name}": word for name, word in words.items()}
    model.get_input_embeddings = lambda: model.table
    assert tensor_plan(model, parallel_head=False) == {"parts.0.up": "colwise_gather", "table": "embedding"}


class Reductions:
    """Counts the gradients that DDP and `fully_shard` reduce, as their documented hooks, and reduces them as they do.

    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html; `FSDPModule.set_custom_reduce_scatter`.
    """

    def __init__(self) -> None:
        self.numbers = 0

    def all_reduce(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.numbers += bucket.buffer().numel()
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.numbers += input_tensor.numel()
        return reduce_scatter_into(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _trained(rank: int, rows: Any, strategy: str, workers: int, degrees: dict[str, int]) -> list[tuple[Curve, int]]:
    """Of each row the curve of two steps, and how many gradients ddp or fsdp reduced."""
    wrap = ddp.wrap
    shard = fsdp.shard
    reductions = Reductions()

    def wrap_and_count(*args: Any, **options: Any) -> Any:
        applied = wrap(*args, **options)
        applied.module.register_comm_hook(reductions, Reductions.all_reduce)
        return applied

    def shard_and_count(*args: Any, **options: Any) -> Any:
        units = shard(*args, **options)
        for unit in units:
            unit.set_custom_reduce_scatter(reductions)
        return units

    trained = []
    with mock.patch.object(ddp, "wrap", wrap_and_count), mock.patch.object(fsdp, "shard", shard_and_count):
        for values in rows:
            reductions.numbers = 0
            curve = train(make_trial(values, steps=2), choose(strategy, workers, **degrees), Options(), CPU)
            trained.append((curve, reductions.numbers))
    return trained


ALONE: dict[str, Curve] = {}
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
PARITY = [
    slow("ddp", 2, {}, ("lora instructions", "bart"), 1e-5),
    ("fsdp", 2, {}, ("llama tied", "mixtral", "lora classifier"), 1e-5),
    slow("fsdp", 2, {}, ("vit", "gpt2 instructions", "t5"), 1e-5),
    ("tensor", 2, {}, ("llama tied", "gpt2", "mixtral", "bert"), 2e-5),
    slow("tensor", 2, {}, ("qwen3", "gemma2", "phi3"), 2e-5),
    slow("tensor", 2, {}, ("lora", "instructions", "lora instructions", "t5", "qwen3 moe", "olmoe", "deepseek"), 2e-5),
    slow("ddp+tensor+expert", 4, {"tp": 2, "ep": 2}, ("mixtral of 4", "qwen3 moe", "deepseek"), 2e-5),
    slow("fsdp+tensor+expert", 4, {"tp": 2, "ep": 2}, ("mixtral of 4", "olmoe"), 2e-5),
    slow("fsdp+tensor", 4, {"tp": 2}, ("mixtral of 4", "llama", "gpt2"), 2e-5),
    slow("tensor+pipeline", 4, {"tp": 2}, ("llama",), 2e-5),
    ("context", 2, {"cp": 2}, ("gpt2", "qwen3", "mistral"), 1e-5),
    ("pipeline", 2, {"pp": 2}, ("mixtral",), 1e-5),
    slow("pipeline", 2, {"pp": 2}, ("lora", "instructions"), 1e-5),
    ("ddp+context+expert", 2, {"cp": 2, "ep": 2}, ("mixtral",), 1e-5),
    slow("fsdp+tensor+context", 4, {"tp": 2, "cp": 2, "dp_shard": 1}, ("llama",), 2e-5),
]


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "workers", "degrees", "names", "near"), PARITY)
def test_trains_the_same_model(strategy: str, workers: int, degrees: Any, names: Any, near: float, base: Path) -> None:
    """Of an adapted one only adapters, and a new head, are sent to other workers."""
    given = ["task=huggingface", "train.global_batch_size=4", "train.clip_norm=1", "optimizer.lr=0.01"]
    rows = [to_dict(load_config([], [*given, f"task_args={json.dumps(arguments(name, base))}"])) for name in names]
    split = run_distributed(_trained, workers, rows, strategy, workers, degrees)[0]
    for name, row, (curve, sent) in zip(names, rows, split, strict=True):
        if name not in ALONE:
            ((ALONE[name], _),) = _trained(0, [row], "single", 1, {})
        away = difference(ALONE[name], curve)
        assert away.within(near), f"{name}: {away}"
        if name.startswith("lora") and strategy in ("ddp", "fsdp"):
            assert sent == 2 * sum(p.numel() for p in built(made(name, base)).parameters() if p.requires_grad)


def test_what_cannot_be_split_is_refused(data: Path) -> None:
    for name, changes, says in (
        ("mistral", {"sliding_window": 4}, "4 tokens back .* at most 4"),
        ("qwen3", {"layer_types": ["full_attention", "linear_attention"]}, "layers of linear_attention"),
        ("bert", {}, "sequences of causal_lm, but this model is for sequence_classification"),
    ):
        task = made(name, data)
        task.config.update(changes)
        with pytest.raises(UserError, match=says):
            task.context_plan(nn.Module())
    task = made("mixtral of 4", data)
    model = task.structure()
    plan = task.tensor_plan(model)
    make_plan(model, plan, True, tp=2, ep=2)
    with pytest.raises(LayoutError, match=r"tp × parallel.ep is 8, .* divide the 4 experts .*: write 1, 2, 4"):
        make_plan(model, plan, True, tp=2, ep=4)
    without_routers = mock.patch("app.tasks.huggingface.plan.layers", lambda model: ["model.layers.0"])
    with without_routers, pytest.raises(UserError, match=r"of model\.layers\.1\.mlp\.experts no router is"):
        made("mixtral", data)
