"""The rows of published runs, and the plain `trireme plan` command that plans each of them.

There are three tables: published.csv (from 1.3 to 462 billion parameters under tensor and pipeline
parallelism, and FSDP), llm_foundry.csv.gz (MPT models under FSDP), and beyond.csv.gz (mixtures,
LoRA, fine-tuning, other GPUs). A row is planned as the same model of the `transformers` library, or
as the language_modelling task if that has the model, with the run's degrees, micro-batch,
recomputation and precision written as keys.

layouts.csv.gz has all 587 layouts that Aleph Alpha ran with FlashAttention-2; 108 rows of
published.csv are from the same sheets. fresh.csv.gz has 99 rows of ten pages, blind.csv.gz 154 of
27 others, later.csv.gz 16 of three more, and unseen.csv.gz 125 of 25 more, that nothing was fitted
to; they have the columns of published.csv, and are read where they are named, and to make the
ranges of mixtures and adapters. Each was written down before any plan of it was looked at.
sealed.csv.gz has 209 more, of 34 pages, of which no plan was made: it is only read where it is
named, to judge a planner by it once.

A hash of a row's address and settings puts it into one of three parts: `fit` (constants are fitted
to it), `choose` (looked at while the planner is written) and `held out` (looked at once, when the
planner is finished).
"""

from __future__ import annotations

import csv
import functools
import gzip
import hashlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from app.errors import UserError, described

FOLDER = Path(__file__).parent
TABLES = tuple(FOLDER / name for name in ("published.csv", "llm_foundry.csv.gz", "beyond.csv.gz"))
LATER_TABLES = tuple(
    FOLDER / f"{name}.csv.gz" for name in ("fresh", "blind", "later", "further", "unseen")
)
"""Tables that no constants are fitted to.

The ranges of mixtures and of adapters, of which the others have few runs, are made of their errors.
"""
SEALED = FOLDER / "sealed.csv.gz"
"""Rows that no constants and no ranges are made of, in none of the tables above."""
SWEEP = FOLDER / "layouts.csv.gz"
SOURCES = FOLDER / "published_sources.yaml"
MODELS = FOLDER / "models.yaml"
PARTS = ("fit", "fit", "choose", "held out")
"""Parts of the rows; half of them are fitted to."""
GIB = 2**30
GPUS = {"h100": "h100-80gb", "a100": "a100-80gb"}
"""What tables call a GPU that has several names."""
FLOPS_PER_PARAMETER = 6
"""Floating-point operations of a token, forward and backward, as publishers count them."""
UNITS = {"gib": 1.0, "gb": 1e9 / GIB}
"""In GiB."""
PEAKS = {
    "max_memory_allocated": "allocated",
    "max gpu ram": "allocated",
    "torch reserved": "reserved",
    "of the card": "card",
}
"""What published peaks count, by the words of beyond.csv.gz.

LitGPT prints torch.cuda.max_memory_allocated.
"""
FUSED_ATTENTION = {"gpt_oss": "flex_attention"}
"""What fused attention is called for kinds of models that keep scores in memory by default."""
FUSED = ("NVIDIA-NeMo/Megatron", "nemo-framework")
"""Sources whose trainers fuse element-wise operations, norms and RoPE, as torch.compile does."""
ALIGNED = 64
"""Multiples to which widths of layers are rounded."""
ADAPTERS = {"r": 16}
"""The adapters of a run with LoRA whose source does not say them."""
QUERIES_AND_VALUES = {"r": 8, "targets": ["q_proj", "v_proj"]}
IN_PROJECTIONS = {"r": 16, "targets": ["q_proj", "k_proj", "v_proj"]}
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
GATED = ["gate_proj", "up_proj", "down_proj"]
FMS = {"r": 16, "targets": ATTENTION}
LATENT = ["q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
ANSWER = {"r": 64, "targets": [*ATTENTION[:3], *GATED]}
NF4 = {"quantize": "nf4", "quantize_layers": "all"}
"""Weights of bitsandbytes: all linear layers but the last are quantized.

fms-acceleration loads by BitsAndBytesConfig (framework_plugin_bnb.py), which leaves out the last
layer alone; fsdp_qlora's train.py has `skip_modules=["lm_head"]`.
"""
ADAPTERS_OF: dict[str, dict[str, Any]] = {
    "Lightning-AI/litgpt": QUERIES_AND_VALUES,
    "pytorch/torchtune": QUERIES_AND_VALUES,
    "nemo-framework": IN_PROJECTIONS,
    "moonlight-16b-a3b/card": {"r": 8, "targets": LATENT},
    "model_verification_cards": {"r": 8, "targets": ATTENTION},
    "NVIDIA-NeMo/Megatron": IN_PROJECTIONS,
    "B200+Vultr+POC": IN_PROJECTIONS,
    "QwenLM/Qwen": {"r": 64},
    "a100_80gb.csv#qlora": FMS | NF4,
    "a100_80gb_liger.csv#qlora": FMS | NF4,
    "fms-acceleration": FMS,
    "benchmarks_03_2024.md#qlora": ANSWER | NF4,
    "fsdp_qlora": ANSWER,
    "ms-swift": {"r": 8, "targets": ATTENTION[:3]},
    "llama2_70b_lora": FMS,
    "VectorInstitute/vectorlm": QUERIES_AND_VALUES,
    "universal-llm-trainer": {"r": 8, "targets": [*ATTENTION, *GATED]},
    "hiyouga/LLaMA-Factory": {"r": 8, "targets": [*ATTENTION, *GATED]} | NF4,
    "PrimeIntellect-ai/prime-rl": {"r": 16, "targets": [*ATTENTION, *GATED]},
}
"""The same by source; the first that is part of an address counts.

NVIDIA's recipes for performance set peft.target_modules to ["linear_qkv"] alone, with a rank of 16
(NeMo's nemo/collections/llm/recipes/llama3_70b.py, Megatron-Bridge's scripts/performance).

LitGPT's page counts 4,194,304 trained parameters; its script checkpoints blocks under FSDP.
torchtune's 8B_lora_single_device.yaml has these adapters, and checkpoints activations: the 24 GB of
an RTX 4090 need that, and the page's A6000 is 1.5 times as fast without recomputation.

fms-acceleration's scripts/benchmarks/scenarios.yaml has its adapters, fsdp_qlora's train.py its
own (get_target_modules). ms-swift 2.3 adapts what a model's attention reads.

Those of MLPerf's LoRA are its rules'. VectorLM's page has r=8 and q_proj and v_proj; the universal
trainer's config, LLaMA-Factory's default (lora_target: all) and prime-rl's have all linear layers
of a block. Moonlight's card names the projections of its latent attention.
"""

BF16 = {"train.weight_dtype": "bf16", "optimizer.state_dtype": "bf16"}
BF16_WEIGHTS = {"train.weight_dtype": "bf16"}
KEYS_OF = {
    "Automodel/blob/36044ad3d139363fb6c73c24af2e7c6b65ec52f6/docs/guides": BF16,
    "KempnerForge": BF16,
    "fms-acceleration": BF16,
    "fsdp_qlora": BF16,
    "ms-swift/blob/c912e59": BF16,
    "pytorch/torchtune/blob/bd2a0fc": BF16,
    "lightning-thunder": BF16,
    "small-ablation": BF16,
    "VectorInstitute/vectorlm": BF16,
    "universal-llm-trainer": BF16,
    "llama2_70b_lora": BF16_WEIGHTS,
    "card.yaml#peft": BF16_WEIGHTS,
    "test+summary#lora": BF16_WEIGHTS,
    "hiyouga/LLaMA-Factory": BF16_WEIGHTS,
    "qwen3-14b-8xb200#bf16": BF16,
    "ms-swift/blob/7cb73c1": {"optimizer.state_dtype": "bf16"},
}
"""Further keys of a source's runs.

Automodel loads weights in the type of their file (torch_dtype="auto"), and torch's Adam keeps that.
The others make or load their weights in bf16 too, by their settings or by the peaks that they
publish; Megatron's LoRA has those that it does not train in bf16.
"""
WIDENED = ("a100_80gb_liger.csv",)
"""Sources of which sharded runs of all weights have these in float32 all the same.

accelerate casts what it trains up where FSDP has a mixed precision (bf16: True in
scenarios-liger.yaml; the other scenarios of fms-acceleration have none), so that 16 bytes of a
parameter are allocated after training, where one GPU has 6.
"""
NOT_ASSUMED = ("context_gib", "equal_stages", "rank_0")
"""What published_sources.yaml says of a trainer that is no value of --assume.

context_gib: what a process has of a card. equal_stages: whether each stage of a pipeline has as
many blocks, as parallel.stages can say; Trireme's are cut so that the slowest is fast. rank_0:
whether the peak is that of rank 0, which is on the first stage, not the fullest one's.
"""
FULL_SHARD = (
    "KempnerForge",
    "fms-acceleration",
    "fsdp_qlora",
    "Qwen3-30B-A3B+MOE",
    "h200_2025-06",
    "VectorInstitute/vectorlm",
    "PrimeIntellect-ai/prime-rl",
    "torchtitan/commit",
    "torchtitan/distributed/deepep",
    "pytorch/ao/blob/36027d8",
    "qwen3-14b-8xb200",
    "RTX+3090+with+TorchTitan",
)
"""Sources whose sharded runs free gathered weights after forward, however few they are.

KempnerForge calls fully_shard with reshard_after_forward=True (its distributed/parallel.py), and so
do prime-rl, and torchtitan without a pipeline; the others shard by accelerate's or torch's
FULL_SHARD.
"""
WAITING = ("KempnerForge",)
"""Sources whose sharded runs reduce gradients after the last micro-batch, however large they are.

KempnerForge's training/grad.py sets set_requires_gradient_sync(False) before.
"""
IN_16_BITS = (
    "Lightning-AI/litgpt",
    "NVIDIA-NeMo/Automodel",
    "pytorch/torchtune",
    "QwenLM/Qwen",
)
"""Sources whose runs with LoRA have all weights in bf16, those of norms and adapters too.

LitGPT's table says so ("bf16-true"), and Automodel's recipes (examples/llm_benchmark at 36044ad:
`torch_dtype: bf16`) and torchtune's (`dtype: bf16`). Qwen's own model makes itself bf16 when it is
built (modeling_qwen.py on the hub), and PEFT makes adapters in the type of the layer. Their kernels
are those of such weights: under autocast norms would give float32, which every layer casts again.
"""


@dataclass(frozen=True)
class Run:
    """A row; a figure that is not published is 0 or "".

    Attributes:
        source: The address of its page.
        model: The model's name.
        d_model: The model's width.
        n_layers: The number of its blocks.
        n_heads: The number of its heads.
        n_kv_heads: The number of its heads for keys and values.
        d_hidden: The width of its feed-forward layers.
        gated: Whether these are gated.
        vocab_size: The size of its vocabulary.
        tied: Whether embedding and head share their weights.
        attention: "flash", or "softmax": scores in memory, their softmax one kernel.
        kernels: "fused" as torch.compile fuses them; "eager", a norm being one kernel; "plain", a
            norm being several.
        sequence: The tokens of a sequence.
        gpu: The GPU.
        per_node: GPUs of a node.
        network_gbit: Gigabits per second of a node's network.
        gpus: The number of GPUs.
        data: What data-parallel workers do: fsdp, hsdp, zero1, zero2 or ddp.
        tp: The degree of tensor parallelism.
        pp: The number of pipeline stages.
        chunks: The parts of the model on each stage.
        cp: The degree of context parallelism.
        sequence_parallel: Whether norms are divided along the sequence under tensor parallelism.
        micro_batch: The sequences of a micro-batch.
        global_batch: The sequences of a step.
        precision: "bf16", "fp16" or "fp8".
        recompute: "none", "full" or another kind of activation checkpointing.
        reduce: The type in which gradients add up and are sent.
        overlap: Whether communication of tensor parallelism overlaps with products (asynchronous
            tensor parallelism).
        step_seconds: Seconds of a step.
        memory_gib: GiB of a GPU's memory.
        ep: How many workers, tensor-parallel ones too, share the experts of a mixture.
        method: "pretrain", "sft" or "lora".
        table: The table that the row is in.
        ran_out: Whether it ran out of memory.
        described: What published_sources.yaml says of its trainer, which a plain command does not
            know: values of --assume by name, and those of NOT_ASSUMED.
        peak: What `memory_gib` counts: what torch had "allocated", what its allocator had
            "reserved", or what the "card" had in use; "" if the source does not say.
    """

    # The order of the fields decides the part of a row, see `part`.
    source: str
    model: str
    _: KW_ONLY
    d_model: int = 0
    n_layers: int = 0
    n_heads: int = 0
    n_kv_heads: int = 0
    d_hidden: int = 0
    gated: int = 0
    vocab_size: int = 0
    tied: int = 0
    attention: str = "flash"
    kernels: str = "eager"
    sequence: int = 0
    gpu: str = ""
    per_node: int = 8
    network_gbit: float = 0.0
    gpus: int = 1
    data: str = ""
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    sequence_parallel: int = 1
    micro_batch: int = 0
    global_batch: int = 0
    precision: str = "bf16"
    recompute: str = "none"
    reduce: str = "bf16"
    overlap: int = 0
    step_seconds: float = 0.0
    memory_gib: float = 0.0
    ep: int = 1
    method: str = "pretrain"
    table: str = "published"
    ran_out: int = 0
    described: tuple[tuple[str, Any], ...] = ()
    peak: str = ""

    @property
    def part(self) -> str:
        """The part of the rows that it is in; its settings decide it, and not its results."""
        names = [field.name for field in fields(Run)]
        settings = astuple(self)[: names.index("step_seconds")]
        digest = hashlib.sha256(repr(settings).encode()).digest()
        return PARTS[digest[1] % len(PARTS)]

    @property
    def kind(self) -> str:
        """Its kind; plans of runs of one kind err alike."""
        if self.is_mixture:
            return "mixture"
        if self.method != "pretrain":
            return self.method
        split = [name for name in ("cp", "tp", "pp") if getattr(self, name) > 1]
        return "+".join(split) or "data"

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The --assume options with which a user of its trainer would describe it to a plan."""
        left_out = [*NOT_ASSUMED]
        if self.repeats_allocations:
            left_out.append("fragmentation")
        return tuple(f"{name}={value}" for name, value in self.described if name not in left_out)

    @property
    def repeats_allocations(self) -> bool:
        """Whether each micro-batch allocates the same tensors in the same order, and nothing else.

        What leaves pieces of memory unused is recomputation, LoRA, and the collectives of
        data-parallel and tensor-parallel workers (published_sources.yaml).
        """
        has_collectives = self.gpus > self.pp
        return not has_collectives and self.recompute == "none" and self.method != "lora"

    @property
    def has_equal_stages(self) -> bool:
        """Whether its trainer gives each pipeline stage as many blocks."""
        return bool(dict(self.described).get("equal_stages"))

    @property
    def logs_rank_0(self) -> bool:
        """Whether its peak is that of rank 0, on the first stage of a pipeline."""
        return bool(dict(self.described).get("rank_0")) and self.pp > 1

    @property
    def is_mixture(self) -> bool:
        """Whether its model is a mixture of experts."""
        config = self.task_args.get("config", {})
        has_experts = any("expert" in key for key in config)
        return has_experts or self.model.startswith("deepseek")

    @property
    def has_known_network(self) -> bool:
        """Whether its page names the network between its nodes, or it has one node."""
        return self.network_gbit > 0 or self.gpus <= self.per_node

    @property
    def name(self) -> str:
        """The run for a person."""
        degrees = []
        for name in ("tp", "pp", "cp", "ep"):
            degree = getattr(self, name)
            if degree > 1:
                degrees.append(f"{name}={degree}")
        size = f"{self.micro_batch}×{self.sequence}" if self.micro_batch else str(self.sequence)
        gpu = self.gpu.partition(":")[0]
        recompute = "" if self.recompute == "none" else f" {self.recompute}"
        gpus = f"{self.gpus} {gpu}"
        return f"{self.model} {size} on {gpus} {' '.join(degrees)} {self.precision}{recompute}"

    @property
    def task(self) -> str:
        """The task that has its model."""
        return "huggingface" if "model" in self.task_args else "language_modelling"

    @functools.cached_property
    def task_args(self) -> dict[str, Any]:
        """What the command says of the model, and of the data, which need not exist."""
        args: dict[str, Any] = {"data": "tokens-of-the-run.bin", "sequence_length": self.sequence}
        if not self.d_model:
            args |= self._named_model()
        elif self.model.startswith("mpt-"):
            args |= {"model": "gpt2", "config": self._gpt2_config()}
        elif self._is_built_in():
            args |= {
                "d_model": self.d_model,
                "n_layers": self.n_layers,
                "n_heads": self.n_heads,
                "d_hidden": self._gated_hidden(),
                "vocab_size": self.vocab_size,
                "tie_weights": bool(self.tied),
            }
        else:
            args |= {"model": "llama" if self.gated else "starcoder2", "config": self._config()}
        if self.attention == "softmax":
            args["attention"] = "eager"
        elif args.get("model") in FUSED_ATTENTION:
            args["attention"] = FUSED_ATTENTION[args["model"]]
        if self.method == "lora":
            named = (lora for name, lora in ADAPTERS_OF.items() if name in self.source)
            args["lora"] = dict(next(named, ADAPTERS))
        return args

    def _named_model(self) -> dict[str, Any]:
        """The arguments of a model that models.yaml has by its name."""
        entry = _models()[self.model]
        config = dict(entry["config"])
        if entry["model"] not in ("gpt2", "t5"):
            config["max_position_embeddings"] = self.sequence
        return {"model": entry["model"], "config": config}

    def _is_built_in(self) -> bool:
        """Whether the language_modelling task has the model."""
        has_all_kv_heads = self.n_kv_heads == self.n_heads
        return has_all_kv_heads and self.kernels != "plain" and self.attention == "flash"

    def _gated_hidden(self) -> int:
        """The width of a gated feed-forward layer with as many parameters as the run's.

        Those of built-in models are gated.
        """
        if self.gated:
            return self.d_hidden
        return round(2 * self.d_hidden / 3 / ALIGNED) * ALIGNED

    def _gpt2_config(self) -> dict[str, Any]:
        """The configuration of a GPT-2 of the run's sizes."""
        dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        return dropouts | {
            "n_embd": self.d_model,
            "n_layer": self.n_layers,
            "n_head": self.n_heads,
            "n_inner": self.d_hidden,
            "n_positions": self.sequence,
            "vocab_size": self.vocab_size,
            "activation_function": "gelu",
        }

    def _config(self) -> dict[str, Any]:
        """The configuration of a model of the `transformers` library."""
        config: dict[str, Any] = {
            "hidden_size": self.d_model,
            "intermediate_size": self.d_hidden,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": bool(self.tied),
            "max_position_embeddings": self.sequence,
        }
        if not self.gated:
            config |= {"sliding_window": None, "use_bias": False, "embedding_dropout": 0.0}
        return config

    @property
    def keys(self) -> dict[str, Any]:
        """Keys that only runs of its source have."""
        values: dict[str, Any] = {}
        for name, keys in KEYS_OF.items():
            if name in self.source:
                values |= keys
        if self.method == "lora" and any(name in self.source for name in IN_16_BITS):
            values["train.weight_dtype"] = "bf16"
        is_sharded = self.data in ("fsdp", "hsdp") and self.gpus > self.tp * self.pp * self.cp
        if is_sharded and self.method != "lora" and any(name in self.source for name in WIDENED):
            values = {key: value for key, value in values.items() if key not in BF16}
        if is_sharded and self.pp == 1 and any(name in self.source for name in FULL_SHARD):
            values["parallel.reshard_after_forward"] = True
        if is_sharded and self.pp == 1 and any(name in self.source for name in WAITING):
            values["parallel.accumulate_sharded"] = False
        return values

    def _expert_degree(self) -> int:
        """parallel.ep for as many experts on each worker.

        `ep` is Megatron's with an expert tensor-parallel degree of 1: how many workers, tensor-
        parallel ones too, share the experts. Here these split the experts of the `transformers`
        library besides parallel.ep (strategies/tensor/experts.py).
        """
        return max(1, self.ep // self.tp)

    def _possible_chunks(self) -> int:
        """Chunks of a stage, of which each needs a block.

        Megatron may count embedding and head as a block each, so that the first and the last chunk
        have none (--account-for-embedding-in-pipeline-split).
        """
        blocks = self.n_layers or self.task_args.get("config", {}).get("num_hidden_layers")
        if not blocks:
            return self.chunks
        return max(1, min(self.chunks, blocks // self.pp))

    def command(self) -> tuple[list[str], dict[str, Any]]:
        """The key=value of `trireme plan`, and its options."""
        replicas = self.gpus // (self.tp * self.pp * self.cp)
        shards = replicas
        if self.data == "hsdp":
            shards = min(replicas, self.per_node)
        elif self.data in ("ddp", ""):
            shards = 1
        has_sequence_parallel = bool(self.sequence_parallel) and self.tp > 1
        values: dict[str, Any] = {
            "task": self.task,
            "task_args": json.dumps(self.task_args),
            "parallel.dp_replicate": replicas // shards,
            "parallel.dp_shard": shards,
            "parallel.tp": self.tp,
            "parallel.pp": self.pp,
            "parallel.cp": self.cp,
            "parallel.ep": self._expert_degree(),
            "parallel.sequence_parallel": has_sequence_parallel,
            "parallel.async_tp": bool(self.overlap) and has_sequence_parallel,
            "parallel.offload": False,
            "parallel.reduce_dtype": self.reduce,
            "train.global_batch_size": self.global_batch,
            "train.activation_checkpointing": self.recompute,
            "train.precision": self.precision,
            "train.compile": self.kernels == "fused",
            "train.clip_norm": 1.0,
        }
        values |= self.keys
        if self.micro_batch:
            values["train.micro_batch_size"] = self.micro_batch
        if self.data in ("zero1", "zero2") and self.pp == 1 and shards > 1:
            names = [self.data]
            if self.tp > 1:
                names.append("tensor")
            if self.cp > 1:
                names.append("context")
            values["strategy"] = "+".join(names)
        if self.pp > 1 and self.chunks:
            chunks = self._possible_chunks()
            values["parallel.schedule"] = "interleaved_1f1b" if chunks > 1 else "1f1b"
            values["parallel.chunks"] = chunks
        words = []
        for key, value in values.items():
            text = str(value).lower() if isinstance(value, bool) else str(value)
            words.append(f"{key}={text}")
        options: dict[str, Any] = {
            "gpus": self.gpus,
            "gpu": self.gpu,
            "per_node": min(self.per_node, self.gpus),
        }
        if self.network_gbit:
            options["interconnect"] = f"{self.network_gbit:g}Gb"
        return words, options


@functools.cache
def _models() -> dict[str, Any]:
    return dict(yaml.load(MODELS.read_text(), Loader=yaml.CSafeLoader))


def runs(*paths: str | Path) -> list[Run]:
    """The rows of tables.

    Args:
        paths: The tables; without any, all three.

    Raises:
        KeyError: A column is missing.
        ValueError: A figure is not a number.
    """
    rows = []
    for path in paths or TABLES:
        rows += _read_table(Path(path))
    return rows


def sweep_runs() -> list[Run]:
    """Every layout of a complete published sweep, those that ran out of memory included.

    layouts.csv.gz has what differs between the layouts of a source; published.csv has the rest.
    """
    of_source: dict[str, dict[str, str]] = {}
    for entry in _entries(TABLES[0]):
        of_source.setdefault(entry["source"], entry)
    return _runs_of([of_source[entry["source"]] | entry for entry in _entries(SWEEP)])


def _read_table(path: Path) -> list[Run]:
    try:
        return _runs_of(_entries(path))
    except (ValueError, KeyError, csv.Error, gzip.BadGzipFile) as error:
        is_missing = isinstance(error, KeyError)
        reason = f"it has no column {error}" if is_missing else described(error)
        raise UserError(
            f"{path} is not a table of published runs ({reason}): give one such as {TABLES[0]}"
        ) from error


def _entries(path: Path) -> list[dict[str, str]]:
    """The rows of a table, which may be compressed."""
    content = path.read_bytes()
    if path.suffix == ".gz":
        content = gzip.decompress(content)
    return list(csv.DictReader(io.StringIO(content.decode(), newline="")))


def _runs_of(entries: Sequence[Mapping[str, str]]) -> list[Run]:
    sources = yaml.load(SOURCES.read_text(), Loader=yaml.CSafeLoader)
    rows = []
    for entry in entries:
        if "ran_out" in entry:
            run = _from_beyond(entry)
        elif "network_gbit" in entry:
            run = _from_published(entry)
        else:
            run = _from_llm_foundry(entry)
        source = sources.get(run.source, {"address": run.source})
        described = tuple(source.get("runs", {}).items())
        peak = source.get("peak", run.peak)
        rows.append(replace(run, source=source["address"], described=described, peak=peak))
    return rows


def _from_published(entry: Mapping[str, str]) -> Run:
    """A row of published.csv, whose columns are the fields of a run."""
    parsers: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
    values = {}
    for field in fields(Run):
        if field.name in entry:
            parse = parsers[str(field.type)]
            values[field.name] = parse(entry[field.name] or 0)
    run = Run(**values)
    # It has a speed, or a peak alone, or ran out of memory.
    return replace(run, ran_out=int(not run.step_seconds and not run.memory_gib))


def _from_llm_foundry(entry: Mapping[str, str]) -> Run:
    """A row of llm_foundry.csv.gz.

    MPT models are GPT-2s in all but name, here under FSDP: LayerNorm, learned positions, biases and
    a feed-forward layer of two products with GELU (llmfoundry/models/mpt and models/layers/ffn.py
    at 061f2c7). The pages name their networks: InfiniBand and RoCE.
    """
    width = int(entry["d_model"])
    heads = int(entry["n_heads"])
    gpus = int(entry["gpus"])
    gpu = entry["gpu"].replace("_", "-")
    sequence = int(entry["seq_len"])
    micro_batch = int(entry["micro_batch_size"])
    batch = micro_batch * gpus * int(entry["grad_accum"])
    tokens_per_second = float(entry["tokens_per_s_per_gpu"]) * gpus
    return Run(
        source="llm-foundry",
        table="llm-foundry",
        model=f"mpt-{entry['model']}",
        d_model=width,
        n_layers=int(entry["n_layers"]),
        n_heads=heads,
        n_kv_heads=heads,
        d_hidden=4 * width,
        vocab_size=int(entry["vocab_size"]),
        tied=1,
        sequence=sequence,
        gpu=gpu,
        network_gbit=3200 if gpu.startswith("h100") else 1600,
        gpus=gpus,
        data="fsdp" if entry["sharding"] == "FULL_SHARD" else "zero2",
        micro_batch=micro_batch,
        global_batch=batch,
        precision="fp8" if entry["precision"].endswith("fp8") else "bf16",
        recompute="full" if entry["activation_checkpointing"] == "True" else "none",
        step_seconds=batch * sequence / tokens_per_second,
    )


def _from_beyond(entry: Mapping[str, str]) -> Run:
    """A row of beyond.csv.gz."""
    address = entry["address"]
    gpus = int(entry["gpus"])
    sequence = int(entry["seq"] or 0)
    batch = int(entry["global_batch"])
    tp = int(entry["tp"])
    pp = int(entry["pp"])
    cp = int(entry["cp"])
    data = entry["dp"]
    if not data and gpus > tp * pp * cp:
        data = "zero1"
    is_fused = entry["compile"] == "1" or any(word in address for word in FUSED)
    unit, _, peak = entry["peak_unit"].lower().partition(", ")
    tokens_per_second = _tokens_per_second_per_gpu(entry) * gpus
    return Run(
        source=address,
        table="beyond",
        model=entry["model"],
        kernels="fused" if is_fused else "eager",
        sequence=sequence,
        gpu=GPUS.get(entry["gpu"], entry["gpu"]),
        per_node=int(entry["per_node"]),
        network_gbit=float(entry["network_gbit"] or 0),
        gpus=gpus,
        data=data,
        tp=tp,
        pp=pp,
        cp=cp,
        chunks=int(entry["vp"]),
        ep=int(entry["ep"] or 1),
        micro_batch=int(entry["micro_batch"]),
        global_batch=batch,
        precision=entry["precision"].removeprefix("mx"),
        recompute=entry["recompute"] or "none",
        method=entry["method"],
        step_seconds=batch * sequence / tokens_per_second if tokens_per_second else 0.0,
        memory_gib=float(entry["peak_gb"] or 0) * UNITS.get(unit, 1.0),
        ran_out=int(entry["ran_out"] or 0),
        peak=PEAKS.get(peak, ""),
    )


def _tokens_per_second_per_gpu(entry: Mapping[str, str]) -> float:
    """The speed of a row of beyond.csv.gz, or what its FLOP/s come to; 0 if it has neither."""
    if entry["tokens_per_s_per_gpu"]:
        return float(entry["tokens_per_s_per_gpu"])
    has_sequence = int(entry["seq"] or 0) > 0
    if not entry["tflops_per_gpu"] or not has_sequence:
        return 0.0
    parameters = 1e9 * _models()[entry["model"]]["billions"]
    return 1e12 * float(entry["tflops_per_gpu"]) / (FLOPS_PER_PARAMETER * parameters)
