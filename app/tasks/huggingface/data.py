"""The data that each kind of model learns from, and what it decides about the model's configuration.

Data, loss and metrics are those of a task of its own, of which only the model is not used.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from app.data.loader import fetch
from app.data.text import find_files
from app.data.tokens import SUFFIXES
from app.errors import UserError
from app.tasks.huggingface.find import Found
from app.tasks.huggingface.text import LabelledText
from app.tasks.language import LanguageModelling
from app.tasks.parts import InParts
from app.tasks.vision import ImageClassification

Derived = dict[str, Any]
"""Keys of the model's configuration that follow from the data."""


def running_text(
    found: Found, base: Any, own_size: int | None, *, data: Any, tokenizer: str, **more: Any
) -> tuple[InParts, Derived]:
    """For a causal language model. base: its configuration so far; own_size: its vocabulary's, if that is settled."""
    of_tokens = any(path.suffix in SUFFIXES for path in find_files(data))
    if of_tokens and own_size is None:
        raise UserError("task_args.config.vocab_size is needed with token files; write the tokenizer's")
    size = own_size if of_tokens else None
    task = LanguageModelling(data=data, tokenizer=tokenizer, vocab_size=size, d_model=2, n_layers=1, n_heads=1, **more)
    derived: Derived = {} if own_size is not None else {"vocab_size": task.vocab_size}
    # Models that can be either look at a text from both sides unless told not to.
    derived |= {key: True for key in ("is_decoder", "causal") if key in found.base.to_dict()}
    return task, derived | _fitting_vocabulary(found, base, task.vocab_size, derived)


def labelled_text(
    found: Found, base: Any, own_size: int | None, *, tokenizer: Any, sequence_length: int, **more: Any
) -> tuple[InParts, Derived]:
    """For a classifier of texts; tokenizer: the library's, with padding."""
    task = LabelledText(tokenizer=tokenizer, longest=sequence_length, **more)
    derived = {**_labels(task.classes), "pad_token_id": tokenizer.pad_token_id}
    if own_size is None:
        derived["vocab_size"] = len(tokenizer)
    return task, derived | _fitting_vocabulary(found, base, len(tokenizer), derived)


def images(found: Found, **more: Any) -> tuple[InParts, Derived]:
    """For a classifier of images."""
    task = ImageClassification(model="mlp", model_args={"hidden": []}, **more)
    derived = _labels([str(number) for number in range(task.classes)])
    if found.folder is None:
        channels, height, width = fetch(task.train_data(), [(0, 0)])[0].shape[1:]
        derived |= {"image_size": height if height == width else [height, width], "num_channels": channels}
    return task, derived


def _labels(classes: list[str]) -> Derived:
    """A classifier's classes and their names."""
    return {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }


def _fitting_vocabulary(found: Found, base: Any, needed: int, derived: Derived) -> Derived:
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
    none: Derived = {key: None for key in beyond if key not in required}
    return none | ({"pad_token_id": size - 1} if "pad_token_id" in beyond and "pad_token_id" in required else {})
