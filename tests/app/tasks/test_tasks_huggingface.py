"""Models of Hugging Face as tasks: built the same on every rank, and split by their plans."""

import copy
import functools
import json
import math
import pickle
from collections import Counter
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
from tests.app.tasks.test_tasks import CPU, built_model, one_batch
from tests.pool import run_distributed
from tests.running import same_bits

# Configurations of small models, with the keys of `transformers`.
SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 32,
}
GROUPED = SMALL | {"num_key_value_heads": 2}
BALANCED = {"output_router_logits": True, "router_aux_loss_coef": 0.1}
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "summary_first_dropout": 0.0,
}
FALCON = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_hidden_size": 32,
}
"""Falcon looks its attention up in its own table of functions."""
TWO_EXPERTS_PER_TOKEN = {"num_experts_per_tok": 2, "moe_intermediate_size": 8}
QWEN_MOE = TWO_EXPERTS_PER_TOKEN | {"num_experts": 4, "head_dim": 4, "decoder_sparse_step": 1}
DEEPSEEK = {
    **SMALL,
    **TWO_EXPERTS_PER_TOKEN,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "num_key_value_heads": 4,
}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {
    "d_model": 16,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "dropout": 0.0,
}
READS: dict[str, dict[str, Any]] = {
    "text.txt": {"sequence_length": 8},
    "reviews.csv": {"kind": "sequence_classification"},
    "digits": {},
    "talk.jsonl": {"kind": "instructions", "sequence_length": 160},
    "pairs.csv": {},
    "preferred.jsonl": {"kind": "preferences"},
}
"""Arguments of the task by its file of data."""
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama tied": ("llama", GROUPED | {"tie_word_embeddings": True}, "text.txt"),
    "gpt2": ("gpt2", GPT2, "text.txt"),
    "gemma2": ("gemma2", GROUPED | {"head_dim": 4, "query_pre_attn_scalar": 4}, "text.txt"),
    "phi3": ("phi3", GROUPED | {"resid_pdrop": 0.0}, "text.txt"),
    "falcon": ("falcon", FALCON, "text.txt"),
    "mixtral": ("mixtral", GROUPED | BALANCED | {"num_local_experts": 2}, "text.txt"),
    "bert": (
        "bert",
        SMALL | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
        "reviews.csv",
    ),
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
    "preferences": ("llama", GROUPED, "preferred.jsonl"),
    "preferences of experts": (
        "mixtral",
        GROUPED | BALANCED | {"num_local_experts": 2},
        "preferred.jsonl",
    ),
    "mamba": (
        "mamba",
        {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "vocab_size": 256},
        "text.txt",
    ),
    "lora": ("base", {}, "text.txt"),
    "lora classifier": ("base", {}, "reviews.csv"),
    "lora instructions": ("base", {}, "talk.jsonl"),
    "lora preferences": ("base", {}, "preferred.jsonl"),
    "lora nf4": ("base", {"quantize": "nf4"}, "text.txt"),
    "lora int8": ("base", {"quantize": "int8", "use_rslora": True}, "text.txt"),
    "lora dora": ("base", {"use_dora": True}, "text.txt"),
    "lora of two": ("base", {"targets": ["q_proj", "down_proj"]}, "text.txt"),
}
"""Model types, configurations and files of data by a name."""


def arguments(name: str, data: Path) -> dict[str, Any]:
    """The task's arguments for a name in `MODELS`."""
    model, config, file = MODELS[name]
    args: dict[str, Any] = {"model": model, "config": config}
    if model == "base":
        args = {
            "model": str(data / "base"),
            "pretrained": True,
            "lora": {"r": 2, "alpha": 4, **config},
        }
    return args | READS[file] | {"data": file if file == "digits" else str(data / file)}


def make_task(name: str, data: Path) -> Any:
    return HuggingFace(**arguments(name, data))


@pytest.mark.parametrize("name", [*MODELS][:11])  # the others are built in the same ways
def test_a_model_is_built_the_same_twice_and_has_gradients(name: str, data: Path) -> None:
    task = make_task(name, data)
    model = built_model(task)
    structure = task.structure()
    assert same_bits(model.state_dict(), built_model(task).state_dict()) and model.training
    shapes = {key: parameter.shape for key, parameter in model.named_parameters()}
    assert {key: parameter.shape for key, parameter in structure.named_parameters()} == shapes
    assert all(parameter.is_meta for parameter in structure.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    batch = one_batch(task)
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.dim() == 0 and all(parameter.grad is not None for parameter in model.parameters())
    preprocessor: Any = task.preprocessor()
    assert len(Predictor(model.eval(), preprocessor).predict(preprocessor.example)) == 1
    classes = logits_of(call_model(model, preprocessor(preprocessor.example))).shape[-1]
    model.train()
    expected = {"text.txt": 256, "digits": 10, "reviews.csv": 2}[MODELS[name][2]]
    assert classes == expected and loss.item() == pytest.approx(math.log(classes), rel=0.35)
    metrics = task.metrics(model, batch)
    assert "loss" in metrics and all(value.dim() == 0 for value in metrics.values())
    blocks = task.blocks(model)
    if blocks is not None:
        assert len(blocks) == 2
        assert all(model.get_submodule(block) for block in blocks)


def test_the_loss_is_that_of_the_library(data: Path) -> None:
    """With `labels` the library shifts and averages itself; the task gets shifted targets."""
    task = make_task("llama", data)
    model = built_model(task)
    inputs, targets = one_batch(task)
    tokens = torch.cat([inputs, targets[:, -1:]], 1)
    library = model(input_ids=tokens, labels=tokens).loss
    assert task.loss(model, (inputs, targets)).item() == pytest.approx(library.item(), rel=1e-6)
    assert task.items((inputs, targets)) == targets.numel() and task.unit == "tokens"
    assert set(task.metrics(model, (inputs, targets))) == {"loss", "bits_per_byte"}
    assert task.derived({"loss": 1.0}) == {"perplexity": pytest.approx(math.e)}


def test_the_loss_of_a_mixture_balances_its_experts(data: Path) -> None:
    task = make_task("mixtral", data)
    model = built_model(task)
    batch = one_batch(task)
    output = model(input_ids=batch[0], output_router_logits=True)
    plain = F.cross_entropy(output.logits.flatten(0, 1), batch[1].flatten())
    balanced = plain + 0.1 * output.aux_loss
    assert task.loss(model, batch).item() == pytest.approx(balanced.item(), rel=1e-6)
    assert task.metrics(model, batch)["loss"].item() == pytest.approx(plain.item(), rel=1e-6)
    reader = Reader(make_task("deepseek", data))
    assert reader.costs(CAST).parts
    assert not reader.note
    assert reader.mixtures, "the planner reads them without a run"
    assert {p.split_dim for p in reader.size.parameters if p.is_expert} == {0}


@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss"])
def test_experts_are_grouped_as_the_library_computes_them(kind: str) -> None:
    """Also in copies, and in 16 bits under autocast. gpt-oss has biases, so it is not grouped."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    sizes = GROUPED | {
        "vocab_size": 32,
        "head_dim": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    config = AutoConfig.for_model(kind, **sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    grouped_model = copy.deepcopy(model)
    group_experts(grouped_model)
    grouped_model = pickle.loads(pickle.dumps(copy.deepcopy(grouped_model)))
    tokens = torch.randint(0, 32, (2, 8))
    for any_model in (model, grouped_model):
        any_model(tokens, labels=tokens).loss.backward()
    for parameter, expected in zip(grouped_model.parameters(), model.parameters(), strict=True):
        assert torch.allclose(parameter.grad, expected.grad, atol=1e-7)
    grouped = [
        parameter.experts
        for parameter in find_mixtures(grouped_model)
        if "forward" in vars(parameter.experts)
    ]
    assert len(grouped) == (0 if kind == "gpt_oss" else 2)
    product = mock.Mock(wraps=grouped_linear)
    with (
        torch.autocast("cpu", torch.bfloat16),
        mock.patch("app.tasks.huggingface.experts.grouped_linear", product),
    ):
        for experts in grouped:
            experts(torch.randn(3, 16), torch.zeros(3, 2, dtype=torch.int64), torch.ones(3, 2))
    types = {call.args[0].dtype for call in product.mock_calls}
    assert types == ({torch.bfloat16} if grouped else set())


@pytest.mark.parametrize("name", ["bert", "llama classifier", "gpt2 classifier"])
def test_padding_does_not_change_logits(name: str, data: Path) -> None:
    """A text's logits are the same beside a longer text, in encoders and in causal models."""
    task = make_task(name, data)
    model = built_model(task).eval()
    texts = task.train_data()
    lengths = [len(text) for text in texts.texts]
    shortest_and_longest = [lengths.index(min(lengths)), lengths.index(max(lengths))]
    (tokens, mask), _ = texts.__getitems__(shortest_and_longest)
    assert mask[0].sum() < mask[1].sum()
    assert (tokens[0][mask[0] == 0] == task.config.pad_token_id).all()
    together = model(input_ids=tokens, attention_mask=mask).logits[0]
    assert torch.allclose(together, model(tokens[:1, : int(mask[0].sum())]).logits[0], atol=1e-6)


def test_an_encoder_as_causal_model_does_not_see_later_tokens(data: Path) -> None:
    text: Any = {"data": str(data / "text.txt"), "sequence_length": 8}
    encoder = HuggingFace(model="bert", config=SMALL, kind="causal_lm", **text)
    model = built_model(encoder).eval()
    tokens = one_batch(encoder)[0]
    changed = tokens.clone()
    changed[:, -1] += 1
    logits = model(input_ids=tokens).logits
    assert torch.equal(logits[:, :-1], model(input_ids=changed).logits[:, :-1])


def test_the_trained_model_that_users_get_ignores_padding(data: Path) -> None:
    trained = make_task("llama", data).build_trained().eval()
    ids = torch.tensor([[9, 9, 5, 6, 7]])
    padded = trained(input_ids=ids, attention_mask=torch.tensor([[0, 0, 1, 1, 1]])).logits[:, -1]
    assert torch.allclose(padded, trained(input_ids=ids[:, 2:]).logits[:, -1], atol=1e-6)


ALONG = {"split_input": 1, "gather": 4, "sequence": 5}
"""Sequence parallelism of two layers.

The first layer splits its input, attention and feed-forward gather, and norms work on a part.
"""
PLANS = {
    "llama": {"embedding": 1, "head": 1, "colwise": 10, "rowwise": 4, **ALONG},
    "qwen3": {"embedding": 1, "head": 1, "colwise": 10, "rowwise": 4, "partial": 4, **ALONG},
    # Gemma's embedding scales its output, so it is not split.
    "gemma2": {"head": 1, "colwise": 10, "rowwise": 4, **ALONG, "sequence": 9},
    # The outputs of fused projections are gathered.
    "phi3": {"embedding": 1, "head": 1, "colwise_gather": 8},
    "mixtral": {"embedding": 1, "head": 1, "colwise": 6, "rowwise": 2, "experts": 2},
    # The head of a classifier has no vocabulary to split.
    "llama classifier": {"embedding": 1, "colwise": 10, "rowwise": 4},
    "gpt2": None,
}


@pytest.mark.parametrize("name", PLANS)
def test_layers_are_split_by_the_librarys_plan(name: str, data: Path) -> None:
    task = make_task(name, data)
    model = task.structure()
    plan = task.tensor_plan(model)
    styles = None if plan is None else dict(Counter(plan.values()))
    assert styles == PLANS[name]
    attention_is_split = plan is not None and "model.layers.0.self_attn.q_proj" in plan
    assert task.heads() == (2 if attention_is_split else None)  # 4 heads, 2 of keys and values
    applied = make_plan(model, plan, True)  # raises unless each module fits its style
    if name == "gpt2":  # its transposed layers are split too
        assert applied.styles["transformer.h.0.attn.c_attn"] == "colwise_gather"
        assert applied.dims["transformer.h.0.attn.c_attn.weight"] == 1  # (in, out)
        assert applied.dims["transformer.h.0.attn.c_attn.bias"] == 0
        split = sum(p.numel() for name, p in model.named_parameters() if name in applied.dims)
        assert split > 0.9 * sum(p.numel() for p in model.parameters())


@pytest.mark.slow
def test_sequence_parallelism_splits_activations_as_the_planner_counts_them(data: Path) -> None:
    """A Llama's layers pass on a part of the sequence, and all of it without this option."""
    task = HuggingFace(**arguments("llama", data) | {"config": GROUPED | {"num_hidden_layers": 3}})
    shapes = []
    saved_bytes = []
    for sequence_parallel in (True, False):
        model = built_model(task)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda _, __, y: shapes.append(tuple(y.shape)))
        one_part(model, task.tensor_plan(model), 2, sequence_parallel=sequence_parallel)
        model(one_batch(task)[0])
        costs = Reader(task, sequence_parallel=sequence_parallel).costs(PLAIN)
        assert len(set(costs.order[1:])) == 1, "the first layer splits its input"
        saved_bytes.append(costs.parts[costs.order[-1]].at(4, 2)["saved"])
    assert shapes == [(4, 4, 16)] * 3 + [(4, 8, 16)] * 3
    assert saved_bytes[0] < 0.85 * saved_bytes[1]


def test_layers_with_adapters_are_split_as_without_them(base: Path) -> None:
    """DoRA reads whole matrices, so that its layers are gathered."""
    task = make_task("lora of two", base)
    model = built_model(task)
    plan = task.tensor_plan(model)
    assert plan is not None
    styles = {name: value for name, value in plan.items() if name.startswith("model.layers.1.")}
    attention = "model.layers.1.self_attn"
    mlp = "model.layers.1.mlp"
    assert styles == {
        "model.layers.1.input_layernorm": "sequence",
        attention: "gather",
        f"{attention}.q_proj.base_layer": "colwise",
        f"{attention}.q_proj.lora_A.default": "adapter_in",
        f"{attention}.q_proj.lora_B.default": "colwise",
        f"{attention}.k_proj": "colwise",
        f"{attention}.v_proj": "colwise",
        f"{attention}.o_proj": "rowwise",
        "model.layers.1.post_attention_layernorm": "sequence",
        mlp: "gather",
        f"{mlp}.gate_proj": "colwise",
        f"{mlp}.up_proj": "colwise",
        f"{mlp}.down_proj.base_layer": "rowwise",
        f"{mlp}.down_proj.lora_A.default": "adapter_rowwise",
        f"{mlp}.down_proj.lora_B.default": "sequence",
    }
    for sequence_parallel in (True, False):
        split_model = built_model(task)
        one_part(split_model, plan, 2, sequence_parallel=sequence_parallel)
        split_model(one_batch(task)[0])
    assert (
        make_task("lora dora", base).tensor_plan(built_model(make_task("lora dora", base))) is None
    )


def test_a_colwise_layer_without_a_rowwise_partner_is_gathered() -> None:
    """Its output must not stay split where the next layer has a style that is not supported."""
    model: Any = nn.Module()
    block = nn.ModuleDict({"up": nn.Linear(4, 8), "down": nn.Linear(8, 4), "norm": nn.LayerNorm(8)})
    model.parts = nn.ModuleList([block])
    model.table = nn.Embedding(4, 4)
    styles = {"up": "colwise", "down": "packed_rowwise", "norm": "replicated_with_grad_allreduce"}
    model.tp_plan = {f"parts.*.{name}": style for name, style in styles.items()}
    model.get_input_embeddings = lambda: model.table
    assert tensor_plan(model, parallel_head=False) == {
        "parts.0.up": "colwise_gather",
        "table": "embedding",
    }


class Reductions:
    """Counts the gradients that DDP and `fully_shard` reduce, and reduces them as they do.

    It is a hook of both: https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html and
    `FSDPModule.set_custom_reduce_scatter`.
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
        options: Any = {"op": op, "group": group, "async_op": async_op}
        return reduce_scatter_into(output_tensor, input_tensor, **options)


def _trained(
    rank: int, rows: Any, strategy: str, workers: int, degrees: dict[str, int]
) -> list[tuple[Curve, int]]:
    """For each row the curve of two steps, and the number of gradients that ddp or fsdp reduced."""
    wrap = ddp.wrap
    shard = fsdp.shard
    reductions = Reductions()
    sequence_parallel = bool(degrees.get("sequence_parallel", True))
    degrees = {name: degree for name, degree in degrees.items() if name != "sequence_parallel"}

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
    with (
        mock.patch.object(ddp, "wrap", wrap_and_count),
        mock.patch.object(fsdp, "shard", shard_and_count),
    ):
        for values in rows:
            reductions.numbers = 0
            trial = make_trial(values, steps=2)
            options = Options(sequence_parallel=sequence_parallel)
            curve = train(trial, choose(strategy, workers, **degrees), options, CPU)
            trained.append((curve, reductions.numbers))
    return trained


SINGLE_DEVICE: dict[str, Curve] = {}
"""Curves on one device by the model's name, each computed once."""
slow = functools.partial(pytest.param, marks=pytest.mark.slow)
PARITY = [
    slow("ddp", 2, {}, ("lora instructions", "bart", "mamba"), 1e-5),
    ("fsdp", 2, {}, ("mixtral", "lora nf4"), 1e-5),
    slow("fsdp", 2, {}, ("llama tied", "lora classifier"), 1e-5),
    slow(
        "fsdp", 2, {}, ("vit", "gpt2 instructions", "t5", "lora dora", "lora int8", "mamba"), 1e-5
    ),
    ("tensor", 2, {}, ("llama tied", "mixtral", "lora"), 2e-5),
    slow("tensor", 2, {}, ("gpt2", "bert"), 2e-5),
    slow("tensor", 2, {}, ("qwen3", "gemma2", "phi3"), 2e-5),
    slow(
        "tensor",
        2,
        {},
        (
            *("lora of two", "lora nf4", "lora dora", "instructions", "lora instructions"),
            *("t5", "qwen3 moe", "olmoe", "deepseek", "mamba"),
        ),
        2e-5,
    ),
    slow("tensor", 2, {"sequence_parallel": False}, ("lora", "lora of two"), 2e-5),
    slow("tensor+pipeline", 4, {"tp": 2}, ("lora",), 2e-5),
    slow(
        "ddp+tensor+expert", 4, {"tp": 2, "ep": 2}, ("mixtral of 4", "qwen3 moe", "deepseek"), 2e-5
    ),
    slow("fsdp+tensor+expert", 4, {"tp": 2, "ep": 2}, ("mixtral of 4", "olmoe"), 2e-5),
    slow(
        "fsdp+tensor",
        4,
        {"tp": 2},
        ("mixtral of 4", "llama", "gpt2", "lora preferences"),
        2e-5,
    ),
    slow("tensor+pipeline", 4, {"tp": 2}, ("llama",), 2e-5),
    ("context", 2, {"cp": 2}, ("gpt2", "qwen3", "mistral"), 1e-5),
    ("pipeline", 2, {"pp": 2}, ("mixtral",), 1e-5),
    slow(
        "pipeline",
        2,
        {"pp": 2},
        ("lora", "lora nf4", "lora dora", "instructions", "preferences of experts", "mamba"),
        1e-5,
    ),
    ("ddp+context+expert", 2, {"cp": 2, "ep": 2}, ("mixtral",), 1e-5),
    slow(
        "fsdp+tensor+context", 4, {"tp": 2, "cp": 2, "dp_shard": 1}, ("llama", "preferences"), 2e-5
    ),
]


@pytest.mark.alone
@pytest.mark.parametrize(("strategy", "workers", "degrees", "names", "tolerance"), PARITY)
def test_every_layout_trains_the_same_model(
    strategy: str, workers: int, degrees: Any, names: Any, tolerance: float, base: Path
) -> None:
    """Of a model with adapters, only the gradients of adapters and of a new head are reduced."""
    overrides = [
        "task=huggingface",
        "train.global_batch_size=4",
        "train.clip_norm=1",
        "optimizer.lr=0.01",
    ]
    rows = [
        to_dict(load_config([], [*overrides, f"task_args={json.dumps(arguments(name, base))}"]))
        for name in names
    ]
    split = run_distributed(_trained, workers, rows, strategy, workers, degrees)[0]
    for name, row, (curve, reduced) in zip(names, rows, split, strict=True):
        if name not in SINGLE_DEVICE:
            ((SINGLE_DEVICE[name], _),) = _trained(0, [row], "single", 1, {})
        distance = difference(SINGLE_DEVICE[name], curve)
        assert distance.within(tolerance), f"{name}: {distance}"
        if name.startswith("lora") and strategy in ("ddp", "fsdp"):
            parameters = built_model(make_task(name, base)).parameters()
            trainable = sum(p.numel() for p in parameters if p.requires_grad)
            assert reduced == 2 * trainable


def test_models_that_cannot_be_split_are_refused(data: Path) -> None:
    for name, changes, message in (
        ("mistral", {"sliding_window": 4}, "4 tokens back .* at most 4"),
        (
            "qwen3",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layers of linear_attention",
        ),
        ("bert", {}, "of causal_lm and preferences, but this model is for sequence_class"),
    ):
        task = make_task(name, data)
        task.config.update(changes)
        with pytest.raises(UserError, match=message):
            task.context_plan(nn.Module())
    task = make_task("mixtral of 4", data)
    model = task.structure()
    plan = task.tensor_plan(model)
    make_plan(model, plan, True, tp=2, ep=2)
    message = r"tp × parallel.ep is 8, .* divide the 4 experts .*: write 1, 2, 4"
    with pytest.raises(LayoutError, match=message):
        make_plan(model, plan, True, tp=2, ep=4)
    one_layer = ["model.layers.0"]
    without_routers = mock.patch("app.tasks.huggingface.plan.layers", lambda model: one_layer)
    message = r"of model\.layers\.1\.mlp\.experts no router is"
    with without_routers, pytest.raises(UserError, match=message):
        make_task("mixtral", data)
