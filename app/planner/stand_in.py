"""Plans without data or weights on this machine: made-up samples and weights stand in for them.

It is here because a plan is made before there is anything to train with: on a laptop, before the
data have been copied and the GPUs rented. A plan depends only on the shapes of the model and of the
samples, so that made-up samples of the longest length, and weights that are never read, give the
same plan.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
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

DATA_NOTE = (
    "task_args.data is not there: planned with made-up samples of the longest length; "
    "a run's is not known"
)
WEIGHTS_NOTE = "task_args.model has no weights here: planned from its configuration"
ROWS = 8
"""Samples that are made up, at least."""
LENGTH = 1024
"""Tokens of a text if the experiment does not say how many: the most that tasks take by default."""


def plan_experiment(
    config: Config,
    machine: Machine,
    fixed_keys: frozenset[str],
    *,
    needs_data: str = "",
    reader: Reader | None = None,
) -> Plan:
    """Plan an experiment, with its data and weights if they are there, otherwise without.

    Args:
        config: The experiment.
        machine: The machine.
        fixed_keys: Keys whose values stay.
        needs_data: The option of the command line that needs the real data; "" if none does.
        reader: Of the same task, if it has been planned before.

    Raises:
        UserError: The data are needed, or nothing can stand in for them.
        LayoutError: No layout is possible.
    """
    if reader is not None:
        return make_plan(config, reader.task, machine, fixed_keys=fixed_keys, reader=reader)
    notes = []
    args = dict(config.task_args)
    folder = "" if needs_data else _folder_instead_of_weights(config)
    if folder:
        args["model"] = folder
        args["pretrained"] = True
        args["tokenizer"] = args.get("tokenizer") or BYTES
        args.pop("config", None)
        notes.append(WEIGHTS_NOTE)
    has_data = True
    try:
        task = tasks.load_task(config.task, args)
    except MissingData as error:
        if needs_data:
            raise UserError(f"{needs_data} needs the data: {error}") from error
        task = _task_without_data(config.task, args, error)
        notes.append(DATA_NOTE)
        has_data = False
    plan = make_plan(config, task, machine, fixed_keys=fixed_keys)
    if not has_data:
        plan.reader.samples = None
    if plan.reader.note:
        notes.append(plan.reader.note)
    plan.reader.note = "; ".join(notes)
    return plan


# --- weights --------------------------------------------------------------------------------------


def _folder_instead_of_weights(config: Config) -> str:
    """A folder with the configuration and no weights, if those of the experiment are not here.

    Returns:
        The folder; "" if the weights are here, or not used.
    """
    args = config.task_args
    uses_weights = args.get("pretrained") or args.get("lora")
    if config.task != "huggingface" or not uses_weights:
        return ""
    from app.tasks.huggingface.model import WEIGHTS, find_model, has_weights_here, resolve_config

    model = args.get("model")
    if isinstance(model, str) and has_weights_here(model):
        return ""
    overrides = json.loads(json.dumps(args.get("config") or {}))
    try:
        source = find_model(model, weights=False)
    except UserError as error:
        raise UserError(
            f"{error}; to plan without its weights a folder with its config.json is enough"
        ) from error
    model_config = resolve_config(source, {}, overrides)
    written = json.dumps(model_config.to_dict(), sort_keys=True, default=str)

    def make(path: Path) -> None:
        path.mkdir()
        (path / "config.json").write_text(written)
        (path / WEIGHTS[0]).touch()  # empty, because a model on meta reads none

    return str(cached(f"stand-in-{_digest(written)}", make))


# --- data -----------------------------------------------------------------------------------------


def _task_without_data(name: str, args: dict[str, Any], error: MissingData) -> Task:
    """The task with made-up samples.

    Args:
        name: Of the task.
        args: Its arguments.
        error: Says that their data are not there.

    Raises:
        UserError: Nothing can stand in for the data, because sizes of the model depend on them.
    """
    kind = tasks.find_task(name)
    args = dict(args)
    if "eval_samples" in args:
        args["eval_samples"] = 0
    if issubclass(kind, LanguageModelling):
        for key in ("stream", "text", "token_dtype"):
            args.pop(key, None)
        args["vocab_size"] = args.get("vocab_size") or _vocabulary(args, "task_args.vocab_size")
        args["data"] = _token_file(args)
        return tasks.load_task(name, args)
    if name != "huggingface":
        raise UserError(
            f"{error}; planning needs it, too, since sizes of the model come from it: "
            "a few samples of the same shape and classes are enough"
        ) from error
    return tasks.load_task(name, args | _huggingface_args(args, error))


def _huggingface_args(args: Mapping[str, Any], error: MissingData) -> dict[str, Any]:
    """Arguments of the huggingface task with made-up samples, in place of those of the data."""
    from app.tasks.huggingface.kinds import choose
    from app.tasks.huggingface.model import find_model

    model = find_model(args.get("model"), weights=bool(args.get("pretrained")))
    kind_class = choose(model, args.get("kind", "auto"))
    kind = kind_class.name
    if kind_class.reads_files:
        raise UserError(
            f"{error}; planning needs it, too, since its lines name files: "
            "a few of the longest are enough"
        ) from error
    overrides = dict(args.get("config") or {})
    if kind == "causal_lm":
        if model.folder is None and "vocab_size" not in overrides:
            overrides["vocab_size"] = _vocabulary(args, "task_args.config.vocab_size")
        return {"config": overrides, "data": _token_file(args), "token_dtype": "uint16"}
    words = [str(number) for number in range(_length(args))]  # each is a token or more
    text = " ".join(words)
    if kind == "masked_lm":
        return {"data": _text_file("txt", [text] * (ROWS + 1))}
    if kind == "seq2seq_lm":
        return {"data": _table_file(args, "target", labels=[text] * ROWS, text=text)}
    if not kind_class.has_classes:
        return {"data": _lines_file(kind_class.made_up(words, args, classes=0))}
    classes = overrides.get("num_labels") or None
    if classes is None and model.folder is not None:
        classes = model.base.num_labels
    if classes is None:
        raise UserError(
            f"{error}; to plan without it write task_args.config.num_labels, the number of classes"
        )
    rows = max(ROWS, 2 * classes)
    if kind == "sequence_classification":
        labels = [f"class {row % classes}" for row in range(rows)]
        return {"data": _table_file(args, "label", labels=labels, text=text)}
    row = kind_class.made_up(words, args, classes=classes)
    if row is not None:
        return {"data": _lines_file(row)}
    size = overrides.get("image_size") or getattr(model.base, "image_size", None)
    channels = overrides.get("num_channels") or getattr(model.base, "num_channels", None)
    if not size or not channels:
        raise UserError(
            f"{error}; to plan without it write task_args.config.image_size and num_channels"
        )
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return {"data": _images_file((rows, channels, height, width), classes)}


def _vocabulary(args: Mapping[str, Any], key: str) -> int:
    """The number of tokens of the tokenizer.

    Args:
        args: Of the task.
        key: What the user can write instead.

    Raises:
        UserError: The arguments do not say which tokenizer it is.
    """
    data = args.get("data") or []
    files = [data] if isinstance(data, str) else list(data)
    tokenizer = args.get("tokenizer")
    has_tokens = any(Path(file).suffix in SUFFIXES for file in files)
    if tokenizer is None and (not files or has_tokens):
        raise UserError(
            f"task_args.data is not there: to plan without it write {key}, "
            "how many tokens there are"
        )
    _, size = encoder(tokenizer or BYTES)
    return size


def _length(args: Mapping[str, Any]) -> int:
    """The tokens of a sample."""
    length = args.get("sequence_length")
    return length if isinstance(length, int) and length > 0 else LENGTH


def _token_file(args: Mapping[str, Any]) -> str:
    """A file of tokens, all of them 0."""
    size = ROWS * _length(args) + 1

    def make(path: Path) -> None:
        np.zeros(size, np.uint16).tofile(path)

    return str(cached(f"stand-in-{size}.bin", make))


def _lines_file(row: Any) -> str:
    """A file of JSON lines with the same value in each."""
    return _text_file("jsonl", [json.dumps(row)] * ROWS)


def _table_file(args: Mapping[str, Any], label: str, *, labels: list[str], text: str) -> str:
    """A CSV file with the same text in each row.

    Args:
        args: Of the task; they may name the columns.
        label: The default name of the column of labels.
        labels: One for each row.
        text: The text.
    """
    head = f"{args.get('text') or 'text'},{args.get('label') or label}"
    return _text_file("csv", [head, *(f"{text},{value}" for value in labels)])


def _images_file(shape: tuple[int, int, int, int], classes: int) -> str:
    """Black images of all classes."""

    def make(path: Path) -> None:
        with open(path, "wb") as file:
            images = np.zeros(shape, np.uint8)
            np.savez(file, images=images, labels=np.arange(shape[0]) % classes)

    sizes = "x".join(str(size) for size in shape)
    return str(cached(f"stand-in-{sizes}-{classes}.npz", make))


def _text_file(suffix: str, lines: list[str]) -> str:
    content = "\n".join(lines)

    def make(path: Path) -> None:
        path.write_text(content)

    return str(cached(f"stand-in-{_digest(content)}.{suffix}", make))


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()[:16]
