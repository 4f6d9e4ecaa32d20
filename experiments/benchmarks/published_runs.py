"""The rows of published runs, and the plain `trireme plan` command that plans each of them.

Three tables: published.csv (from 1.3 to 462 billion parameters under tensor and pipeline parallelism, and FSDP),
llm_foundry.csv (MPT models under FSDP), and beyond.csv (mixtures, LoRA, fine-tuning, other GPUs). A row is planned as
the same model of the `transformers` library, or as the language_modelling task where that has the model, with the
run's degrees, micro-batch, recomputation and precision written as keys.

A hash of a row's address and settings puts it into one of three parts: `fit` (its constants are fitted to it),
`choose` (looked at while the planner is written) and `held out` (looked at once, when it is finished).
"""

from __future__ import annotations

import csv
import functools
import hashlib
import json
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

TABLES = tuple(
    Path(__file__).with_name(f"{name}.csv") for name in ("published", "llm_foundry", "beyond")
)
SOURCES = Path(__file__).with_name("published_sources.yaml")
MODELS = Path(__file__).with_name("models.yaml")
PARTS = ("fit", "fit", "choose", "held out")
GIB = 2**30
GPUS = {"h100": "h100-80gb", "a100": "a100-80gb"}
"""What tables call a GPU that has several names."""
FLOPS_PER_PARAMETER = 6
"""Of a token, forward and backward, as those who publish FLOP/s count them."""
UNITS = {"gib": 1.0, "gb": 1e9 / GIB}
FUSED = ("NVIDIA-NeMo/Megatron", "nemo-framework")
"""Sources whose trainers fuse element-wise operations, norms and RoPE, as torch.compile does."""
ALIGNED = 64
"""Multiples in which widths of layers are rounded."""
ADAPTERS = {"r": 16}


@dataclass(frozen=True)
class Run:
    """A row. 0 or "" where a figure is not published."""

    source: str
    model: str
    d_model: int = 0
    n_layers: int = 0
    n_heads: int = 0
    n_kv_heads: int = 0
    d_hidden: int = 0
    gated: int = 0
    vocab_size: int = 0
    tied: int = 0
    attention: str = "flash"  # flash, or softmax: scores in memory, their softmax one kernel
    kernels: str = "eager"  # fused, as torch.compile does; eager, a norm being one kernel; plain, a norm being several
    sequence: int = 0
    gpu: str = ""
    per_node: int = 8
    network_gbit: float = 0.0
    gpus: int = 1
    data: str = ""  # what data-parallel workers do: fsdp, hsdp, zero1, zero2 or ddp
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    sequence_parallel: int = 1
    micro_batch: int = 0
    global_batch: int = 0
    precision: str = "bf16"
    recompute: str = "none"
    reduce: str = "bf16"  # what gradients add up and are sent in
    overlap: int = 0  # whether tensor parallelism's communication overlaps products (asynchronous tensor parallelism)
    step_seconds: float = 0.0
    memory_gib: float = 0.0
    ep: int = 1
    method: str = "pretrain"  # pretrain, sft or lora
    table: str = "published"
    ran_out: int = 0  # whether it ran out of memory
    described: tuple[tuple[str, Any], ...] = ()
    """What published_sources.yaml says of its kernels and of its memory, which a plain command does not know."""

    @property
    def part(self) -> str:
        """Which part of the rows it is in: fit, choose or held out."""
        names = [field.name for field in fields(Run)]
        settings = repr(astuple(self)[: names.index("step_seconds")])
        return PARTS[hashlib.sha256(settings.encode()).digest()[1] % len(PARTS)]

    @property
    def kind(self) -> str:
        """Of runs that err alike."""
        if self.is_mixture:
            return "mixture"
        if self.method != "pretrain":
            return self.method
        split = [name for name in ("cp", "tp", "pp") if getattr(self, name) > 1]
        return "+".join(split) or "data"

    @property
    def is_mixture(self) -> bool:
        config = self.task_args.get("config", {})
        return any("expert" in key for key in config) or self.model.startswith("deepseek")

    @property
    def name(self) -> str:
        degrees = " ".join(
            f"{n}={getattr(self, n)}" for n in ("tp", "pp", "cp", "ep") if getattr(self, n) > 1
        )
        size = f"{self.micro_batch}×{self.sequence}" if self.micro_batch else str(self.sequence)
        again = "" if self.recompute == "none" else f" {self.recompute}"
        return f"{self.model} {size} on {self.gpus} {self.gpu.partition(':')[0]} {degrees} {self.precision}{again}"

    @property
    def task(self) -> str:
        return "huggingface" if "model" in self.task_args else "language_modelling"

    @functools.cached_property
    def task_args(self) -> dict[str, Any]:
        """What the command says of the model and its data, which need not be there."""
        args: dict[str, Any] = {"data": "tokens-of-the-run.bin", "sequence_length": self.sequence}
        if not self.d_model:
            known = _models()[self.model]
            args |= {"model": known["model"], "config": dict(known["config"])}
            if known["model"] != "gpt2":
                args["config"] |= (
                    {} if known["model"] == "t5" else {"max_position_embeddings": self.sequence}
                )
        elif (
            self.n_kv_heads == self.n_heads
            and self.kernels != "plain"
            and self.attention == "flash"
        ):
            args |= {"d_model": self.d_model, "n_layers": self.n_layers, "n_heads": self.n_heads}
            args |= {
                "d_hidden": self._gated_hidden(),
                "vocab_size": self.vocab_size,
                "tie_weights": bool(self.tied),
            }
        else:
            args |= {"model": "llama" if self.gated else "starcoder2", "config": self._config()}
        if self.attention == "softmax":
            args["attention"] = "eager"
        if self.method == "lora":
            args["lora"] = dict(ADAPTERS)
        return args

    def _gated_hidden(self) -> int:
        """Width of the gated feed-forward layer with as many parameters as the run's: built-in models are gated."""
        return self.d_hidden if self.gated else round(2 * self.d_hidden / 3 / ALIGNED) * ALIGNED

    def _config(self) -> dict[str, Any]:
        return {
            "hidden_size": self.d_model,
            "intermediate_size": self.d_hidden,
            "num_hidden_layers": self.n_layers,
            "num_attention_heads": self.n_heads,
            "num_key_value_heads": self.n_kv_heads,
            "vocab_size": self.vocab_size,
            "tie_word_embeddings": bool(self.tied),
            "max_position_embeddings": self.sequence,
            **(
                {}
                if self.gated
                else {"sliding_window": None, "use_bias": False, "embedding_dropout": 0.0}
            ),
        }

    def command(self) -> tuple[list[str], dict[str, Any]]:
        """The words of `trireme plan`, and its options."""
        copies = self.gpus // (self.tp * self.pp * self.cp)
        shard = {"hsdp": min(copies, self.per_node), "ddp": 1, "": 1}.get(self.data, copies)
        values: dict[str, Any] = {
            "task": self.task,
            "task_args": json.dumps(self.task_args),
            "parallel.dp_replicate": copies // shard,
            "parallel.dp_shard": shard,
            **{f"parallel.{name}": getattr(self, name) for name in ("tp", "pp", "cp", "ep")},
            "parallel.sequence_parallel": bool(self.sequence_parallel) and self.tp > 1,
            "parallel.async_tp": bool(self.overlap)
            and bool(self.sequence_parallel)
            and self.tp > 1,
            "parallel.offload": False,
            "parallel.reduce_dtype": self.reduce,
            "train.global_batch_size": self.global_batch,
            "train.activation_checkpointing": self.recompute,
            "train.precision": self.precision,
            "train.compile": self.kernels == "fused",
            "train.clip_norm": 1.0,
        }
        if self.micro_batch:
            values["train.micro_batch_size"] = self.micro_batch
        if self.data in ("zero1", "zero2") and self.pp == 1 and shard > 1:
            split = [
                name for name, degree in (("tensor", self.tp), ("context", self.cp)) if degree > 1
            ]
            values["strategy"] = "+".join([self.data, *split])
        if self.pp > 1 and self.chunks:
            values["parallel.schedule"] = "interleaved_1f1b" if self.chunks > 1 else "1f1b"
            values["parallel.chunks"] = self.chunks
        words = [
            f"{key}={str(value).lower() if isinstance(value, bool) else value}"
            for key, value in values.items()
        ]
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
    return dict(yaml.safe_load(MODELS.read_text()))


def runs(*paths: str | Path) -> list[Run]:
    """The rows of tables, of all three unless some are named.

    Raises:
        KeyError, ValueError: a column is missing, or not a number.
    """
    return [run for path in paths or TABLES for run in _of_table(Path(path))]


def _of_table(path: Path) -> list[Run]:
    with open(path, newline="") as file:
        entries = list(csv.DictReader(file))
    sources = yaml.safe_load(SOURCES.read_text())
    found = []
    for entry in entries:
        make = (
            _of_beyond
            if "ran_out" in entry
            else _of_published
            if "network_gbit" in entry
            else _of_llm_foundry
        )
        found.append(_described(make(entry), sources))
    return found


def _described(run: Run, sources: dict[str, Any]) -> Run:
    known = sources.get(run.source, {"address": run.source})
    return replace(run, source=known["address"], described=tuple(known.get("runs", {}).items()))


def _of_published(entry: dict[str, Any]) -> Run:
    kinds: dict[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
    columns = [field for field in fields(Run) if field.name in entry]
    run = Run(
        **{column.name: kinds[str(column.type)](entry[column.name] or 0) for column in columns}
    )
    return replace(run, ran_out=int(not run.step_seconds))


def _of_llm_foundry(entry: dict[str, str]) -> Run:
    """MPT models: GPT-2s in all but name, under FSDP. The pages name their networks: InfiniBand and RoCE."""
    width, gpus, micro_batch = (
        int(entry["d_model"]),
        int(entry["gpus"]),
        int(entry["micro_batch_size"]),
    )
    batch, sequence = micro_batch * gpus * int(entry["grad_accum"]), int(entry["seq_len"])
    rate, gpu = float(entry["tokens_per_s_per_gpu"]), entry["gpu"].replace("_", "-")
    return Run(
        source="llm-foundry",
        table="llm-foundry",
        model=f"mpt-{entry['model']}",
        d_model=width,
        n_layers=int(entry["n_layers"]),
        n_heads=int(entry["n_heads"]),
        n_kv_heads=int(entry["n_heads"]),
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
        step_seconds=batch * sequence / (rate * gpus),
    )


def _of_beyond(entry: dict[str, str]) -> Run:
    gpus, sequence = int(entry["gpus"]), int(entry["seq"] or 0)
    rate, batch = float(entry["tokens_per_s_per_gpu"] or 0), int(entry["global_batch"])
    if entry["tflops_per_gpu"] and not rate and sequence:
        rate = (
            1e12
            * float(entry["tflops_per_gpu"])
            / (FLOPS_PER_PARAMETER * 1e9 * _models()[entry["model"]]["billions"])
        )
    unit = entry["peak_unit"].partition(",")[0].lower()
    return Run(
        source=entry["address"],
        table="beyond",
        model=entry["model"],
        kernels="fused"
        if entry["compile"] == "1" or any(word in entry["address"] for word in FUSED)
        else "eager",
        sequence=sequence,
        gpu=GPUS.get(entry["gpu"], entry["gpu"]),
        per_node=int(entry["per_node"]),
        network_gbit=float(entry["network_gbit"] or 0),
        gpus=gpus,
        data=entry["dp"]
        or ("zero1" if gpus > int(entry["tp"]) * int(entry["pp"]) * int(entry["cp"]) else ""),
        tp=int(entry["tp"]),
        pp=int(entry["pp"]),
        cp=int(entry["cp"]),
        chunks=int(entry["vp"]),
        ep=int(entry["ep"] or 1),
        micro_batch=int(entry["micro_batch"]),
        global_batch=batch,
        precision=entry["precision"].removeprefix("mx"),
        recompute=entry["recompute"] or "none",
        method=entry["method"],
        step_seconds=batch * sequence / (rate * gpus) if rate else 0.0,
        memory_gib=float(entry["peak_gb"] or 0) * UNITS.get(unit, 1.0),
        ran_out=int(entry["ran_out"] or 0),
    )
