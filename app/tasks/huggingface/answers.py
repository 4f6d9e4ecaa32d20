"""Logs at an evaluation what a model answers to a held-out question, and the right answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from app.tasks.base import EvaluationLog
from app.tasks.huggingface.conversations import IGNORED
from app.tasks.language import SAMPLE_TOKENS, end_tokens, sample_tokens

if TYPE_CHECKING:
    from app.tasks.huggingface.task import HuggingFace


def log_answer(task: HuggingFace, model: nn.Module, log: EvaluationLog) -> None:
    """Log the model's answer to the first held-out question.

    Args:
        task: A task of the kind instructions, preferences or seq2seq_lm.
        model: The model.
        log: Logs the question, the model's answer and the right answer.
    """
    data = task.eval_data()
    if data is None:
        return
    inputs, targets_T = data[0]
    if task.kind == "preferences":
        targets_T = targets_T[0][0]  # of the chosen answer
    first_target = int((targets_T != IGNORED).nonzero()[0])
    expected_T = targets_T[first_target:]
    length = int((expected_T != IGNORED).cumprod(0).sum())  # up to the next token that is ignored
    expected_T = expected_T[:length]
    if task.kind == "instructions":
        question_T, answer_T = _answer_in_conversation(
            task, model, inputs, first_target=first_target
        )
    elif task.kind == "preferences":
        tokens_T = inputs[0]
        question_T = tokens_T[: first_target + 1]
        answer_T = sample_tokens(
            model, task.arguments, question_T, length=len(tokens_T), ends=_ends(task, model)
        )
    else:
        question_T, answer_T = _answer_of_decoder(task, model, inputs)
    texts = {"asked": question_T, "written": answer_T, "wanted": expected_T}
    lines = [f"{name}: {task.tokenizer.decode(tokens_T)}" for name, tokens_T in texts.items()]
    log("answer", "\n".join(lines))


def _answer_in_conversation(
    task: HuggingFace, model: nn.Module, inputs: tuple[Tensor, Tensor], *, first_target: int
) -> tuple[Tensor, Tensor]:
    """The tokens of a conversation up to its first answer, and of the model's answer.

    Args:
        task: The task.
        model: The model.
        inputs: Tokens and positions (T,) of a row with several conversations.
        first_target: The first token whose target is part of an answer.
    """
    tokens_T, positions_T = inputs
    begin = int((positions_T[: first_target + 1] == 0).nonzero()[-1])
    question_T = tokens_T[begin : first_target + 1]

    def arguments(tokens_1T: Tensor) -> dict[str, Any]:
        positions_1T = torch.arange(tokens_1T.size(1))[None]
        return task.arguments((tokens_1T, positions_1T))

    written_T = sample_tokens(
        model, arguments, question_T, length=len(tokens_T), ends=_ends(task, model)
    )
    return question_T, written_T


def _answer_of_decoder(
    task: HuggingFace, model: nn.Module, inputs: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """The tokens of a text, and of what the model makes of it.

    Args:
        task: The task.
        model: The model.
        inputs: The text's tokens and mask (S,), and the decoder's tokens (T,).
    """
    text_S, mask_S, decoder_T = inputs

    def arguments(decoder_1T: Tensor) -> dict[str, Any]:
        return task.arguments((text_S[None], mask_S[None], decoder_1T))

    start_1 = decoder_T[:1]
    written_T = sample_tokens(
        model, arguments, start_1, length=SAMPLE_TOKENS + 1, ends=_ends(task, model)
    )
    return text_S, written_T


def _ends(task: HuggingFace, model: nn.Module) -> set[int]:
    """The tokens that end an answer: the model's, and the one that the task writes after each."""
    end = task.tokenizer.eos_token_id
    return end_tokens(model) | (set() if end is None else {end})
