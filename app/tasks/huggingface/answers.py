"""What a model that learns answers writes at an evaluation, beside what it should."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from app.tasks.huggingface.conversations import NOTHING
from app.tasks.language import SAMPLED, drawn


def show_answer(task: Any, model: nn.Module, log: Any) -> None:
    """Logs the answer to the first question that was held out. task: HuggingFace's, of instructions or of pairs."""
    data = task.eval_data()
    if data is None:
        return
    inputs, targets_T = data[0]
    first = int((targets_T != NOTHING).nonzero()[0])
    wanted_T = targets_T[first:]
    wanted_T = wanted_T[: int((wanted_T != NOTHING).cumprod(0).sum())]

    def arguments(tokens_1T: Tensor) -> dict[str, Any]:
        if task.kind == "instructions":
            return task.arguments((tokens_1T, torch.arange(tokens_1T.size(1))[None]))
        return task.arguments((inputs[0][None], inputs[1][None], tokens_1T))

    if task.kind == "instructions":
        tokens_T, positions_T = inputs
        begin = int((positions_T[: first + 1] == 0).nonzero()[-1])  # of the conversation, in a row of several
        prompt_T, longest = tokens_T[begin : first + 1], len(tokens_T)
        asked_T = prompt_T
    else:
        asked_T, prompt_T, longest = inputs[0], inputs[2][:1], SAMPLED + 1
    answer_T = drawn(model, arguments, prompt_T, longest)
    texts = {"asked": asked_T, "written": answer_T, "wanted": wanted_T}
    log("answer", "\n".join(f"{name}: {task.tokenizer.decode(tokens_T)}" for name, tokens_T in texts.items()))
