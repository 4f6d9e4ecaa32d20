"""Data of which only a part is a target: the answers in conversations, and texts made from texts.

**Packing.** Conversations of different lengths fill sequences of one length: the longest first,
each where it leaves the least room (best-fit decreasing). Positions begin at 0 with each
conversation, and attention stays inside it (task.py), so that the loss is that of each conversation
by itself (Krell et al. 2021, https://arxiv.org/abs/2107.02027).
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.files import cached, identity
from app.data.open_text import json_rows
from app.data.order import Indices, held_out, hold_out
from app.data.sets import document
from app.data.tables import column_of, read_table
from app.data.text import PYTHON, find_files
from app.errors import UserError
from app.tasks.huggingface.tokenizer import longest_text
from app.tasks.language import MAX_EXPONENT
from app.tasks.parts import SplitDataTask

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IGNORED = -100  # the target of a token that is not learnt, as in torch's cross entropy
DEFAULT_EVAL_FRACTION = 0.1
UNSUPPORTED_PARTS = ("tool_calls", "function_call", "tool_call_id", "audio")
"""Parts of a message that only some chat templates take."""
TEXT_TYPES = ("text", "input_text", "output_text")
"""Types of the parts of a message's content that are text."""

Int32s = npt.NDArray[np.int32]
AnswerBatch = tuple[Any, Tensor]
"""A batch: the model's inputs, and targets (B, T)."""
PackedBatch = tuple[tuple[Tensor, Tensor], Tensor]
"""A batch: tokens and positions, and targets, each int64 (B, T)."""
PairsBatch = tuple[tuple[Tensor, Tensor, Tensor], Tensor]
"""A batch: tokens (B, S), their mask (B, S) and the decoder's tokens (B, T); and targets (B, T)."""


class Message(TypedDict):
    """One message of a conversation."""

    role: str
    content: str


@dataclass(frozen=True)
class Conversation:
    """A conversation with an answer.

    Args:
        place: Its file and line, for messages to people.
        messages: What was said.
    """

    place: str
    messages: list[Message]


class Answers(SplitDataTask):
    """A task whose loss is the mean over targets (B, T) other than IGNORED.

    Its model gives logits (B, T, V). This class has no model of its own.
    """

    unit = "tokens"
    float_output = False

    def items(self, batch: AnswerBatch) -> Tensor:
        """The number of targets that are learnt."""
        _, targets_BT = batch
        return (targets_BT != IGNORED).sum()

    def loss(self, model: nn.Module, batch: AnswerBatch) -> Tensor:
        """The mean cross entropy; 0 if no target is learnt."""
        inputs, targets_BT = batch
        logits = model(inputs).flatten(0, 1).float()
        total = F.cross_entropy(logits, targets_BT.flatten(), reduction="sum")
        return total / self.items(batch).clamp(min=1)

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The perplexity."""
        return {"perplexity": math.exp(min(means["loss"], MAX_EXPONENT))}


class Conversations(Answers):
    """Packed conversations, of which the assistant's messages are learnt.

    Args:
        data: Files of JSON lines or of one JSON array, of objects with `messages`: [{role,
            content}, …]; or `python`.
        tokenizer: The library's tokenizer, with a chat template.
        sequence_length: Tokens of a row.
        eval_samples: How many conversations are held out; None means the default.

    Raises:
        UserError: The data cannot be read, or has fewer than two conversations.
    """

    def __init__(
        self,
        *,
        data: str | list[str],
        tokenizer: PreTrainedTokenizerFast,
        sequence_length: int,
        eval_samples: int | None,
    ) -> None:
        files = [_docstrings(find_files(data))] if data == PYTHON else find_files(data)
        conversations = list(_read_conversations(files))
        if len(conversations) < 2:
            raise UserError(
                f"{files[0]} has {len(conversations)} conversations; at least two are needed"
            )
        made_from = (
            identity(*files),
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.chat_template,
            sequence_length,
        )
        key = hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]
        count = held_out(len(conversations), eval_samples, DEFAULT_EVAL_FRACTION)

        def packed(part: str, indices: Indices) -> Packed:
            chosen = [conversations[index] for index in indices]

            def write(path: Path) -> None:
                with open(path, "wb") as file:
                    np.save(file, _pack_conversations(chosen, tokenizer, sequence_length))

            return Packed(cached(f"conversations-{key}-{part}-{count}.npy", write))

        train_index, eval_index = hold_out(len(conversations), count)
        self._train = packed("train", train_index)
        self._eval = packed("eval", eval_index) if count else None


class Packed(Dataset[Any]):
    """The rows of packed conversations.

    Args:
        path: A .npy file of (3, N, T): tokens, positions and targets.
    """

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return self.rows.shape[1]

    def __getitem__(self, index: int) -> PackedBatch:
        (tokens_BT, positions_BT), targets_BT = self.__getitems__([index])
        return (tokens_BT[0], positions_BT[0]), targets_BT[0]

    def __getitems__(self, indices: Sequence[int]) -> PackedBatch:
        rows = self.rows[:, list(indices)].astype(np.int64)
        tokens_BT, positions_BT, targets_BT = torch.from_numpy(rows)
        return (tokens_BT, positions_BT), targets_BT


# --- reading ---


def _read_conversations(files: Iterable[Path]) -> Iterator[Conversation]:
    for file in files:
        for place, row in json_rows(file):
            yield Conversation(place, _messages(row, place))


def _messages(row: Any, place: str) -> list[Message]:
    """The messages of a conversation.

    Args:
        row: A JSON value.
        place: Its file and line.

    Raises:
        UserError: It is not a conversation with an answer, or something in it would be lost.
    """
    not_a_conversation = UserError(
        f"{place} is not a conversation with an answer; write lines such as "
        '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}'
    )
    if not isinstance(row, dict):
        raise not_a_conversation
    if "messages" not in row and isinstance(row.get("conversations"), list):
        raise UserError(
            f"{place} has `conversations`, as ShareGPT has; write `messages`, "
            "with role (user, assistant or system) for from, and content for value"
        )
    if not isinstance(row.get("messages"), list):
        raise not_a_conversation
    refuse_tools(row, place)
    messages = read_messages(row["messages"], place, not_a_conversation)
    if not any(message["role"] == "assistant" for message in messages):
        raise not_a_conversation
    return messages


def refuse_tools(row: dict[str, Any], place: str) -> None:
    """Raise UserError if a line has tools besides its messages."""
    if row.get("tools") or row.get("functions"):
        raise UserError(
            f"{place} has tools, which conversations cannot have here; "
            "write their contents as messages"
        )


def read_messages(values: list[Any], place: str, error: UserError) -> list[Message]:
    """A list of messages.

    Args:
        values: The list, as it was read from JSON.
        place: Its file and line.
        error: To raise if it has something that is not a message.

    Raises:
        UserError: See `error`; or something in a message would be lost.
    """
    messages: list[Message] = []
    for message in values:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise error
        _refuse_unsupported(message, place)
        content = _content(message.get("content"), place)
        if content is None:
            raise error
        messages.append({"role": message["role"], "content": content})
    return messages


def _refuse_unsupported(message: dict[str, Any], place: str) -> None:
    for key in UNSUPPORTED_PARTS:
        if message.get(key):
            raise UserError(
                f"{place} has a message with {key}, which is not read; "
                "write what it says as content"
            )
    if message.get("weight", 1) not in (1, None):
        raise UserError(
            f"{place} has a message of weight {message['weight']!r}; all answers are learnt alike"
        )


def _content(content: Any, place: str) -> str | None:
    """The text of a message, which may have several parts; None if it is something else.

    Raises:
        UserError: A part is not text.
    """
    if isinstance(content, str):
        return document(content, place, "content")
    if not isinstance(content, list):
        return None
    texts: list[str] = []
    for part in content:
        text = part
        if isinstance(part, dict):
            part_type = part.get("type", "text")
            if part_type not in TEXT_TYPES:
                raise UserError(
                    f"{place} has a message with a part of type {part_type!r}; only text is read"
                )
            text = part.get("text")
        part_content = _content(text, place)
        if part_content is None:
            return None
        texts.append(part_content)
    return "".join(texts) if texts else None


def _docstrings(files: list[Path]) -> Path:
    """A file of conversations about what functions do, made from the docstrings of Python files."""

    def write(path: Path) -> None:
        with open(path, "w", encoding="utf-8") as out:
            for file in files:
                # Python's library has files with intended syntax errors, for its tests.
                with contextlib.suppress(SyntaxError, ValueError):
                    for messages in _conversations_about(file):
                        out.write(json.dumps({"messages": messages}) + "\n")

    return cached(f"docstrings-{identity(*files)}.jsonl", write)


def _conversations_about(file: Path) -> Iterator[list[Message]]:
    """A question and its answer for each function of a Python file that has a docstring."""
    for node in ast.walk(ast.parse(file.read_bytes())):
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if not docstring:
            continue
        arguments = ", ".join(argument.arg for argument in node.args.args)
        question = f"What does {node.name}({arguments}) of {file.stem} do?"
        first_paragraph = docstring.partition("\n\n")[0]
        yield [
            {"role": "user", "content": question},
            {"role": "assistant", "content": first_paragraph},
        ]


# --- tokens ---


def end_of_answer(tokenizer: PreTrainedTokenizerFast, *, as_parts: bool = False) -> str:
    """What the tokenizer's chat template writes after an answer.

    Args:
        tokenizer: The tokenizer.
        as_parts: Whether the template takes the parts of a message.
    """

    def content(text: str) -> Any:
        return [{"type": "text", "text": text}] if as_parts else text

    example: list[Message] = [
        {"role": "user", "content": content("?")},
        {"role": "assistant", "content": content("answer")},
    ]
    text = render(tokenizer, Conversation("an example", example))
    return text.rpartition("answer")[2].strip()


def render(
    tokenizer: PreTrainedTokenizerFast,
    conversation: Conversation,
    *,
    add_generation_prompt: bool = False,
) -> str:
    """A conversation as text, by the tokenizer's chat template.

    Args:
        tokenizer: The tokenizer.
        conversation: The conversation.
        add_generation_prompt: Whether to end with what comes before an answer.

    Raises:
        UserError: The template does not take the conversation.
    """
    try:
        return tokenizer.apply_chat_template(
            conversation.messages,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    except Exception as error:  # a template may raise anything
        raise UserError(
            f"{conversation.place} is not what the tokenizer's chat template takes: {error}"
        ) from error


def answer_spans(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation
) -> tuple[str, list[tuple[int, int]]]:
    """A conversation as text, and where in it each answer begins and ends.

    Args:
        tokenizer: The tokenizer, with a chat template.
        conversation: The conversation.

    Raises:
        UserError: The template changes earlier messages when later ones are added.
    """
    text = render(tokenizer, conversation)
    spans = []
    for index, message in enumerate(conversation.messages):
        if message["role"] != "assistant":
            continue
        question = Conversation(conversation.place, conversation.messages[:index])
        answered = Conversation(conversation.place, conversation.messages[: index + 1])
        question_text = render(tokenizer, question, add_generation_prompt=True)
        answered_text = render(tokenizer, answered)
        if not (text.startswith(answered_text) and answered_text.startswith(question_text)):
            raise UserError(
                f"{conversation.place}: the tokenizer's chat template changes earlier messages "
                "when later ones come, so answers cannot be separated from the rest: "
                "write one answer a conversation, or another chat template"
            )
        spans.append((len(question_text), len(answered_text)))
    return text, spans


def _pack_conversations(
    conversations: Iterable[Conversation], tokenizer: PreTrainedTokenizerFast, length: int
) -> Int32s:
    """Conversations as rows of tokens, positions and targets.

    Conversations are cut at the length of a row. Those without an answer before it are left out.

    Args:
        conversations: The conversations.
        tokenizer: The tokenizer.
        length: The length of a row, T.

    Returns:
        (3, N, T): tokens, positions and targets of N rows.

    Raises:
        UserError: No conversation has an answer in its first `length` tokens.
    """
    encoded = [_encode(conversation, tokenizer, length) for conversation in conversations]
    encoded = [(ids, targets) for ids, targets in encoded if (targets != IGNORED).any()]
    if not encoded:
        raise UserError(
            f"no answer begins in the first {length} tokens of its conversation: "
            "write a larger sequence_length"
        )
    rows = pack([len(ids) for ids, _ in encoded], length)
    packed = np.zeros((3, len(rows), length), np.int32)
    tokens_NT, positions_NT, targets_NT = packed
    tokens_NT[:] = tokenizer.pad_token_id or 0
    targets_NT[:] = IGNORED
    for row, members in enumerate(rows):
        begin = 0
        for member in members:
            ids, targets = encoded[member]
            end = begin + len(ids)
            tokens_NT[row, begin:end] = ids
            positions_NT[row, begin:end] = np.arange(len(ids))
            targets_NT[row, begin:end] = targets
            begin = end
        positions_NT[row, begin:] = np.arange(length - begin)
    return packed


def _encode(
    conversation: Conversation, tokenizer: PreTrainedTokenizerFast, length: int
) -> tuple[Int32s, Int32s]:
    """The first tokens of a conversation, and the target of each: the next token of an answer."""
    text, spans = answer_spans(tokenizer, conversation)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = np.array(encoded["input_ids"][:length], np.int32)
    is_learnt = np.array(
        [
            any(begin <= offset < end for begin, end in spans)
            for offset, _ in encoded["offset_mapping"][:length]
        ],
        bool,
    )
    learnt_ids = np.where(is_learnt, ids, IGNORED)
    targets = np.append(learnt_ids[1:], IGNORED).astype(np.int32)
    return ids, targets


def pack(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Distribute items over as few rows as best-fit decreasing gives.

    Args:
        lengths: The length of each item, at most `room`.
        room: How much fits in a row.

    Returns:
        The numbers of the items in each row.
    """
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, row) of each row, the least room first
    for item in sorted(range(len(lengths)), key=lambda item: -lengths[item]):
        best_fit = bisect_left(free, (lengths[item], 0))
        if best_fit == len(free):
            free.append((room, len(rows)))
            rows.append([])
        left, row = free.pop(best_fit)
        rows[row].append(item)
        insort(free, (left - lengths[item], row))
    return rows


# --- texts made from texts ---


class TextPairs(Answers):
    """Texts, and the texts that a model with an encoder and a decoder is to make from them.

    Args:
        data: A .csv (.gz too) or .parquet file.
        text: The column of the given texts.
        label: The column of the texts to make.
        tokenizer: The library's tokenizer, with padding and an end of text.
        longest: How many tokens of a text are used.
        start: The decoder's first token.
        eval_samples: How many pairs are held out; None means the default.

    Raises:
        UserError: The data cannot be read, or has fewer than two pairs.
    """

    def __init__(
        self,
        *,
        data: str,
        text: str = "text",
        label: str = "target",
        tokenizer: PreTrainedTokenizerFast,
        longest: int,
        start: int,
        eval_samples: int | None,
    ) -> None:
        if not isinstance(data, str):
            raise UserError(
                f"task_args.data is {data!r}; write the path of a .csv or .parquet file"
            )
        columns, _ = read_table(data, text=(text, label))
        sources = column_of(columns, text, key="task_args.text", source=data).values
        targets = column_of(columns, label, key="task_args.label", source=data).values
        pairs = [
            (source, target)
            for source, target in zip(sources, targets, strict=True)
            if source is not None and target is not None
        ]
        if len(pairs) < 2:
            raise UserError(
                f"{data} has {len(pairs)} rows with both texts; at least two are needed"
            )
        count = held_out(len(pairs), eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(pairs), count)

        def data_set(indices: Indices) -> Pairs:
            chosen = [pairs[index] for index in indices]
            return Pairs(chosen, tokenizer=tokenizer, longest=longest, start=start)

        self._train = data_set(train_index)
        self._eval = data_set(eval_index) if count else None


class Pairs(Dataset[Any]):
    """Pairs of texts, tokenised when they are fetched. A batch is as long as its longest text.

    Args:
        pairs: (given text, text to make).
        tokenizer: The library's tokenizer, with padding and an end of text.
        longest: How many tokens of a text are used.
        start: The decoder's first token.

    Attributes:
        longest_sample: The number of the pair with the most tokens.
    """

    def __init__(
        self,
        pairs: list[tuple[str, str]],
        *,
        tokenizer: PreTrainedTokenizerFast,
        longest: int,
        start: int,
    ) -> None:
        self.pairs = pairs
        self.tokenizer = tokenizer
        self.longest = longest
        self.start = start
        self.longest_sample = longest_text(
            [f"{source} {target}" for source, target in pairs], tokenizer, limit=2 * longest
        )

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> PairsBatch:
        (tokens_BS, mask_BS, decoder_BT), targets_BT = self.__getitems__([index])
        return (tokens_BS[0], mask_BS[0], decoder_BT[0]), targets_BT[0]

    def __getitems__(self, indices: Sequence[int]) -> PairsBatch:
        sources = [self.pairs[index][0] for index in indices]
        targets = [self.pairs[index][1] + self.tokenizer.eos_token for index in indices]
        source = self._tokenise(sources, add_special_tokens=True)
        target = self._tokenise(targets, add_special_tokens=False)
        target_ids = target["input_ids"]
        targets_BT = target_ids.masked_fill(target["attention_mask"] == 0, IGNORED)
        decoder_BT = F.pad(target_ids[:, :-1], (1, 0), value=self.start)
        return (source["input_ids"], source["attention_mask"], decoder_BT), targets_BT

    def _tokenise(self, texts: list[str], *, add_special_tokens: bool) -> dict[str, Tensor]:
        return self.tokenizer(
            texts,
            add_special_tokens=add_special_tokens,
            padding=True,
            truncation=True,
            max_length=self.longest,
            return_tensors="pt",
        )
