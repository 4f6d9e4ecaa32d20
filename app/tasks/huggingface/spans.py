"""Questions and contexts as windows of tokens, and the likeliest span of a context as an answer.

A context that is too long for the model is read in windows, each with the whole question, whose
contexts overlap by `stride` tokens (Devlin et al. 2018, 1810.04805, in the code of its authors). A
span from token i to token j of one window has the score

    start logit of i + end logit of j          i ≤ j < i + LONGEST_ANSWER, both in the context

and that of no answer, in a window, is the score of its first token as start and end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

LONGEST_ANSWER = 30
"""Tokens that an answer may have."""


@dataclass(frozen=True)
class Window:
    """A question and a part of its context, as tokens.

    Args:
        question: The number of the question.
        ids: The tokens.
        types: Which of the two texts each is of: 0 or 1.
        spans: Where in the context each begins and ends, in characters; (-1, -1) outside of it.
    """

    question: int
    ids: list[int]
    types: list[int]
    spans: list[tuple[int, int]]


def windows_of(
    tokenizer: Any, questions: Sequence[str], contexts: Sequence[str], *, longest: int, stride: int
) -> list[Window]:
    """The windows of questions, in their order.

    Args:
        tokenizer: The library's tokenizer.
        questions: The questions, each short enough to leave more room than `stride`.
        contexts: The context of each.
        longest: Tokens of a window at most.
        stride: Tokens of the context that neighbouring windows share.
    """
    encoded = tokenizer(
        list(questions),
        list(contexts),
        truncation="only_second",
        max_length=longest,
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
        return_token_type_ids=True,
    )
    windows = []
    for number, question in enumerate(encoded["overflow_to_sample_mapping"]):
        spans = zip(encoded["offset_mapping"][number], encoded.sequence_ids(number), strict=True)
        windows.append(
            Window(
                question=question,
                ids=encoded["input_ids"][number],
                types=encoded["token_type_ids"][number],
                spans=[(int(b), int(e)) if text == 1 else (-1, -1) for (b, e), text in spans],
            )
        )
    return windows


class BestSpans(NamedTuple):
    """The likeliest span of the context of each question.

    Args:
        window: The window that it is in, (N,).
        first: Its first token there, (N,).
        last: Its last token, (N,).
        margin: By how much its score is above that of no answer, (N,).
    """

    window: Tensor
    first: Tensor
    last: Tensor
    margin: Tensor


def best_spans(logits_NWT2: Tensor, is_context_NWT: Tensor) -> BestSpans:
    """The likeliest span of the context of each question.

    Args:
        logits_NWT2: The start and end logits of its windows.
        is_context_NWT: Which tokens are of the context; none in windows that are padding.
    """
    count, _, length, _ = logits_NWT2.shape
    masked_NWT2 = logits_NWT2.masked_fill(~is_context_NWT[..., None], float("-inf"))
    start_NWT, end_NWT = masked_NWT2.unbind(-1)
    scores_NWTT = start_NWT[..., :, None] + end_NWT[..., None, :]
    place_T = torch.arange(length, device=logits_NWT2.device)
    further_TT = place_T[None, :] - place_T[:, None]
    is_span_TT = (further_TT >= 0) & (further_TT < LONGEST_ANSWER)
    scores_NWTT = scores_NWTT.masked_fill(~is_span_TT, float("-inf"))
    best_N, flat_N = scores_NWTT.view(count, -1).max(1)
    # Of several windows, the one that least says that there is no answer counts.
    is_window_NW = is_context_NWT.any(-1)
    nothing_NW = logits_NWT2[:, :, 0].sum(-1).masked_fill(~is_window_NW, float("inf"))
    return BestSpans(
        window=flat_N // length**2,
        first=flat_N // length % length,
        last=flat_N % length,
        margin=best_N - nothing_NW.min(1).values,
    )
