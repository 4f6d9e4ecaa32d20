"""Preference tuning by pairs of answers (DPO, Rafailov et al. 2023, 2305.18290).

Of a prompt x there is an answer w that people chose and an answer l that they rejected. Let π be
the model, and ρ the same model before its first step, the reference. With

    h = [log π(w|x) - log ρ(w|x)] - [log π(l|x) - log ρ(l|x)]

where the logarithm of an answer is the sum of its tokens', the losses of a pair are

    sigmoid   -(1 - ε)·log σ(β·h) - ε·log σ(-β·h)      ε is `label_smoothing` (cDPO: 2305.18290, v3)
    hinge     max(0, 1 - β·h)                          (SLiC: Zhao et al. 2023, 2305.10425)
    ipo       (h' - 1 / 2β)²                           h' with means over tokens instead of sums
                                                       (Azar et al. 2023, 2310.12036)

Of the reference only log ρ of each answer is needed: two numbers for each pair. The model that is
about to be trained computes them once, before the first step and on whatever layout it has, and
they are part of every checkpoint (app/training/reference.py). So there is no second model in
memory, with adapters or without, and a resumed run has the same reference to the last bit.

A pair is one sample: two rows, the chosen one first, each the prompt and an answer. The rows of a
batch are padded on the right to its longest, which no earlier token sees: no mask is needed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.data.files import cached, identity
from app.data.open_text import json_rows
from app.data.order import Indices, held_out, hold_out
from app.data.sets import document
from app.data.text import find_files
from app.errors import UserError
from app.tasks.huggingface.conversations import (
    IGNORED,
    Conversation,
    Message,
    read_messages,
    refuse_tools,
    render,
)
from app.tasks.parts import SplitDataTask, one_of, require_known
from strategies.context.apply import ContextPlan, TakePart, sum_over_sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DEFAULT_EVAL_FRACTION = 0.1
LOSS_TYPES = ("sigmoid", "hinge", "ipo")
OPTIONS = ("beta", "label_smoothing", "loss_type")
LENGTH_MULTIPLE = 32
"""Rows are padded to a multiple of this: few shapes occur, which can be split over workers."""
READ_AT_ONCE = 1000
"""Pairs that are tokenised in one call."""

Int32s = npt.NDArray[np.int32]
PairBatch = tuple[Tensor, tuple[Tensor, Tensor]]
"""A batch: tokens (N, 2, T); and their targets (N, 2, T) and the reference (N, 2), log ρ."""


@dataclass(frozen=True)
class PreferenceLoss:
    """The loss of a pair; see the module's documentation.

    Args:
        beta: β.
        label_smoothing: ε.
        loss_type: One of `LOSS_TYPES`.
    """

    beta: float = 0.1
    label_smoothing: float = 0.0
    loss_type: str = "sigmoid"

    @staticmethod
    def of(options: Any) -> PreferenceLoss:
        """The loss that `task_args.dpo` says.

        Raises:
            UserError: An option is unknown or has a value that it cannot have.
        """
        if options is None:
            return PreferenceLoss()
        if not isinstance(options, Mapping):
            raise UserError(
                f"task_args.dpo is {options!r}; "
                "write a mapping such as {beta: 0.1, loss_type: sigmoid}"
            )
        require_known(options, OPTIONS, key="task_args.dpo", owner="dpo")
        loss = PreferenceLoss(**options)
        one_of("dpo.loss_type", loss.loss_type, LOSS_TYPES)
        if not _is_number(loss.beta) or loss.beta <= 0:
            raise UserError(f"task_args.dpo.beta is {loss.beta!r}; it must be a number above 0")
        smoothing = loss.label_smoothing
        if not _is_number(smoothing) or not 0 <= smoothing < 0.5:
            raise UserError(
                f"task_args.dpo.label_smoothing is {smoothing!r}; "
                "it must be at least 0 and below 0.5"
            )
        if smoothing and loss.loss_type != "sigmoid":
            raise UserError(
                f"task_args.dpo.label_smoothing is for loss_type sigmoid, not {loss.loss_type}: "
                "leave it out"
            )
        return loss

    def __call__(self, ratios_N2: Tensor, lengths_N2: Tensor) -> Tensor:
        """The loss of each pair, (N,).

        Args:
            ratios_N2: log π - log ρ of the chosen and of the rejected answer.
            lengths_N2: The tokens of each.
        """
        if self.loss_type == "ipo":
            chosen, rejected = (ratios_N2 / lengths_N2.clamp(min=1)).unbind(1)
            return (chosen - rejected - 1 / (2 * self.beta)) ** 2
        chosen, rejected = ratios_N2.unbind(1)
        margin = self.beta * (chosen - rejected)
        if self.loss_type == "hinge":
            return F.relu(1 - margin)
        loss = -(1 - self.label_smoothing) * F.logsigmoid(margin)
        if self.label_smoothing:
            loss = loss - self.label_smoothing * F.logsigmoid(-margin)
        return loss


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


class Preferences(SplitDataTask):
    """Pairs of answers, of which the chosen one is to become likelier than the rejected one.

    Its model gives logits (rows, T, V). This class has no model of its own.

    Args:
        data: Files of JSON lines, or of one JSON array, of objects with `chosen`, `rejected` and
            mostly `prompt`, each a text or a list of messages.
        tokenizer: The library's tokenizer, with a chat template and an end of text.
        longest: Tokens of a row at most. Pairs whose prompt has as many are left out.
        loss: The loss of a pair.
        eval_samples: How many pairs are held out; None means the default.

    Attributes:
        longest: Tokens of the longest row.
        mean_tokens: Of a pair's two rows together.
        has_messages: Whether the pairs are conversations.

    Raises:
        UserError: The data cannot be read, or has fewer than two pairs.
    """

    float_output = False

    def __init__(
        self,
        *,
        data: str | list[str],
        tokenizer: PreTrainedTokenizerFast,
        longest: int,
        loss: PreferenceLoss,
        eval_samples: int | None,
    ) -> None:
        self.pair_loss = loss
        files = find_files(data)
        made_from = (
            identity(*files),
            tokenizer.backend_tokenizer.to_str(),
            tokenizer.chat_template,
            tokenizer.eos_token,
            longest,
        )
        key = hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]

        def write(folder: Path) -> None:
            folder.mkdir()
            _write_pairs(_read_pairs(files), folder, tokenizer=tokenizer, longest=longest)

        folder = cached(f"preferences-{key}", write)
        pairs = TokenisedPairs(folder, longest=longest, padding=tokenizer.pad_token_id or 0)
        if len(pairs) < 2:
            raise UserError(
                f"{files[0]} has {len(pairs)} pairs of answers to a prompt of fewer than {longest} "
                "tokens; at least two are needed, or a larger task_args.sequence_length"
            )
        self.longest = pairs.padded(int(pairs.row_lengths().max()))
        self.mean_tokens = float(pairs.row_lengths().sum(1).mean())
        self.has_messages = pairs.has_messages
        count = held_out(len(pairs), eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(pairs), count)
        self._train = Pairs(pairs, train_index, digest=key)
        self._eval = Pairs(pairs, eval_index, digest=key) if count else None

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """The mean loss of the pairs."""
        means = self.metrics(model, batch)
        for name, mean in means.items():
            if name != "loss":
                self.log(name, mean)
        return means["loss"]

    def metrics(self, model: nn.Module, batch: PairBatch) -> dict[str, Tensor]:
        """The loss, and what TRL's users know by these names: rewards are β·(log π - log ρ)."""
        _, (_, reference_N2) = batch
        logps_N2, lengths_N2 = self.answer_logps(model, batch)
        # In a rehearsal there is no reference yet: the model is its own, as in the first step.
        is_missing_N2 = reference_N2.isnan()
        ratios_N2 = logps_N2 - torch.where(is_missing_N2, logps_N2.detach(), reference_N2)
        rewards_N2 = self.pair_loss.beta * ratios_N2.detach()
        chosen_N, rejected_N = rewards_N2.unbind(1)
        return {
            "loss": self.pair_loss(ratios_N2, lengths_N2).mean(),
            "rewards/chosen": chosen_N.mean(),
            "rewards/rejected": rejected_N.mean(),
            "rewards/margins": (chosen_N - rejected_N).mean(),
            "rewards/accuracies": (chosen_N > rejected_N).float().mean(),
            "logps/chosen": logps_N2[:, 0].detach().mean(),
            "logps/rejected": logps_N2[:, 1].detach().mean(),
        }

    def reference(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """log ρ of each answer, (N, 2)."""
        logps_N2, _ = self.answer_logps(model, batch)
        return logps_N2

    def answer_logps(self, model: nn.Module, batch: PairBatch) -> tuple[Tensor, Tensor]:
        """The sum of the log-probabilities of each answer's tokens, and their number, (N, 2) each.

        If sequences are split over workers, both are of the whole sequence.
        """
        tokens_N2T, (targets_N2T, _) = batch
        logits = model(tokens_N2T).flatten(0, 1).float()
        losses = F.cross_entropy(
            logits, targets_N2T.flatten(), ignore_index=IGNORED, reduction="none"
        )
        logps_N2 = -losses.view(targets_N2T.shape).sum(-1)
        lengths_N2 = (targets_N2T != IGNORED).sum(-1)
        logps_N2, lengths_N2 = sum_over_sequence(torch.stack([logps_N2, lengths_N2])).unbind()
        return logps_N2, lengths_N2


def split_pairs(plan: ContextPlan) -> ContextPlan:
    """A plan for context parallelism in which a batch is one of pairs.

    Args:
        plan: How the model is given the positions of its tokens.
    """

    def cut(batch: PairBatch, take: TakePart) -> PairBatch:
        tokens_N2T, (targets_N2T, reference_N2) = batch
        return take(tokens_N2T, 2), (take(targets_N2T, 2), reference_N2)

    def count_tokens(batch: PairBatch) -> Tensor:
        # Every worker computes the loss of whole sequences, so that all of them count alike.
        tokens_N2T, _ = batch
        return torch.full((), tokens_N2T.numel(), device=tokens_N2T.device)

    return ContextPlan(plan.keywords, cut=cut, labels=count_tokens)


# --- samples --------------------------------------------------------------------------------------


class TokenisedPairs:
    """Pairs as tokens, in the cache.

    Args:
        folder: What `_write_pairs` has written.
        longest: Tokens of a row at most.
        padding: The token after the end of a row, which has no meaning.
    """

    def __init__(self, folder: Path, *, longest: int, padding: int) -> None:
        self._tokens = np.load(folder / TOKENS, mmap_mode="r")
        self._index = np.load(folder / INDEX)  # (pairs, 4): begin, and the length of each part
        self.has_messages = (folder / MESSAGES).exists()
        self._longest = longest
        self._padding = padding

    def __len__(self) -> int:
        return len(self._index)

    def row_lengths(self) -> npt.NDArray[np.int64]:
        """The tokens of the two rows of each pair, (pairs, 2)."""
        _, prompt, chosen, rejected = self._index.T
        lengths = np.stack([prompt + chosen, prompt + rejected], axis=1)
        return np.minimum(lengths, self._longest)

    def padded(self, length: int) -> int:
        """The length to which rows of up to `length` tokens are padded."""
        return min(-(-length // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self._longest)

    def batch(self, numbers: Indices) -> tuple[Tensor, Tensor]:
        """Tokens and targets of pairs, int64 (N, 2, T) each."""
        length = self.padded(int(self.row_lengths()[numbers].max()))
        tokens = np.full((len(numbers), 2, length), self._padding, np.int64)
        targets = np.full((len(numbers), 2, length), IGNORED, np.int64)
        for pair, number in enumerate(numbers):
            begin, prompt, *answers = self._index[number]
            answer_begin = begin + prompt
            for row, answer in enumerate(answers):
                answer_end = answer_begin + answer
                ids = np.concatenate(
                    [
                        self._tokens[begin : begin + prompt],
                        self._tokens[answer_begin:answer_end],
                    ]
                )[:length]
                tokens[pair, row, : len(ids)] = ids
                targets[pair, row, prompt - 1 : len(ids) - 1] = ids[prompt:]
                answer_begin = answer_end
        return torch.from_numpy(tokens), torch.from_numpy(targets)


class Pairs(torch.utils.data.Dataset[Any]):
    """Pairs as samples. A batch is as long as its longest row.

    Args:
        pairs: All pairs.
        numbers: Those of this data set.
        digest: Of the data, of which the reference is.

    Attributes:
        reference: log ρ of the answers of each pair, (len, 2); nan until it is computed.
        longest_sample: The number of the sample with the longest row.
    """

    def __init__(self, pairs: TokenisedPairs, numbers: Indices, *, digest: str) -> None:
        self._pairs = pairs
        self.digest = digest
        self._numbers = numbers
        self.reference = torch.full((len(numbers), 2), torch.nan)
        self.longest_sample = int(pairs.row_lengths()[numbers].max(1).argmax())

    def __len__(self) -> int:
        return len(self._numbers)

    def __getitem__(self, index: int) -> PairBatch:
        tokens_N2T, (targets_N2T, reference_N2) = self.__getitems__([index])
        return tokens_N2T[0], (targets_N2T[0], reference_N2[0])

    def __getitems__(self, indices: Sequence[int]) -> PairBatch:
        chosen = np.asarray(indices, dtype=np.int64)
        tokens_N2T, targets_N2T = self._pairs.batch(self._numbers[chosen])
        return tokens_N2T, (targets_N2T, self.reference[torch.from_numpy(chosen)])


# --- reading --------------------------------------------------------------------------------------

TOKENS = "tokens.npy"
INDEX = "index.npy"
MESSAGES = "messages"
"""A file that is there if the pairs are conversations."""


@dataclass(frozen=True)
class Pair:
    """A prompt and two answers to it, as texts or as messages.

    Args:
        place: Its file and line, for messages to people.
        prompt: What is answered.
        chosen: The better answer.
        rejected: The other one.
    """

    place: str
    prompt: str | list[Message]
    chosen: str | list[Message]
    rejected: str | list[Message]


def _read_pairs(files: Iterable[Path]) -> Iterator[Pair]:
    for file in files:
        for place, row in json_rows(file):
            yield _pair(row, place)


def _pair(row: Any, place: str) -> Pair:
    """The pair of a line.

    A prompt that is not written is what both answers begin with.

    Args:
        row: A JSON value.
        place: Its file and line.

    Raises:
        UserError: It is not a pair, or something in it would be lost.
    """
    not_a_pair = UserError(
        f"{place} is not a pair of answers; write lines such as "
        '{"prompt": "…", "chosen": "…", "rejected": "…"}, with texts or with lists of messages'
    )
    if not isinstance(row, dict) or not {"chosen", "rejected"} <= row.keys():
        raise not_a_pair
    refuse_tools(row, place)
    values = [row.get("prompt"), row["chosen"], row["rejected"]]
    if all(isinstance(value, str) for value in values[1:]):
        return _pair_of_texts(values, place, not_a_pair)
    if not all(isinstance(value, list) for value in values[1:]):
        raise not_a_pair
    chosen, rejected = (read_messages(value, place, not_a_pair) for value in values[1:])
    shared = _common_prefix(chosen, rejected)
    prompt: list[Message]
    if isinstance(values[0], list):
        prompt = read_messages(values[0], place, not_a_pair)
        shared = 0
    elif shared:
        prompt = chosen[:shared]
    elif isinstance(values[0], str):
        prompt = [{"role": "user", "content": values[0]}]
    else:
        raise not_a_pair
    answers = chosen[shared:], rejected[shared:]
    for name, answer in zip(("chosen", "rejected"), answers, strict=True):
        if not any(message["role"] == "assistant" for message in answer):
            raise UserError(
                f"{place} has no message of the assistant in {name} that is not in the prompt too; "
                "write an answer there, or leave the line out"
            )
    return Pair(place, prompt, *answers)


def _pair_of_texts(values: Sequence[Any], place: str, not_a_pair: UserError) -> Pair:
    """A pair of texts.

    Args:
        values: The prompt, or None; the chosen and the rejected answer.
        place: Its file and line.
        not_a_pair: To raise if the prompt is something else.
    """
    prompt, chosen, rejected = values
    for name, text in (("chosen", chosen), ("rejected", rejected)):
        document(text, place, name)
    if prompt is None:
        shared = _common_prefix(chosen, rejected)
        if not shared or shared == min(len(chosen), len(rejected)):
            raise UserError(
                f"{place} has no prompt, and its chosen and rejected do not differ after a "
                "beginning that they share: write the prompt"
            )
        if chosen[shared - 1] == " ":  # a word and the space before it are mostly one token
            shared -= 1
        return Pair(place, chosen[:shared], chosen[shared:], rejected[shared:])
    if not isinstance(prompt, str):
        raise not_a_pair
    document(prompt, place, "prompt")
    return Pair(place, prompt, chosen, rejected)


def _common_prefix(first: Sequence[Any], second: Sequence[Any]) -> int:
    """With how many equal items two sequences begin."""
    count = 0
    for one, other in zip(first, second):
        if one != other:
            break
        count += 1
    return count


def _write_pairs(
    pairs: Iterable[Pair], folder: Path, *, tokenizer: PreTrainedTokenizerFast, longest: int
) -> None:
    """Write pairs as tokens, without those whose prompt leaves no room for an answer.

    Args:
        pairs: The pairs.
        folder: Gets the files that TokenisedPairs reads.
        tokenizer: The tokenizer.
        longest: Tokens of a row at most.

    Raises:
        UserError: Some pairs are texts and some are messages, or an answer has no tokens.
    """
    tokens: list[Int32s] = []
    index: list[tuple[int, int, int, int]] = []
    begin = 0
    first: Pair | None = None
    for some in _chunks(pairs):
        first = first or some[0]
        for pair in some:
            if isinstance(pair.chosen, str) != isinstance(first.chosen, str):
                raise UserError(
                    f"{pair.place} differs from {first.place}: one has texts, the other lists of "
                    "messages; write all pairs in one form"
                )
        for prompt, chosen, rejected in _encode(some, tokenizer):
            if len(prompt) >= longest:
                continue
            tokens += [np.array(ids, np.int32) for ids in (prompt, chosen, rejected)]
            index.append((begin, len(prompt), len(chosen), len(rejected)))
            begin += len(prompt) + len(chosen) + len(rejected)
    np.save(folder / TOKENS, np.concatenate(tokens) if tokens else np.zeros(0, np.int32))
    np.save(folder / INDEX, np.array(index, np.int64).reshape(-1, 4))
    if first is not None and not isinstance(first.chosen, str):
        (folder / MESSAGES).touch()


def _chunks(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    chunk: list[Pair] = []
    for pair in pairs:
        chunk.append(pair)
        if len(chunk) == READ_AT_ONCE:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _encode(
    pairs: Sequence[Pair], tokenizer: PreTrainedTokenizerFast
) -> Iterator[tuple[list[int], list[int], list[int]]]:
    """The tokens of prompts and of their answers.

    A prompt's tokens are those that it has both alone and before each answer: tokens at the seam
    belong to the answers.

    Raises:
        UserError: An answer has no tokens.
    """
    texts = [text for pair in pairs for text in _texts(pair, tokenizer)]
    is_text = isinstance(pairs[0].chosen, str)
    encoded = tokenizer(texts, add_special_tokens=is_text)["input_ids"]
    for number, pair in enumerate(pairs):
        prompt, chosen, rejected = encoded[3 * number : 3 * number + 3]
        length = min(_common_prefix(prompt, chosen), _common_prefix(prompt, rejected))
        if not length or length == len(chosen) or length == len(rejected):
            what = "an answer" if length else "a prompt"
            raise UserError(f"{pair.place} has {what} without tokens; leave the line out")
        yield chosen[:length], chosen[length:], rejected[length:]


def _texts(pair: Pair, tokenizer: PreTrainedTokenizerFast) -> tuple[str, str, str]:
    """The prompt alone, and with each of its answers, up to where the tokenizer ends a text."""
    if isinstance(pair.prompt, str):
        end = tokenizer.eos_token
        answers = [str(answer) for answer in (pair.chosen, pair.rejected)]
        ended = [answer if answer.endswith(end) else answer + end for answer in answers]
        return pair.prompt, pair.prompt + ended[0], pair.prompt + ended[1]
    assert not isinstance(pair.chosen, str) and not isinstance(pair.rejected, str)
    prompt = Conversation(pair.place, pair.prompt)
    chosen = Conversation(pair.place, [*pair.prompt, *pair.chosen])
    rejected = Conversation(pair.place, [*pair.prompt, *pair.rejected])
    return (
        render(tokenizer, prompt, add_generation_prompt=True),
        render(tokenizer, chosen),
        render(tokenizer, rejected),
    )
