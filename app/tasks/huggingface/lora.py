"""Low-rank adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685), by the library peft.

A linear layer's weight W stays as it was learnt, and a product of two thin matrices is learnt beside it,

    y = W·x + (alpha / r)·B·(A·x)        A (r, in) begins random, B (out, r) at 0

so gradients and optimizer state are those of r·(in + out) numbers instead of in·out. A classifier's new head is learnt
as a whole.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from app.errors import UserError
from app.tasks.parts import require_known, whole

TASK_TYPES = {"causal_lm": "CAUSAL_LM", "instructions": "CAUSAL_LM", "seq2seq_lm": "SEQ_2_SEQ_LM"}  # else SEQ_CLS
OPTIONS = ("r", "alpha", "targets", "dropout")


def library() -> Any:
    """The peft package. Raises UserError if it is not installed."""
    try:
        import peft
    except ImportError as error:
        raise UserError(
            "task_args.lora needs the package peft, which is not installed: run pip install 'trireme[finetuning]'"
        ) from error
    return peft


def adapters(written: Any, kind: str, folder: Path | None) -> Any:
    """peft's configuration from `task_args.lora`; folder: of the weights that are adapted. Raises UserError."""
    if not isinstance(written, Mapping):
        raise UserError(f"task_args.lora is {written!r}; write a mapping such as {{r: 16, alpha: 32, targets: auto}}")
    require_known("task_args.lora", "lora", written, OPTIONS)
    if folder is None:
        raise UserError("task_args.lora adapts learnt weights: write task_args.pretrained=true and a folder as model")
    rank = whole("lora.r", written.get("r", 16))
    alpha, dropout = written.get("alpha", 2 * rank), written.get("dropout", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or alpha <= 0:
        raise UserError(f"task_args.lora.alpha is {alpha!r}; it must be a number above 0")
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise UserError(f"task_args.lora.dropout is {dropout!r}; it must be at least 0 and below 1")
    targets = written.get("targets", "auto")
    if targets != "auto" and not (isinstance(targets, list) and targets and all(isinstance(t, str) for t in targets)):
        raise UserError(
            f"task_args.lora.targets is {targets!r}; write auto, or a list of names such as [q_proj, v_proj]"
        )
    return library().LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules="all-linear" if targets == "auto" else list(targets),
        task_type=TASK_TYPES.get(kind, "SEQ_CLS"),
        base_model_name_or_path=str(folder.resolve()),
    )


def adapted(model: nn.Module, config: Any) -> Any:
    """peft's model around this one, whose linear layers now have adapters. Raises UserError: it has no such layers."""
    model.name_or_path = config.base_model_name_or_path  # which peft writes down: whole, for any current folder
    try:
        with warnings.catch_warnings(action="ignore", category=FutureWarning):  # transformers' on what peft asks it
            return library().get_peft_model(model, copy.deepcopy(config))  # which writes into it
    except ValueError as error:
        raise UserError(f"task_args.lora does not fit the model: {str(error).splitlines()[0].rstrip('.')}") from error
