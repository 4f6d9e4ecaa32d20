"""Token classification: a class for each word of a sentence, such as the names in it.

A word may be several tokens. Its class is learnt and read at its first token, as the conventions of
CoNLL's tasks have it (Devlin et al. 2018, 1810.04805, section 5.3). The loss and the accuracy are
means over words.

Where the classes are `B-X`, `I-X` and `O`, neighbouring words make an entity of type X (Tjong Kim
Sang and De Meulder 2003, cs/0306050). An entity that is found is right if its type, its first and
its last word are, and

    precision = right / found      recall = right / there      f1 = 2·right / (found + there)

are those of conlleval: ratios of sums over all the held-out data, not means of ratios.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.open_text import json_rows, open_text
from app.data.order import Indices, held_out, hold_out
from app.data.text import find_files
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.huggingface.conversations import IGNORED, AnswerBatch, Answers
from app.tasks.huggingface.inputs import WordsInput, first_tokens
from app.tasks.huggingface.kind import Kind, Settings, label_keys, vocabulary_keys
from app.tasks.huggingface.masked import token_metrics
from app.tasks.huggingface.model import ModelSource
from app.tasks.huggingface.tokenizer import (
    encoder_tokenizer,
    longest_text,
    marks_of,
    padded_encoding,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

DEFAULT_EVAL_FRACTION = 0.1
OUTSIDE = "O"
JSON_SUFFIXES = (".json", ".jsonl", ".ndjson")
Sentence = tuple[list[str], list[str]]
"""The words of a sentence, and the label of each."""


class TokenClassification(Kind, Answers):
    """The class of each word."""

    name = "token_classification"
    model_class = "AutoModelForTokenClassification"
    table = "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"
    options = ("tokenizer", "sequence_length", "text", "label")
    default_length = 512
    adapter_type = "TOKEN_CLS"
    may_have_new_head = True
    has_classes = True

    def __init__(self, settings: Settings, *, text: str = "tokens", label: str = "labels") -> None:
        files = find_files(settings.data)
        sentences = [sentence for file in files for sentence in _read(file, text, label)]
        if len(sentences) < 2:
            raise UserError(f"{files[0]} has {len(sentences)} sentences; at least two are needed")
        self.tokenizer = settings.tokenizer
        self.classes = _classes(sentences)
        self.entities = Entities(self.classes)
        count = held_out(len(sentences), settings.eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(sentences), count)

        def part(indices: Indices) -> Sentences:
            return Sentences(
                [sentences[index] for index in indices],
                self.classes,
                tokenizer=settings.tokenizer,
                longest=settings.sequence_length,
            )

        self._train = part(train_index)
        self._eval = part(eval_index) if count else None
        self.config_keys = {
            **vocabulary_keys(settings, marks_of(settings.tokenizer)),
            **label_keys(self.classes),
        }

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with the marks of an encoder."""
        return encoder_tokenizer(source, path)

    @classmethod
    def made_up(cls, words: Sequence[str], args: Mapping[str, Any], *, classes: int) -> Any:
        """A long sentence whose words have all classes."""
        labels = [number % classes for number in range(len(words))]
        return {args.get("text") or "tokens": list(words), args.get("label") or "labels": labels}

    def metrics(self, model: nn.Module, batch: AnswerBatch) -> dict[str, Tensor]:
        """The mean cross entropy, the accuracy, and the numbers of entities for each word."""
        inputs, targets_BT = batch
        logits_BTC = model(inputs)
        means = token_metrics(logits_BTC, targets_BT)
        if self.entities.types:
            words = self.items(batch).clamp(min=1)
            counts = self.entities.count(logits_BTC.argmax(-1), targets_BT)
            means |= {f"_{name}": count / words for name, count in counts.items()}
        return means

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Precision, recall and F1 of entities."""
        if "_right" not in means:
            return {}
        right, predicted, there = (means[f"_{name}"] for name in ("right", "found", "there"))
        return {
            "precision": right / predicted if predicted else 0.0,
            "recall": right / there if there else 0.0,
            "f1": 2 * right / (predicted + there) if predicted + there else 0.0,
        }

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Texts whose words get a class."""
        return WordsInput(
            tokenizer=self.tokenizer,
            longest=self._train.longest,
            classes=list(self.classes),
            keywords=dict(self.keywords),
        )


# --- entities -------------------------------------------------------------------------------------


class Entities:
    """Counts the entities that labels such as `B-PER`, `I-PER` and `O` make.

    An entity begins at a `B-X`, and at an `I-X` that follows another type or none.

    Args:
        classes: The names of the classes.

    Attributes:
        types: How many types of entities there are; 0 if the classes are not of this form.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        names = [name.partition("-")[2] for name in classes]
        is_of_form = all(
            name == OUTSIDE or (name[:2] in ("B-", "I-") and len(name) > 2) for name in classes
        )
        types = sorted({name for name in names if name}) if is_of_form else []
        self.types = len(types)
        # Type 0 is outside of all entities.
        numbers = [1 + types.index(name) if name and types else 0 for name in names]
        self._type_of_class = torch.tensor(numbers)
        self._begins = torch.tensor([name.startswith("B-") for name in classes])

    def count(self, found_BT: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
        """How many entities are found, there, and both: 0-dimensional tensors by these names.

        Args:
            found_BT: The model's classes.
            targets_BT: The right ones; IGNORED where no word begins.
        """
        is_word_BT = targets_BT != IGNORED
        found_begin_BT, found_type_BT, found_end_BT = self._spans(found_BT, is_word_BT)
        begin_BT, type_BT, end_BT = self._spans(targets_BT.clamp(min=0), is_word_BT)
        is_right_BT = (
            found_begin_BT & begin_BT & (found_type_BT == type_BT) & (found_end_BT == end_BT)
        )
        return {"right": is_right_BT.sum(), "found": found_begin_BT.sum(), "there": begin_BT.sum()}

    def _spans(self, classes_BT: Tensor, is_word_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Where entities begin, their types, and where the entity of each token ends."""
        length = classes_BT.size(1)
        place_T = torch.arange(length, device=classes_BT.device)
        type_BT = self._type_of_class.to(classes_BT.device)[classes_BT]
        type_BT = torch.where(is_word_BT, type_BT, 0)
        # The word before each token: the last place of a word among the tokens before it.
        last_word_BT = torch.where(is_word_BT, place_T, -1).cummax(1).values
        before_BT = nn.functional.pad(last_word_BT[:, :-1], (1, 0), value=-1)
        type_before_BT = type_BT.gather(1, before_BT.clamp(min=0))
        type_before_BT = torch.where(before_BT >= 0, type_before_BT, 0)
        has_begin_mark_BT = self._begins.to(classes_BT.device)[classes_BT] & is_word_BT
        is_new_BT = is_word_BT & (has_begin_mark_BT | (type_BT != type_before_BT))
        begins_BT = is_new_BT & (type_BT > 0)
        # It ends before the next token at which something new begins: itself not counted.
        new_place_BT = torch.where(is_new_BT, place_T, length)
        next_new_BT = new_place_BT.flip(1).cummin(1).values.flip(1)
        end_BT = nn.functional.pad(next_new_BT[:, 1:], (0, 1), value=length)
        return begins_BT, type_BT, end_BT


# --- samples --------------------------------------------------------------------------------------


class Sentences(Dataset[Any]):
    """Sentences as samples, tokenised when they are fetched. A batch is as long as its longest.

    Args:
        sentences: The words and labels of each.
        classes: The names of the classes.
        tokenizer: The library's tokenizer, with padding.
        longest: How many tokens of a sentence are used.

    Attributes:
        longest_sample: The number of the sentence with the most tokens.
    """

    def __init__(
        self,
        sentences: list[Sentence],
        classes: Sequence[str],
        *,
        tokenizer: PreTrainedTokenizerFast,
        longest: int,
    ) -> None:
        self.sentences = sentences
        self.numbers = {name: number for number, name in enumerate(classes)}
        self.tokenizer = tokenizer
        self.longest = longest
        texts = [" ".join(words) for words, _ in sentences]
        self.longest_sample = longest_text(texts, tokenizer, limit=longest)

    def __len__(self) -> int:
        return len(self.sentences)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets_BT = self.__getitems__([index])
        return {name: value[0] for name, value in inputs.items()}, targets_BT[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[dict[str, Tensor], Tensor]:
        chosen = [self.sentences[index] for index in indices]
        texts = [" ".join(words) for words, _ in chosen]
        encoded = padded_encoding(
            self.tokenizer, texts, longest=self.longest, return_offsets_mapping=True
        )
        inputs = {name: encoded[name] for name in ("input_ids", "attention_mask")}
        targets_BT = torch.full_like(inputs["input_ids"], IGNORED)
        spans = encoded["offset_mapping"].tolist()
        for targets_T, spans_T, (words, labels) in zip(targets_BT, spans, chosen, strict=True):
            for token, label in zip(first_tokens(spans_T, words), labels, strict=True):
                if token is not None:
                    targets_T[token] = self.numbers[label]
        return inputs, targets_BT


# --- reading --------------------------------------------------------------------------------------


def _classes(sentences: Sequence[Sentence]) -> list[str]:
    """The labels that occur: numbers in their order, names by the alphabet, `O` first."""
    names = {label for _, labels in sentences for label in labels}
    if all(name.isdecimal() for name in names):
        return [str(number) for number in range(max(map(int, names)) + 1)]
    return sorted(names, key=lambda name: (name != OUTSIDE, name))


def _read(file: Path, text: str, label: str) -> Iterator[Sentence]:
    """The sentences of a file of JSON lines, or of one in CoNLL's form.

    Args:
        file: The file.
        text: The key of the words.
        label: The key of their labels.

    Raises:
        UserError: A line is not a sentence with a label for each word.
    """
    if not any(suffix.lower() in JSON_SUFFIXES for suffix in file.suffixes):
        yield from _read_columns(file)
        return
    for place, row in json_rows(file):
        words = row.get(text) if isinstance(row, dict) else None
        labels = row.get(label) if isinstance(row, dict) else None
        if not isinstance(words, list) or not isinstance(labels, list):
            raise UserError(
                f"{place} is not a sentence with labels; write lines such as "
                f'{{"{text}": ["Ada", "sleeps"], "{label}": ["B-PER", "O"]}}, '
                "or other keys as task_args.text and task_args.label"
            )
        if len(words) != len(labels) or not words:
            raise UserError(
                f"{place} has {len(words)} words and {len(labels)} labels; "
                "write one label for each word, and at least one"
            )
        if not all(isinstance(word, str) and word.strip() for word in words):
            raise UserError(f"{place} has a word that is not text; write {text} as a list of texts")
        if not all(_is_label(each) for each in labels):
            raise UserError(
                f"{place} has a label that is neither a text nor a whole number; "
                f"write {label} as a list of one or the other"
            )
        yield words, [str(each) for each in labels]


def _is_label(value: Any) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return is_number or (isinstance(value, str) and bool(value))


def _read_columns(file: Path) -> Iterator[Sentence]:
    """The sentences of a file in CoNLL's form.

    A line is a word and, in its last column, the word's label; a blank line ends a sentence.

    Raises:
        UserError: A line has only one column.
    """
    words: list[str] = []
    labels: list[str] = []
    with open_text(file) as lines:
        for number, line in enumerate(lines, 1):
            columns = line.split()
            if not columns or columns[0] == "-DOCSTART-":
                if words:
                    yield words, labels
                words, labels = [], []
                continue
            if len(columns) < 2:
                raise UserError(
                    f"{file}:{number} has a word without a label; write a word and its label on "
                    "each line and a blank line between sentences, or a .jsonl file"
                )
            words.append(columns[0])
            labels.append(columns[-1])
    if words:
        yield words, labels
