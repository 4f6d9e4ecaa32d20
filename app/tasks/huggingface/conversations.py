"""Data of which only a part is to be learnt: conversations, of which the answers, and texts with what to make of them.

**Packing.** Conversations of unlike lengths fill sequences of one length, the longest first, each where least room is
left (best-fit decreasing). Positions begin at 0 with each, from which attention is kept inside (task.py), so that the
loss is that of each by itself (Krell et al. 2021, https://arxiv.org/abs/2107.02027).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.files import cached, identity
from app.data.open_text import json_rows
from app.data.order import held_out, hold_out
from app.data.sets import document
from app.data.tables import column_of, read_table
from app.data.text import PYTHON, find_files
from app.errors import UserError
from app.tasks.base import Batch
from app.tasks.parts import InParts

NOTHING = -100  # the target of a token that is not learnt, as in torch's cross entropy
DEFAULT_EVAL_FRACTION = 0.1
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""For tokenizers without a chat template (https://github.com/openai/openai-python/blob/v0.27.0/chatml.md)."""
Message = dict[str, str]
UNREAD = ("tool_calls", "function_call", "tool_call_id", "audio")
"""Parts of a message beside its content, which a chat template would need to be given."""
TEXT_PARTS = ("text", "input_text", "output_text")


class Answers(InParts):
    """Batches are (inputs, targets (B, T)); the model gives logits (B, T, V). The loss is the mean over targets
    other than NOTHING."""

    unit, float_output = "tokens", False

    def items(self, batch: Batch) -> Tensor:
        return (batch[1] != NOTHING).sum()

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs, targets = batch
        logits = model(inputs).flatten(0, 1).float()
        return F.cross_entropy(logits, targets.flatten(), reduction="sum") / self.items(batch).clamp(min=1)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        return {"perplexity": float(np.exp(min(means["loss"], 700.0)))}


class Conversations(Answers):
    """Inputs are (tokens (B, T), positions (B, T)) of packed conversations. data: files of JSON lines or of one JSON
    array, of objects with `messages`: [{role, content}, …]; or `python`. tokenizer: the library's, with a chat
    template."""

    def __init__(self, *, data: Any, tokenizer: Any, sequence_length: int, eval_samples: int | None) -> None:
        files = [_docstrings(find_files(data))] if data == PYTHON else find_files(data)
        found = list(_conversations(files))
        if len(found) < 2:
            raise UserError(f"{files[0]} has {len(found)} conversations; at least two are needed")
        made_by = (identity(*files), tokenizer.backend_tokenizer.to_str(), tokenizer.chat_template, sequence_length)
        key = hashlib.sha256(repr(made_by).encode()).hexdigest()[:16]
        count = held_out(len(found), eval_samples, DEFAULT_EVAL_FRACTION)

        def rows(name: str, indices: Any) -> Packed:
            def make(path: Path) -> None:
                with open(path, "wb") as out:
                    np.save(out, _packed([found[i] for i in indices], tokenizer, sequence_length))

            return Packed(cached(f"conversations-{key}-{name}-{count}.npy", make))

        train, held = hold_out(len(found), count)
        self._train, self._eval = rows("train", train), rows("eval", held) if count else None


class Packed(Dataset[Any]):
    """A file of (3, N, T): tokens, positions, targets."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return self.rows.shape[1]

    def __getitem__(self, index: int) -> Any:
        (tokens, positions), targets = self.__getitems__([index])
        return (tokens[0], positions[0]), targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        tokens, positions, targets = torch.from_numpy(self.rows[:, list(indices)].astype(np.int64))
        return (tokens, positions), targets


# --- read -----------------------------------------------------------------------------------------------------------


def _conversations(files: list[Path]) -> Iterator[tuple[str, list[Message]]]:
    """(where, messages)"""
    for file in files:
        for place, row in json_rows(file):
            yield place, _messages(row, place)


def _messages(row: Any, place: str) -> list[Message]:
    """The messages of a conversation with an answer. Raises UserError: what is in it would be lost."""
    if isinstance(row, dict) and "messages" not in row and isinstance(row.get("conversations"), list):
        raise UserError(
            f"{place} has `conversations`, as ShareGPT has; write `messages`, with role (user, assistant or system) "
            "for from, and content for value"
        )
    wrong = UserError(
        f"{place} is no conversation with an answer; write lines such as "
        '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
    )
    if not isinstance(row, dict) or not isinstance(row.get("messages"), list):
        raise wrong
    if row.get("tools") or row.get("functions"):
        raise UserError(f"{place} has tools, which conversations here have not; write what they say as messages")
    messages: list[Message] = []
    for message in row["messages"]:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise wrong
        if lost := next((key for key in UNREAD if message.get(key)), None):
            raise UserError(f"{place} has a message with {lost}, which is not read; write what it says as content")
        if message.get("weight", 1) not in (1, None):
            raise UserError(f"{place} has a message of weight {message['weight']!r}; all answers are learnt alike")
        content = _content(message.get("content"), place)
        if content is None:
            raise wrong
        messages.append({"role": message["role"], "content": content})
    if not any(message["role"] == "assistant" for message in messages):
        raise wrong
    return messages


def _content(content: Any, place: str) -> str | None:
    """A message's text, of which there may be several parts; None for what is neither."""
    if not isinstance(content, list):
        return document(content, place, "content") if isinstance(content, str) else None
    texts: list[str] = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, dict) else "text"
        if kind not in TEXT_PARTS:
            raise UserError(f"{place} has a message with a part of type {kind!r}; only text is read")
        text = _content(part.get("text") if isinstance(part, dict) else part, place)
        if text is None:
            return None
        texts.append(text)
    return "".join(texts) if texts else None


def _docstrings(files: list[Path]) -> Path:
    """Conversations about what functions of these files do, as their docstrings say."""

    def make(path: Path) -> None:
        with open(path, "w", encoding="utf-8") as out:
            for file in files:
                with contextlib.suppress(SyntaxError, ValueError):  # some are there to be wrong
                    for node in ast.walk(ast.parse(file.read_bytes())):
                        if isinstance(node, ast.FunctionDef) and (says := ast.get_docstring(node)):
                            signature = f"{node.name}({', '.join(a.arg for a in node.args.args)})"
                            question = {"role": "user", "content": f"What does {signature} of {file.stem} do?"}
                            answer = {"role": "assistant", "content": says.partition("\n\n")[0]}
                            out.write(json.dumps({"messages": [question, answer]}) + "\n")

    return cached(f"docstrings-{identity(*files)}.jsonl", make)


# --- tokens ---------------------------------------------------------------------------------------------------------


def end_of_answer(tokenizer: Any) -> str:
    """What the chat template puts behind an answer."""
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "answer"}]
    return _rendered(tokenizer, "an example", talk).rpartition("answer")[2].strip()


def _rendered(tokenizer: Any, where: str, messages: list[Message], **how: Any) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **how)
    except Exception as error:  # whatever a template raises
        raise UserError(f"{where} is not what the tokenizer's chat template takes: {error}") from error


def _answers(tokenizer: Any, where: str, messages: list[Message]) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as one text, and where in it answers begin and end."""
    text, spans = _rendered(tokenizer, where, messages), []
    for i in (i for i, message in enumerate(messages) if message["role"] == "assistant"):
        before = _rendered(tokenizer, where, messages[:i], add_generation_prompt=True)
        with_it = _rendered(tokenizer, where, messages[: i + 1])
        if not (text.startswith(with_it) and with_it.startswith(before)):
            raise UserError(
                f"{where}: the tokenizer's chat template changes earlier messages when later ones come, so answers "
                "cannot be told from the rest: write one answer a conversation, or another chat template"
            )
        spans.append((len(before), len(with_it)))
    return text, spans


def _packed(found: list[tuple[str, list[Message]]], tokenizer: Any, length: int) -> np.ndarray:
    """(3, N, length), int32. Conversations are cut at the length; those without an answer before it are left out."""
    documents = []
    for where, messages in found:
        text, spans = _answers(tokenizer, where, messages)
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        ids = np.array(encoded["input_ids"][:length], np.int32)
        learnt = np.array([any(a <= begin < b for a, b in spans) for begin, _ in encoded["offset_mapping"]][:length])
        targets = np.append(np.where(learnt, ids, NOTHING)[1:], NOTHING)
        if (targets != NOTHING).any():
            documents.append((ids, targets))
    if not documents:
        raise UserError(
            f"no answer begins in the first {length} tokens of its conversation: write a larger sequence_length"
        )
    rows = pack([len(ids) for ids, _ in documents], length)
    made = np.zeros((3, len(rows), length), np.int32)
    made[0], made[2] = tokenizer.pad_token_id or 0, NOTHING
    for row, members in enumerate(rows):
        at = 0
        for ids, targets in map(documents.__getitem__, members):
            part = slice(at, at := at + len(ids))
            made[0, row, part], made[1, row, part], made[2, row, part] = ids, np.arange(len(ids)), targets
        made[1, row, at:] = np.arange(length - at)
    return made


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Which of them go together, none of more than `room` in all."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (left, row), least first
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect_left(free, (lengths[i], 0))
        if at == len(free):
            free.append((room, len(rows)))
            rows.append([])
        left, row = free.pop(at)
        rows[row].append(i)
        insort(free, (left - lengths[i], row))
    return rows


# --- texts with what to make of them --------------------------------------------------------------------------------


class TextPairs(Answers):
    """Inputs are (tokens (B, S), mask (B, S), the decoder's tokens (B, T)), as long as the batch's longest.

    data: a .csv (.gz too) or .parquet file. text, label: the columns of what is given and of what is to be made of it.
    start: the decoder's first token.
    """

    def __init__(
        self,
        *,
        data: str,
        text: str = "text",
        label: str = "target",
        tokenizer: Any,
        longest: int,
        start: int,
        eval_samples: int | None,
    ) -> None:
        if not isinstance(data, str):
            raise UserError(f"task_args.data is {data!r}; write the path of a .csv or .parquet file")
        columns, _ = read_table(data, text=(text, label))
        given = column_of(columns, text, key="task_args.text", source=data).values
        wanted = column_of(columns, label, key="task_args.label", source=data).values
        pairs = [(a, b) for a, b in zip(given, wanted, strict=True) if a is not None and b is not None]
        if len(pairs) < 2:
            raise UserError(f"{data} has {len(pairs)} rows with both texts; at least two are needed")
        count = held_out(len(pairs), eval_samples, DEFAULT_EVAL_FRACTION)
        train, held = hold_out(len(pairs), count)
        self._train = Pairs([pairs[i] for i in train], tokenizer, longest, start)
        self._eval = Pairs([pairs[i] for i in held], tokenizer, longest, start) if count else None


class Pairs(Dataset[Any]):
    def __init__(self, pairs: list[tuple[str, str]], tokenizer: Any, longest: int, start: int) -> None:
        self.pairs, self.tokenizer, self.longest, self.start = pairs, tokenizer, longest, start

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Any:
        inputs, targets = self.__getitems__([index])
        return tuple(each[0] for each in inputs), targets[0]

    def __getitems__(self, indices: Sequence[int]) -> Any:
        given, wanted = zip(*(self.pairs[index] for index in indices))
        tokenizer, how = self.tokenizer, {"padding": True, "truncation": True, "max_length": self.longest}
        source = tokenizer(list(given), return_tensors="pt", **how)
        ended = [text + tokenizer.eos_token for text in wanted]
        made = tokenizer(ended, add_special_tokens=False, return_tensors="pt", **how)
        targets = made["input_ids"].masked_fill(made["attention_mask"] == 0, NOTHING)
        decoder = F.pad(made["input_ids"][:, :-1], (1, 0), value=self.start)
        return (source["input_ids"], source["attention_mask"], decoder), targets
