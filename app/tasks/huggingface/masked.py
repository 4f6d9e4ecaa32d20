"""Masked language models (BERT, Devlin et al. 2018, 1810.04805; ModernBERT, 2412.13663).

Of each window of a running text some tokens are hidden, and the model says what they were:

    chosen with probability p, of which     8 in 10 become the mask token
                                            1 in 10 become any token
                                            1 in 10 stay as they are

The loss and the accuracy are means over the chosen tokens. Which tokens are chosen is a function of
the sample's position in the run, so that it is another choice in each epoch, and the same on every
layout and after a resume. Held-out text is always masked in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.order import mix64
from app.data.text import SUFFIXES, TokenWindows, find_files
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.huggingface.conversations import IGNORED, AnswerBatch, Answers
from app.tasks.huggingface.inputs import FillInput
from app.tasks.huggingface.kind import Kind, Settings, vocabulary_keys
from app.tasks.huggingface.model import ModelSource
from app.tasks.huggingface.tokenizer import encoder_tokenizer, marks_of
from app.tasks.language import LanguageModelling

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast

DEFAULT_FRACTION = 0.15
BECOME_MASKS = 0.8
BECOME_ANY = 0.1


class MaskedLM(Kind, Answers):
    """The hidden tokens of running text."""

    name = "masked_lm"
    model_class = "AutoModelForMaskedLM"
    table = "MODEL_FOR_MASKED_LM_MAPPING_NAMES"
    options = ("tokenizer", "token_dtype", "sequence_length", "mask_fraction")
    default_length = 512
    is_guessed = False  # people fine-tune masked language models for other kinds

    def __init__(
        self,
        settings: Settings,
        *,
        token_dtype: str | None = None,
        mask_fraction: float = DEFAULT_FRACTION,
    ) -> None:
        if not isinstance(mask_fraction, (int, float)) or not 0 < mask_fraction < 1:
            raise UserError(
                f"task_args.mask_fraction is {mask_fraction!r}; it must be between 0 and 1"
            )
        tokenizer = settings.tokenizer
        if tokenizer.mask_token_id is None:
            raise UserError(
                f"task_args.tokenizer: {settings.tokenizer_path} has no mask token such as [MASK], "
                "which masked_lm needs; write the tokenizer of a masked language model"
            )
        self.tokenizer = tokenizer
        self.sequence_length = settings.sequence_length
        around = sum(len(marks) for marks in _marks_around(tokenizer))
        if settings.sequence_length <= around:
            raise UserError(
                f"task_args.sequence_length is {settings.sequence_length}, of which marks such as "
                f"[CLS] take {around}; write more"
            )
        has_token_files = any(path.suffix in SUFFIXES for path in find_files(settings.data))
        windows = LanguageModelling(
            data=settings.data,
            tokenizer=settings.tokenizer_path,
            token_dtype="uint16" if token_dtype is None else token_dtype,
            vocab_size=len(tokenizer) if has_token_files else None,
            sequence_length=settings.sequence_length - around,
            eval_samples=settings.eval_samples,
            # Its model is not used.
            d_model=2,
            n_layers=1,
            n_heads=1,
        )

        def masked(part: Any) -> MaskedWindows:
            return MaskedWindows(part, tokenizer=tokenizer, fraction=mask_fraction)

        self._train = masked(windows.train_data())
        held_out = windows.eval_data()
        self._eval = None if held_out is None else masked(held_out)
        self.config_keys = vocabulary_keys(settings, marks_of(tokenizer))

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with the marks of an encoder."""
        return encoder_tokenizer(source, path)

    def metrics(self, model: nn.Module, batch: AnswerBatch) -> dict[str, Tensor]:
        """The mean cross entropy of the hidden tokens, and how many are right."""
        inputs, targets_BT = batch
        return token_metrics(model(inputs), targets_BT)

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Texts with masks to fill."""
        return FillInput(
            tokenizer=self.tokenizer,
            longest=self.sequence_length,
            keywords=dict(self.keywords),
        )


def token_metrics(logits_BTV: Tensor, targets_BT: Tensor) -> dict[str, Tensor]:
    """The mean cross entropy and the accuracy of the targets other than IGNORED.

    Args:
        logits_BTV: The model's answer.
        targets_BT: What is right.
    """
    logits = logits_BTV.flatten(0, 1).float()
    targets = targets_BT.flatten()
    total = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    count = (targets != IGNORED).sum().clamp(min=1)
    is_right = logits.argmax(-1) == targets
    return {"loss": total / count, "accuracy": is_right.sum() / count}


class MaskedWindows(Dataset[Any]):
    """Windows of text between the tokenizer's marks, of which tokens are hidden.

    Args:
        windows: The text.
        tokenizer: The library's tokenizer, with a mask token.
        fraction: The probability that a token is chosen.
    """

    def __init__(
        self, windows: TokenWindows, *, tokenizer: PreTrainedTokenizerFast, fraction: float
    ) -> None:
        self.windows = windows
        self.fraction = fraction
        self.mask_token = tokenizer.mask_token_id
        self.vocabulary = len(tokenizer)
        self.special = np.array(tokenizer.all_special_ids, np.int64)
        self._before, self._after = _marks_around(tokenizer)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        inputs, targets_BT = self.batch_at([index], [index])
        return {name: value[0] for name, value in inputs.items()}, targets_BT[0]

    def batch_at(
        self, indices: Sequence[int], positions: Sequence[int]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """A batch of samples.

        Args:
            indices: The numbers of the samples.
            positions: Their positions in the run's stream, which decide what is hidden.
        """
        text_BT, _ = self.windows.__getitems__(indices)
        count = len(indices)
        tokens_BT = np.concatenate(
            [
                np.tile(np.array(self._before, np.int64), (count, 1)),
                text_BT.numpy(),
                np.tile(np.array(self._after, np.int64), (count, 1)),
            ],
            axis=1,
        )
        chance_BT, action_BT, any_BT = _random(np.asarray(positions, np.uint64), tokens_BT.shape[1])
        is_chosen = (chance_BT < self.fraction) & ~np.isin(tokens_BT, self.special)
        targets_BT = np.where(is_chosen, tokens_BT, IGNORED)
        becomes_mask = is_chosen & (action_BT < BECOME_MASKS)
        becomes_any = is_chosen & ~becomes_mask & (action_BT < BECOME_MASKS + BECOME_ANY)
        any_token_BT = (any_BT * self.vocabulary).astype(np.int64)
        seen_BT = np.where(becomes_mask, self.mask_token, tokens_BT)
        seen_BT = np.where(becomes_any, any_token_BT, seen_BT)
        return {"input_ids": torch.from_numpy(seen_BT)}, torch.from_numpy(targets_BT)


def _marks_around(tokenizer: PreTrainedTokenizerFast) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before a text, and those after it."""
    encoded = tokenizer("a", return_special_tokens_mask=True)
    ids = encoded["input_ids"]
    is_text = [not is_mark for is_mark in encoded["special_tokens_mask"]]
    begin = is_text.index(True)
    end = len(ids) - is_text[::-1].index(True)
    return ids[:begin], ids[end:]


def _random(positions_B: npt.NDArray[np.uint64], length: int) -> npt.NDArray[np.float64]:
    """Three numbers from 0 to below 1 for each token, which depend on positions only.

    Args:
        positions_B: The positions of the samples in the run's stream.
        length: The tokens of a sample, T.

    Returns:
        (3, B, T)
    """
    places = np.arange(3 * length, dtype=np.uint64)
    bits = mix64(mix64(positions_B)[:, None] ^ mix64(places)[None])
    numbers = (bits >> np.uint64(11)).astype(np.float64) / 2.0**53  # a float64 has 53 bits
    return numbers.reshape(len(positions_B), 3, length).transpose(1, 0, 2)
