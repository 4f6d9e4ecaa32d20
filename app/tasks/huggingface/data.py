"""The data that each kind of model learns from, and what it decides about the model.

Data, loss and metrics are those of a task of its own, of which only the model is not used.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from app.data.loader import fetch
from app.data.text import find_files
from app.data.tokens import SUFFIXES
from app.errors import UserError
from app.tasks.base import Task
from app.tasks.huggingface.find import Found
from app.tasks.huggingface.labelled_text import LabelledText
from app.tasks.huggingface.tokenizer import encoding
from app.tasks.language import LanguageModelling
from app.tasks.vision import ImageClassification


@dataclass(frozen=True)
class Source:
    """task: gives data, loss and metrics. derived: keys of the model's configuration that follow from the data.
    sequence_length: tokens in a sample, at most; None for images."""

    task: Task
    derived: dict[str, Any]
    sequence_length: int | None


def running_text(
    found: Found,
    base: Any,
    *,
    data: Any,
    tokenizer: str,
    token_dtype: str,
    sequence_length: int,
    vocab_size_written: bool,
    **held: Any,
) -> Source:
    """For a causal language model. base: its configuration so far."""
    own = _own_size(found, base, vocab_size_written)
    of_tokens = any(path.suffix in SUFFIXES for path in find_files(data))
    if of_tokens and own is None:
        raise UserError("task_args.config.vocab_size is needed with token files; write the tokenizer's.")
    task = LanguageModelling(
        data=data,
        tokenizer=tokenizer,
        token_dtype=token_dtype,
        vocab_size=own if of_tokens else None,
        sequence_length=sequence_length,
        d_model=2,
        n_layers=1,
        n_heads=1,
        **held,
    )
    derived: dict[str, Any] = {} if own is not None else {"vocab_size": task.vocab_size}
    # Models that can be either look at a text from both sides unless told not to.
    derived |= {key: True for key in ("is_decoder", "causal") if key in found.base.to_dict()}
    derived |= _fitting_vocabulary(found, base, task.vocab_size, derived)
    return Source(task, derived, sequence_length)


def labelled_text(
    found: Found,
    base: Any,
    *,
    data: Any,
    text: str,
    label: str,
    tokenizer: str,
    sequence_length: int,
    vocab_size_written: bool,
    **held: Any,
) -> Source:
    """For a classifier of texts. base: its configuration so far."""
    how = encoding(found, tokenizer, sequence_length)
    task = LabelledText(data=data, text=text, label=label, encoding=how, longest=sequence_length, **held)
    derived = {**_labels(task.classes), "pad_token_id": how.padding}
    if _own_size(found, base, vocab_size_written) is None:
        derived["vocab_size"] = how.vocab_size
    derived |= _fitting_vocabulary(found, base, how.vocab_size, derived)
    return Source(task, derived, sequence_length)


def images(found: Found, *, data: Any, labels: str | None, augment_shift: int, **held: Any) -> Source:
    """For a classifier of images."""
    task = ImageClassification(
        data=data, labels=labels, augment_shift=augment_shift, model="mlp", model_args={"hidden": []}, **held
    )
    derived = _labels([str(number) for number in range(task.classes)])
    if found.folder is None:
        channels, height, width = fetch(task.train_data(), [(0, 0)])[0].shape[1:]
        derived |= {"image_size": height if height == width else [height, width], "num_channels": channels}
    return Source(task, derived, None)


def _own_size(found: Found, base: Any, written: bool) -> int | None:
    """The size of the model's vocabulary, where it is not for the tokenizer to decide."""
    return int(base.vocab_size) if found.folder or written else None


def _labels(classes: list[str]) -> dict[str, Any]:
    """A classifier's classes and their names."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def _fitting_vocabulary(found: Found, base: Any, needed: int, derived: dict[str, Any]) -> dict[str, Any]:
    """Special tokens that a new model's vocabulary has not, set to none; to its last one where there must be padding.

    Raises UserError if the model has fewer tokens than the tokenizer.
    """
    size = derived.get("vocab_size", base.vocab_size)
    if size < needed:
        raise UserError(
            f"the model's vocab_size is {size}, but the tokenizer has {needed} tokens; write "
            f"task_args.config.vocab_size={needed} or more, or the model's own tokenizer as task_args.tokenizer"
        )
    if found.folder is not None:
        return {}
    special = [key for key in base.to_dict() if key.endswith("_token_id") and key not in derived]
    beyond = [key for key in special if isinstance(number := getattr(base, key), int) and number >= size]
    required = {field.name for field in dataclasses.fields(base) if "None" not in str(field.type)}
    none: dict[str, Any] = {key: None for key in beyond if key not in required}
    return none | ({"pad_token_id": size - 1} if "pad_token_id" in beyond and "pad_token_id" in required else {})
