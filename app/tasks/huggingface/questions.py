"""Extractive question answering: the span of a context that answers a question (SQuAD).

The model gives each token a logit to be the answer's first and one to be its last, and the loss is
the mean of the two cross entropies over the tokens of a window (spans.py). Where a window does not
have the answer, the first token is the target of both (SQuAD 2: Rajpurkar et al. 2018, 1806.03822).

    training      a sample is a window                     the loss is a mean over windows
    evaluation    a sample is a question with its windows  every figure is a mean over questions

Exact match and F1 are those of SQuAD: of answers without case, punctuation and articles, against
the best of the right ones, F1 over their words (Rajpurkar et al. 2016, 1606.05250).
"""

from __future__ import annotations

import hashlib
import re
import string
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.files import cached, identity
from app.data.open_text import json_rows
from app.data.order import held_out, hold_out
from app.data.sets import document
from app.data.text import find_files
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.huggingface.conversations import IGNORED
from app.tasks.huggingface.inputs import QuestionsInput
from app.tasks.huggingface.kind import Kind, Settings, vocabulary_keys
from app.tasks.huggingface.model import ModelSource
from app.tasks.huggingface.spans import BestSpans, best_spans, windows_of
from app.tasks.huggingface.tokenizer import (
    LENGTH_MULTIPLE,
    accepted,
    encoder_tokenizer,
    marks_of,
)
from app.tasks.parts import whole_number

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

DEFAULT_EVAL_FRACTION = 0.1
DEFAULT_STRIDE = 128
READ_AT_ONCE = 1000  # questions that are tokenised in one call
ARTICLES = re.compile(r"\b(a|an|the)\b")
WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)

Inputs = dict[str, Tensor]
"""`input_ids`, `attention_mask` and `token_type_ids`, (N, W, T) each: W windows of N questions."""
Targets = dict[str, Tensor]
"""`positions` (N, W, 2), of the answer's first and last token, IGNORED in windows that are padding;
`is_context` (N, W, T); and `window` (N,), the number of the first window of each question."""
QuestionBatch = tuple[Inputs, Targets]


@dataclass(frozen=True)
class Question:
    """A question about a context.

    Args:
        place: Its file and line, for messages to people.
        question: The question.
        context: Where the answer is.
        answers: The right answers; none if the context does not have one.
        begin: Where the first of them begins in the context, in characters.
    """

    place: str
    question: str
    context: str
    answers: list[str]
    begin: int


class QuestionAnswering(Kind):
    """The span of a context that answers a question."""

    name = "question_answering"
    model_class = "AutoModelForQuestionAnswering"
    table = "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"
    options = ("tokenizer", "sequence_length", "stride")
    default_length = 384
    adapter_type = "QUESTION_ANS"
    may_have_new_head = True

    def __init__(self, settings: Settings, *, stride: int | None = None) -> None:
        longest = settings.sequence_length
        self.tokenizer = settings.tokenizer
        self.longest = longest
        if stride is None:
            stride = min(DEFAULT_STRIDE, longest // 4)
        self.stride = whole_number("stride", stride, at_least=0)
        files = find_files(settings.data)
        self.questions = [question for file in files for question in _read(file)]
        if len(self.questions) < 2:
            raise UserError(
                f"{files[0]} has {len(self.questions)} questions; at least two are needed"
            )
        self.may_lack_answer = any(not question.answers for question in self.questions)
        made_from = (
            identity(*files),
            settings.tokenizer.backend_tokenizer.to_str(),
            longest,
            self.stride,
        )
        key = hashlib.sha256(repr(made_from).encode()).hexdigest()[:16]

        def write(folder: Path) -> None:
            folder.mkdir()
            _write_windows(
                self.questions,
                folder,
                tokenizer=settings.tokenizer,
                longest=longest,
                stride=self.stride,
            )

        self.windows = Windows(
            cached(f"questions-{key}", write),
            longest=longest,
            padding=settings.tokenizer.pad_token_id,
        )
        count = held_out(len(self.questions), settings.eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(self.questions), count)
        each = [[window] for question in train_index for window in self.windows.of(int(question))]
        self._train = WindowSamples(self.windows, each)
        together = [self.windows.of(int(question)) for question in eval_index]
        self._eval = WindowSamples(self.windows, together) if count else None
        self.config_keys = vocabulary_keys(settings, marks_of(settings.tokenizer))
        self.config_keys["num_labels"] = 2  # the start and the end
        self._taken = ["input_ids", "attention_mask"]

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with the marks of an encoder."""
        return encoder_tokenizer(source, path)

    @classmethod
    def made_up(cls, words: Sequence[str], args: Mapping[str, Any], *, classes: int) -> Any:
        """A question about a long context."""
        answers = {"text": [words[0]], "answer_start": [0]}
        return {"question": "?", "context": " ".join(words), "answers": answers}

    def prepare(self, structure: Any, *, attends_fully: bool) -> None:
        """Find out whether the model tells a question from its context by types of tokens."""
        names = ["input_ids", "attention_mask"]
        if getattr(structure.config, "type_vocab_size", 2) > 1:
            names.append("token_type_ids")
        self._taken = accepted(names, structure)
        # What the exported tokenizer gives is what the model was trained with.
        self.tokenizer.model_input_names = list(self._taken)
        self.tokenizer.init_kwargs["model_input_names"] = list(self._taken)

    def arguments(self, inputs: Inputs) -> dict[str, Any]:
        """The model's arguments: it takes windows one by one."""
        rows = {name: inputs[name].flatten(0, -2) for name in self._taken}
        return {**rows, **self.keywords}

    def answer(self, output: Any) -> Tensor:
        """The logits of the start and the end, (windows, T, 2)."""
        return torch.stack([output.start_logits, output.end_logits], -1)

    def loss(self, model: nn.Module, batch: QuestionBatch) -> Tensor:
        """The mean loss of the questions; that of a question is the mean of its windows'."""
        inputs, targets = batch
        return _loss(model(inputs), inputs["attention_mask"], targets["positions"])

    def metrics(self, model: nn.Module, batch: QuestionBatch) -> dict[str, Tensor]:
        """The loss, and how well the answers agree with the right ones."""
        inputs, targets = batch
        logits = model(inputs)
        is_context_NWT = targets["is_context"]
        logits_NWT2 = logits.float().view(*is_context_NWT.shape, 2)
        spans = best_spans(logits_NWT2, is_context_NWT)
        scores = [
            _scores(answer, question.answers)
            for question, answer in self._answers(spans, targets["window"])
        ]
        exact_N, f1_N = torch.tensor(scores, device=logits.device).unbind(1)
        return {
            "loss": _loss(logits, inputs["attention_mask"], targets["positions"]),
            "exact_match": exact_N.mean(),
            "f1": f1_N.mean(),
        }

    def _answers(self, spans: BestSpans, first_window_N: Tensor) -> Iterator[tuple[Question, str]]:
        """Each question and the text of its span; "" where no answer is likelier, if there may be
        none.
        """
        window_N = first_window_N + spans.window
        columns = (window_N, spans.first, spans.last, spans.margin)
        for window, first, last, margin in zip(*(each.tolist() for each in columns), strict=True):
            question = self.questions[self.windows.question(window)]
            begin, end = self.windows.characters(window, first, last)
            is_empty = self.may_lack_answer and margin < 0
            yield question, "" if is_empty else question.context[begin:end]

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Tables of questions and contexts."""
        return QuestionsInput(
            tokenizer=self.tokenizer,
            longest=self.longest,
            stride=self.stride,
            may_lack_answer=self.may_lack_answer,
            names=list(self._taken),
            keywords=dict(self.keywords),
        )


def _loss(logits_RT2: Tensor, mask_NWT: Tensor, positions_NW2: Tensor) -> Tensor:
    """The mean over questions of the mean over their windows.

    Padding can be no answer: otherwise the loss would depend on how the batch is divided.

    Args:
        logits_RT2: Of the start and the end, for the windows of all questions.
        mask_NWT: 0 for padding.
        positions_NW2: The answers; IGNORED in windows that are padding.
    """
    is_padding_RT = mask_NWT.flatten(0, 1) == 0
    losses_R2 = F.cross_entropy(
        logits_RT2.float().masked_fill(is_padding_RT[..., None], float("-inf")),
        positions_NW2.flatten(0, 1),
        ignore_index=IGNORED,
        reduction="none",
    )
    losses_NW = losses_R2.mean(-1).view(positions_NW2.shape[:2])
    windows_N = (positions_NW2[..., 0] != IGNORED).sum(1)
    return (losses_NW.sum(1) / windows_N.clamp(min=1)).mean()


# --- how well answers agree -----------------------------------------------------------------------


def _scores(answer: str, right: Sequence[str]) -> tuple[float, float]:
    """Exact match and F1 of an answer, against the best of the right ones."""
    # Where there is no answer, "" is right.
    pairs = [_compare(answer, each) for each in right or [""]]
    return max(exact for exact, _ in pairs), max(f1 for _, f1 in pairs)


def _compare(answer: str, right: str) -> tuple[float, float]:
    words = _words(answer)
    right_words = _words(right)
    exact = float(words == right_words)
    shared = sum((Counter(words) & Counter(right_words)).values())
    if not words or not right_words or not shared:
        return exact, exact
    return exact, 2 * shared / (len(words) + len(right_words))


def _words(text: str) -> list[str]:
    """The words of a text, as SQuAD compares them."""
    return ARTICLES.sub(" ", text.lower().translate(WITHOUT_PUNCTUATION)).split()


# --- samples --------------------------------------------------------------------------------------

TOKENS = "tokens.npy"
INDEX = "index.npy"
Int32s = npt.NDArray[np.int32]


class Windows:
    """The windows of questions, in the cache.

    Args:
        folder: What `_write_windows` has written.
        longest: Tokens of a window at most.
        padding: The token after the end of a window.
    """

    def __init__(self, folder: Path, *, longest: int, padding: int) -> None:
        # (4, tokens): id, type, and where in the context it begins and ends.
        self._tokens = np.load(folder / TOKENS, mmap_mode="r")
        # (windows, 5): first token, length, question, and the answer's first and last token.
        self._index = np.load(folder / INDEX)
        self._longest = longest
        self._padding = padding
        questions = self._index[:, 2]
        self._begins = np.searchsorted(questions, np.arange(int(questions[-1]) + 2))

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The tokens of each window."""
        return self._index[:, 1]

    def of(self, question: int) -> list[int]:
        """The numbers of the windows of a question."""
        return list(range(int(self._begins[question]), int(self._begins[question + 1])))

    def question(self, window: int) -> int:
        """The number of the question of a window."""
        return int(self._index[window, 2])

    def characters(self, window: int, first: int, last: int) -> tuple[int, int]:
        """Where in the context a span of tokens begins and ends."""
        begin = self._index[window, 0]
        return int(self._tokens[2, begin + first]), int(self._tokens[3, begin + last])

    def batch(self, samples: Sequence[Sequence[int]]) -> QuestionBatch:
        """A batch of samples, each of which is one window or more of one question."""
        count = max(len(windows) for windows in samples)
        longest = max(int(self.lengths[window]) for windows in samples for window in windows)
        length = min(-(-longest // LENGTH_MULTIPLE) * LENGTH_MULTIPLE, self._longest)
        shape = (len(samples), count, length)
        ids = np.full(shape, self._padding, np.int64)
        mask = np.zeros(shape, np.int64)
        mask[..., 0] = 1  # windows that are padding attend to something
        types = np.zeros(shape, np.int64)
        is_context = np.zeros(shape, bool)
        positions = np.full((*shape[:2], 2), IGNORED, np.int64)
        for row, windows in enumerate(samples):
            for column, window in enumerate(windows):
                begin, size, _, first, last = self._index[window]
                tokens = self._tokens[:, begin : begin + size]
                ids[row, column, :size] = tokens[0]
                mask[row, column, :size] = 1
                types[row, column, :size] = tokens[1]
                is_context[row, column, :size] = tokens[2] >= 0
                positions[row, column] = first, last
        first_windows = np.array([windows[0] for windows in samples], np.int64)
        inputs = {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}
        targets = {"positions": positions, "is_context": is_context, "window": first_windows}
        return (
            {name: torch.from_numpy(array) for name, array in inputs.items()},
            {name: torch.from_numpy(array) for name, array in targets.items()},
        )


class WindowSamples(Dataset[Any]):
    """Windows as samples. A batch is as long as its longest.

    Args:
        windows: All windows.
        samples: The numbers of the windows of each sample.

    Attributes:
        longest_sample: The number of the sample with the most tokens.
    """

    def __init__(self, windows: Windows, samples: list[list[int]]) -> None:
        self.windows = windows
        self.samples = samples
        sizes = [len(each) * int(windows.lengths[each].max()) for each in samples]
        self.longest_sample = int(np.argmax(sizes)) if sizes else 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> QuestionBatch:
        inputs, targets = self.__getitems__([index])
        return (
            {name: value[0] for name, value in inputs.items()},
            {name: value[0] for name, value in targets.items()},
        )

    def __getitems__(self, indices: Sequence[int]) -> QuestionBatch:
        return self.windows.batch([self.samples[index] for index in indices])


def _write_windows(
    questions: Sequence[Question],
    folder: Path,
    *,
    tokenizer: PreTrainedTokenizerFast,
    longest: int,
    stride: int,
) -> None:
    """Write questions as windows of tokens.

    Args:
        questions: The questions.
        folder: Gets the files that Windows reads.
        tokenizer: The tokenizer.
        longest: Tokens of a window at most.
        stride: Tokens of the context that neighbouring windows share.

    Raises:
        UserError: A question leaves no room for its context.
    """
    marks = tokenizer.num_special_tokens_to_add(pair=True)
    tokens: list[Int32s] = []
    index: list[tuple[int, int, int, int, int]] = []
    begin = 0
    for offset in range(0, len(questions), READ_AT_ONCE):
        some = questions[offset : offset + READ_AT_ONCE]
        texts = [question.question for question in some]
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"]
        for question, ids in zip(some, encoded, strict=True):
            if longest - marks - len(ids) <= stride:
                raise UserError(
                    f"{question.place} has a question of {len(ids)} tokens, which leaves too "
                    f"little room for its context: write a task_args.sequence_length of "
                    f"{len(ids) + marks + stride + 1} or more (it is {longest})"
                )
        contexts = [question.context for question in some]
        for window in windows_of(tokenizer, texts, contexts, longest=longest, stride=stride):
            question = some[window.question]
            begins, ends = np.array(window.spans, np.int32).T
            if begins.max() < 0:
                raise UserError(f"{question.place} has a context without tokens; leave it out")
            tokens.append(np.stack([window.ids, window.types, begins, ends]).astype(np.int32))
            first, last = _place_of_answer(question, begins, ends)
            index.append((begin, len(window.ids), offset + window.question, first, last))
            begin += len(window.ids)
    np.save(folder / TOKENS, np.concatenate(tokens, axis=1))
    np.save(folder / INDEX, np.array(index, np.int64))


def _place_of_answer(question: Question, begins: Int32s, ends: Int32s) -> tuple[int, int]:
    """The first and the last token of a question's answer in a window; (0, 0) if it is not there.

    Args:
        question: The question.
        begins: Where in the context each token begins; -1 outside of it.
        ends: Where it ends.
    """
    if not question.answers:
        return 0, 0
    answer_end = question.begin + len(question.answers[0])
    is_inside = (begins >= 0) & (ends > question.begin) & (begins < answer_end)
    places = np.flatnonzero(is_inside)
    is_whole = (
        len(places) and begins[places[0]] <= question.begin and ends[places[-1]] >= answer_end
    )
    return (int(places[0]), int(places[-1])) if is_whole else (0, 0)


# --- reading --------------------------------------------------------------------------------------


def _read(file: Path) -> Iterator[Question]:
    """The questions of a file of JSON lines, or of SQuAD's own JSON.

    Raises:
        UserError: A line is not a question about a context.
    """
    for place, row in json_rows(file):
        if isinstance(row, dict) and isinstance(row.get("data"), list):
            yield from _read_articles(row["data"], file)
        else:
            yield _question(row, place)


def _read_articles(articles: Sequence[Any], file: Path) -> Iterator[Question]:
    """The questions of articles in SQuAD's own JSON: data → paragraphs → qas."""
    for article in articles:
        for paragraph in article.get("paragraphs", []) if isinstance(article, dict) else [None]:
            if not isinstance(paragraph, dict) or not isinstance(paragraph.get("qas"), list):
                raise UserError(
                    f"{file} has `data` without paragraphs of `qas`, as SQuAD has; "
                    "write JSON lines, or SQuAD's own form"
                )
            for each in paragraph["qas"]:
                place = f"{file}, question {each.get('id')}" if isinstance(each, dict) else file
                row = {"context": paragraph.get("context"), **each}
                yield _question(row, str(place))


def _question(row: Any, place: str) -> Question:
    """The question of a line.

    Args:
        row: A JSON value.
        place: Its file and line.

    Raises:
        UserError: It is not a question, or its answer is not where it says.
    """
    not_a_question = UserError(
        f"{place} is not a question with its answer; write lines such as "
        '{"question": "…", "context": "…", "answers": {"text": ["…"], "answer_start": [0]}}'
    )
    if not isinstance(row, dict) or "answers" not in row:
        raise not_a_question
    question, context = row.get("question"), row.get("context")
    if not isinstance(question, str) or not isinstance(context, str):
        raise not_a_question
    document(question, place, "question")
    document(context, place, "context")
    if not context.strip():
        raise UserError(f"{place} has an empty context; leave the line out")
    answers = row["answers"]
    if isinstance(answers, dict):
        texts, begins = answers.get("text"), answers.get("answer_start")
        if not isinstance(texts, list) or not isinstance(begins, list):
            raise not_a_question
        if len(texts) != len(begins):
            raise not_a_question
        answers = [
            {"text": text, "answer_start": begin} for text, begin in zip(texts, begins, strict=True)
        ]
    if not isinstance(answers, list):
        raise not_a_question
    for answer in answers:
        text = answer.get("text") if isinstance(answer, dict) else None
        begin = answer.get("answer_start") if isinstance(answer, dict) else None
        if not isinstance(text, str) or not isinstance(begin, int) or not text:
            raise not_a_question
        if begin < 0 or context[begin : begin + len(text)] != text:
            raise UserError(
                f"{place}: the answer {text[:40]!r} is not at character {begin} of the context; "
                "write as answer_start how many characters are before it"
            )
    return Question(
        place=place,
        question=question.strip(),
        context=context,
        answers=[answer["text"] for answer in answers],
        begin=answers[0]["answer_start"] if answers else 0,
    )
