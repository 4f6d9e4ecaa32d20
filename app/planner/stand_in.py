"""Plans where `task_args.data` is not there: the model's shape is what matters, so made-up data of that shape do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from app import tasks
from app.config import Config
from app.data.files import cached
from app.data.text import BYTES, SUFFIXES, encoder
from app.errors import MissingData, UserError
from app.planner.machine import Machine
from app.planner.plan import Plan, make_plan
from app.planner.read import Reader
from app.tasks.base import Task
from app.tasks.language import LanguageModelling

MADE_UP = "task_args.data is not there: planned with made-up samples of the longest length; a run's is not known"
ROWS = 8
LENGTH = 512
"""Tokens of a text where the experiment says no length: the longest that a task takes by itself."""


def plan_experiment(
    config: Config,
    machine: Machine,
    given: frozenset[str],
    *,
    needs_data: str = "",
    reader: Reader | None = None,
) -> Plan:
    """make_plan of the experiment's task, with its data or without.

    Args:
        needs_data: What has no use for made-up samples.
        reader: Of the same task, where a plan of it has been made before.
    """
    if reader is not None:
        return make_plan(config, reader.task, machine, given=given, reader=reader)
    notes = []
    args = dict(config.task_args)
    if not needs_data and (folder := _without_weights(config)):
        args |= {"model": folder, "pretrained": True, "tokenizer": args.get("tokenizer") or BYTES}
        args.pop("config", None)
        notes.append("task_args.model has no weights here: planned from its configuration")
    try:
        task = tasks.load_task(config.task, args)
    except MissingData as error:
        if needs_data:
            raise UserError(f"{needs_data} needs the data: {error}") from error
        task = _on_made_up(config.task, args, error)
        notes.append(MADE_UP)
    plan = make_plan(config, task, machine, given=given)
    if MADE_UP in notes:
        plan.reader.samples = None
    plan.reader.note = "; ".join(filter(None, [*notes, plan.reader.note]))
    return plan


def _without_weights(config: Config) -> str:
    """A folder that stands in for that of the weights from which the experiment begins, where these are not on this
    machine: a plan needs their shapes only, which the configuration tells. "" where they are, or are not asked for."""
    args = config.task_args
    if config.task != "huggingface" or not (args.get("pretrained") or args.get("lora")):
        return ""
    from app.tasks.huggingface.model import WEIGHTS, find_model, resolve_config

    named = args.get("model")
    if isinstance(named, str) and Path(named).expanduser().is_dir():
        if any((Path(named).expanduser() / name).is_file() for name in WEIGHTS):
            return ""
    elif isinstance(named, str) and named.count("/") == 1:
        return ""  # on the hub, which has them
    written = json.loads(json.dumps(args.get("config") or {}))
    resolved = resolve_config(find_model(named, weights=False), {}, written)
    settled = json.dumps(resolved.to_dict(), sort_keys=True, default=str)

    def make(folder: Path) -> None:
        folder.mkdir()
        (folder / "config.json").write_text(settled)
        (folder / WEIGHTS[0]).touch()  # empty: on meta none are read

    return str(cached(f"stand-in-{hashlib.sha256(settled.encode()).hexdigest()[:16]}", make))


def _on_made_up(name: str, args: dict[str, Any], error: MissingData) -> Task:
    """The task with made-up samples. name: of the task. args: its arguments, whose data are not there."""
    kind = tasks.find_task(name)
    args |= {"eval_samples": 0} if "eval_samples" in args else {}
    if issubclass(kind, LanguageModelling):
        size = args.get("vocab_size") or _vocabulary(args, "task_args.vocab_size")
        left = {key: value for key, value in args.items() if key not in ("stream", "text", "token_dtype")}
        return tasks.load_task(name, left | {"vocab_size": size, "data": _tokens(args)})
    if name != "huggingface":
        raise UserError(
            f"{error}; planning needs it, too, since sizes of the model come from it: a few samples of the same shape "
            "and classes do"
        ) from error
    return tasks.load_task(name, args | _of_transformers(args, error))


def _of_transformers(args: dict[str, Any], error: MissingData) -> dict[str, Any]:
    """Arguments of the huggingface task that take the place of those of the data."""
    from app.tasks.huggingface.model import choose_kind, find_model

    found = find_model(args.get("model"), weights=bool(args.get("pretrained")))
    kind, own = choose_kind(found, args.get("kind", "auto")), dict(args.get("config") or {})
    if kind == "causal_lm":
        if found.folder is None and "vocab_size" not in own:
            own["vocab_size"] = _vocabulary(args, "task_args.config.vocab_size")
        return {"config": own, "data": _tokens(args), "token_dtype": "uint16"}
    text = " ".join(map(str, range(_length(args))))  # a token a number at least
    if kind == "instructions":
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]
        return {"data": _kept("jsonl", "\n".join([json.dumps({"messages": messages})] * ROWS))}
    if kind == "seq2seq_lm":
        return {"data": _table(args, "target", [text] * ROWS, text)}
    classes = own.get("num_labels") or (found.base.num_labels if found.folder else None)
    if classes is None:
        raise UserError(f"{error}; to plan without it write task_args.config.num_labels, the number of classes")
    labels = [f"class {i % classes}" for i in range(max(ROWS, 2 * classes))]
    if kind == "sequence_classification":
        return {"data": _table(args, "label", labels, text)}
    sides, channels = (own.get(key) or getattr(found.base, key, None) for key in ("image_size", "num_channels"))
    if not sides or not channels:
        raise UserError(f"{error}; to plan without it write task_args.config.image_size and num_channels")
    shape = (len(labels), channels, *(sides if isinstance(sides, (list, tuple)) else (sides, sides)))

    def make(path: Path) -> None:
        with open(path, "wb") as out:
            np.savez(out, images=np.zeros(shape, np.uint8), labels=np.arange(len(labels)) % classes)

    return {"data": str(cached(f"stand-in-{'x'.join(map(str, shape))}-{classes}.npz", make))}


def _vocabulary(args: dict[str, Any], key: str) -> int:
    """The tokenizer's, where the arguments say which it is."""
    data, tokenizer = args.get("data") or [], args.get("tokenizer")
    names = [data] if isinstance(data, str) else list(data)
    if tokenizer is None and (not names or any(Path(name).suffix in SUFFIXES for name in names)):
        raise UserError(f"task_args.data is not there: to plan without it write {key}, how many tokens there are")
    return encoder(tokenizer or BYTES)[1]


def _length(args: dict[str, Any]) -> int:
    written = args.get("sequence_length")
    return written if isinstance(written, int) and written > 0 else LENGTH


def _tokens(args: dict[str, Any]) -> str:
    """A file of zeros."""
    size = ROWS * _length(args) + 1
    return str(cached(f"stand-in-{size}.bin", lambda path: np.zeros(size, np.uint16).tofile(path)))


def _table(args: dict[str, Any], label: str, labels: list[str], text: str) -> str:
    columns = [args.get("text") or "text", args.get("label") or label]
    return _kept("csv", "\n".join([",".join(columns), *(f"{text},{own}" for own in labels)]))


def _kept(suffix: str, content: str) -> str:
    name = f"stand-in-{hashlib.sha256(content.encode()).hexdigest()[:16]}.{suffix}"
    return str(cached(name, lambda path: path.write_text(content)))
