"""Speech to text: connectionist temporal classification (wav2vec2), and encoders with decoders.

CTC (Graves et al. 2006, https://www.cs.toronto.edu/~graves/icml_2006.pdf): the model gives logits
of characters and of a blank for each frame of a recording, and the loss is minus the logarithm of
the summed probability of all alignments of the text with the frames. It is divided by the text's
length, and the mean is taken over recordings. The predicted text is the likeliest character of each
frame, with repetitions merged and then blanks removed.

    word error rate = wrong words / words      by the least number of words to change, add or remove

and the character error rate alike: ratios of sums over all the held-out data.

Models with a decoder (Whisper, Radford et al. 2022, 2212.04356) learn the next token of the text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.files import cached
from app.data.order import Indices, held_out, hold_out
from app.data.sound import read_sound, sound_length
from app.errors import UserError
from app.models.prediction import Preprocessor
from app.tasks.huggingface.conversations import IGNORED, AnswerBatch, Answers
from app.tasks.huggingface.inputs import SoundInput, SpectrogramInput, standardised_sound
from app.tasks.huggingface.kind import Kind, Settings, vocabulary_keys
from app.tasks.huggingface.listed import Listed, read_listed, require_texts
from app.tasks.huggingface.masked import token_metrics
from app.tasks.huggingface.model import ModelSource, library
from app.tasks.huggingface.tokenizer import longest_text, pair_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

DEFAULT_EVAL_FRACTION = 0.1
RATE = 16_000
"""Samples a second that these models take."""
EXAMPLE = '{"audio": "clips/1.wav", "text": "what is said"}'
BLANK = "[PAD]"
UNKNOWN = "[UNK]"
SPACE = "|"

SoundBatch = tuple[dict[str, Tensor], dict[str, Tensor]]
"""`input_values` (B, S) and mostly `attention_mask`; and `labels` (B, L), IGNORED after the end of
a text, and `samples` (B,), how many samples of each row the model reads."""


class CTC(Kind):
    """The characters that are said in a recording."""

    name = "ctc"
    model_class = "AutoModelForCTC"
    table = "MODEL_FOR_CTC_MAPPING_NAMES"
    options = ("text",)
    may_have_new_head = True
    reads_files = True

    def __init__(self, settings: Settings, *, text: str = "text") -> None:
        base = settings.base
        kernels = getattr(base, "conv_kernel", None)
        if not kernels or getattr(base, "add_adapter", False):
            raise UserError(
                f"{base.model_type} does not read the samples of a recording by convolutions of "
                "which its configuration says the sizes (conv_kernel), which kind: ctc needs; "
                "write a model such as wav2vec2, hubert or wavlm"
            )
        if getattr(base, "squeeze_factor", 1) != 1:
            raise UserError(f"kind: ctc does not know how {base.model_type} squeezes its frames")
        self._convolutions = list(zip(kernels, base.conv_stride, strict=True))
        recordings = read_listed(settings.data, file_key="audio", text_key=text, example=EXAMPLE)
        require_texts(recordings, text)
        self.tokenizer = _ctc_tokenizer(settings, [each.text for each in recordings])
        lengths = [sound_length(each.path, each.place) for each in recordings]
        for recording, length in zip(recordings, lengths, strict=True):
            self._require_frames(recording, length)
        # Where the first layer normalises over a whole recording, padding would change it, unless
        # every row is padded to one length.
        padded = None if base.feat_extract_norm == "layer" else max(lengths)
        self._has_mask = padded is None
        count = held_out(len(recordings), settings.eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(recordings), count)

        def part(indices: Indices) -> Recordings:
            return Recordings(
                [recordings[index] for index in indices],
                [lengths[index] for index in indices],
                tokenizer=self.tokenizer,
                padded=padded,
            )

        self._train = part(train_index)
        self._eval = part(eval_index) if count else None
        self.config_keys = {
            "vocab_size": len(self.tokenizer),
            "pad_token_id": self.tokenizer.pad_token_id,
            "ctc_loss_reduction": "mean",
            # A layer that one worker skips and another does not would stop both.
            "layerdrop": 0.0,
        }

    def frames(self, samples: Any) -> Any:
        """How many frames the model makes of a number of samples."""
        for kernel, stride in self._convolutions:
            samples = (samples - kernel) // stride + 1
        return samples

    def _require_frames(self, recording: Listed, samples: int) -> None:
        """Check that a recording has enough frames for its text: one more for each repetition."""
        ids = self.tokenizer(recording.text)["input_ids"]
        repeated = sum(one == other for one, other in itertools.pairwise(ids))
        needed = len(ids) + repeated
        frames = self.frames(samples)
        if frames < max(needed, 1):
            raise UserError(
                f"{recording.place}: {recording.path} has {max(frames, 0)} frames of sound for "
                f"{needed} characters; leave the line out, or mend its text"
            )

    def loss(self, model: nn.Module, batch: SoundBatch) -> Tensor:
        """The mean over recordings of the loss for each character."""
        inputs, targets = batch
        return self._loss(model(inputs), targets)

    def _loss(self, logits_BTV: Tensor, targets: dict[str, Tensor]) -> Tensor:
        labels_BL = targets["labels"]
        is_label_BL = labels_BL != IGNORED
        lengths_B = is_label_BL.sum(1)
        losses_B = F.ctc_loss(
            logits_BTV.float().log_softmax(-1).transpose(0, 1),
            labels_BL.clamp(min=0),
            self.frames(targets["samples"]),
            lengths_B,
            blank=self.tokenizer.pad_token_id,
            reduction="none",
        )
        return (losses_B / lengths_B.clamp(min=1)).mean()

    def metrics(self, model: nn.Module, batch: SoundBatch) -> dict[str, Tensor]:
        """The loss, and the numbers of words, characters and errors of a recording."""
        inputs, targets = batch
        logits_BTV = model(inputs)
        counts = []
        read_BT = logits_BTV.argmax(-1).tolist()
        frames_B = self.frames(targets["samples"]).tolist()
        for ids, frames, labels in zip(read_BT, frames_B, targets["labels"].tolist(), strict=True):
            read = self.tokenizer.decode(ids[:frames])
            right_ids = [label for label in labels if label != IGNORED]
            right = self.tokenizer.decode(right_ids, group_tokens=False)
            counts.append(
                (
                    changes(read.split(), right.split()),
                    len(right.split()),
                    changes(read, right),
                    len(right),
                )
            )
        means = torch.tensor(counts, dtype=torch.float64, device=logits_BTV.device).mean(0)
        names = ("_wrong_words", "_words", "_wrong_characters", "_characters")
        return {
            "loss": self._loss(logits_BTV, targets),
            **dict(zip(names, means.unbind(), strict=True)),
        }

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """The word error rate and the character error rate."""
        return {
            "word_error_rate": means["_wrong_words"] / (means["_words"] or 1.0),
            "character_error_rate": means["_wrong_characters"] / (means["_characters"] or 1.0),
        }

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Recordings to read."""
        return SoundInput(
            tokenizer=self.tokenizer,
            has_mask=self._has_mask,
            rate=RATE,
            keywords=dict(self.keywords),
        )

    def write_files(self, folder: Path) -> None:
        """Write how recordings are prepared, as the library's processors read it."""
        extractor = library().Wav2Vec2FeatureExtractor(
            sampling_rate=RATE, do_normalize=True, return_attention_mask=self._has_mask
        )
        extractor.save_pretrained(folder)


def changes(recognized: Sequence[Any], right: Sequence[Any]) -> int:
    """The least number of items to change, add or remove (Levenshtein 1966)."""
    row = list(range(len(right) + 1))
    for number, one in enumerate(recognized, 1):
        diagonal = row[0]
        row[0] = number
        for place, other in enumerate(right, 1):
            best = min(diagonal + (one != other), row[place] + 1, row[place - 1] + 1)
            diagonal = row[place]
            row[place] = best
    return row[-1]


def _ctc_tokenizer(settings: Settings, texts: Sequence[str]) -> Any:
    """The folder's tokenizer of characters, else one of the characters of some texts."""
    tokenizer_class = library().Wav2Vec2CTCTokenizer
    folder = settings.source.folder
    if folder is not None and (folder / "vocab.json").is_file():
        return tokenizer_class.from_pretrained(folder)
    characters = sorted({character for text in texts for character in " ".join(text.split())})
    names = [BLANK, UNKNOWN, SPACE, *(each for each in characters if each not in (" ", SPACE))]
    content = json.dumps({name: number for number, name in enumerate(names)})

    def make(path: Path) -> None:
        path.write_text(content)

    key = hashlib.sha256(content.encode()).hexdigest()[:16]
    return tokenizer_class(
        str(cached(f"characters-{key}.json", make)),
        pad_token=BLANK,
        unk_token=UNKNOWN,
        word_delimiter_token=SPACE,
        bos_token=None,
        eos_token=None,
    )


class SpeechToText(Kind, Answers):
    """The tokens of what is said in a recording, by an encoder and a decoder."""

    name = "speech_seq2seq"
    model_class = "AutoModelForSpeechSeq2Seq"
    table = "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES"
    options = ("tokenizer", "sequence_length", "text")
    default_length = 448
    is_encoder_decoder = True
    reads_files = True

    def __init__(self, settings: Settings, *, text: str = "text") -> None:
        base = settings.base
        if not hasattr(base, "max_source_positions") or not hasattr(base, "num_mel_bins"):
            raise UserError(
                f"{base.model_type} does not read spectrograms of one length, as whisper does, "
                "which kind: speech_seq2seq needs; write a model such as whisper"
            )
        recordings = read_listed(settings.data, file_key="audio", text_key=text, example=EXAMPLE)
        require_texts(recordings, text)
        self.tokenizer = settings.tokenizer
        self.extractor = _spectrograms(settings)
        self.longest = settings.sequence_length
        for recording in recordings:
            seconds = sound_length(recording.path, recording.place) / RATE
            if seconds > self.extractor.chunk_length:
                raise UserError(
                    f"{recording.place}: {recording.path} takes {seconds:.1f} s, of which the "
                    f"model hears {self.extractor.chunk_length}; cut it, or leave the line out"
                )
        special_tokens = {
            "pad_token_id": self.tokenizer.pad_token_id,
            "eos_token_id": self.tokenizer.eos_token_id,
        }
        start = getattr(base, "decoder_start_token_id", None)
        if settings.source.folder is None or start is None:
            start = self.tokenizer.pad_token_id
            special_tokens["decoder_start_token_id"] = start
        self.start = int(start)
        count = held_out(len(recordings), settings.eval_samples, DEFAULT_EVAL_FRACTION)
        train_index, eval_index = hold_out(len(recordings), count)

        def part(indices: Indices) -> Transcripts:
            return Transcripts([recordings[index] for index in indices], self)

        self._train = part(train_index)
        self._eval = part(eval_index) if count else None
        self.config_keys = vocabulary_keys(settings, special_tokens)

    @staticmethod
    def open_tokenizer(source: ModelSource, path: str) -> Any:
        """The library's tokenizer, with padding and an end of text."""
        return pair_tokenizer(source, path)

    def metrics(self, model: nn.Module, batch: AnswerBatch) -> dict[str, Tensor]:
        """The loss and the accuracy of each token, after the right ones before it."""
        inputs, targets_BT = batch
        return token_metrics(model(inputs), targets_BT)

    def model_input(self, config: PreTrainedConfig) -> Preprocessor:
        """Recordings to write down."""
        return SpectrogramInput(
            tokenizer=self.tokenizer,
            extractor=self.extractor,
            rate=RATE,
            start=self.start,
            longest=self.longest,
            keywords=dict(self.keywords),
        )

    def write_files(self, folder: Path) -> None:
        """Write how recordings become spectrograms."""
        self.extractor.save_pretrained(folder)


def _spectrograms(settings: Settings) -> Any:
    """What makes a model's spectrograms: the folder's own, else one of the model's sizes."""
    extractor_class = library().WhisperFeatureExtractor
    folder = settings.source.folder
    if folder is not None and (folder / "preprocessor_config.json").is_file():
        return extractor_class.from_pretrained(folder)
    hop = 160  # samples from one column to the next; the encoder's second layer takes every other
    seconds = max(1, 2 * settings.base.max_source_positions * hop // RATE)
    return extractor_class(feature_size=settings.base.num_mel_bins, chunk_length=seconds)


class Transcripts(Dataset[Any]):
    """Recordings as spectrograms of one length, and the tokens of their texts.

    Args:
        recordings: The recordings.
        kind: Has the tokenizer and what makes spectrograms.

    Attributes:
        longest_sample: The number of the recording with the most tokens.
    """

    def __init__(self, recordings: list[Listed], kind: SpeechToText) -> None:
        self.recordings = recordings
        self.tokenizer = kind.tokenizer
        self.extractor = kind.extractor
        self.longest = kind.longest
        self.start = kind.start
        texts = [each.text for each in recordings]
        self.longest_sample = longest_text(texts, kind.tokenizer, limit=kind.longest)

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> AnswerBatch:
        inputs, targets_BT = self.__getitems__([index])
        return {name: value[0] for name, value in inputs.items()}, targets_BT[0]

    def __getitems__(self, indices: Sequence[int]) -> AnswerBatch:
        chosen = [self.recordings[index] for index in indices]
        sounds = [read_sound(each.path, RATE, each.place) for each in chosen]
        features = self.extractor(sounds, sampling_rate=RATE, return_tensors="pt")
        rows = [self._targets(each.text) for each in chosen]
        targets_BT = torch.full((len(rows), max(map(len, rows))), IGNORED)
        for targets_T, ids in zip(targets_BT, rows, strict=True):
            targets_T[: len(ids)] = torch.tensor(ids)
        seen_BT = targets_BT.masked_fill(targets_BT == IGNORED, self.tokenizer.pad_token_id)
        inputs = {
            "input_features": features["input_features"],
            "decoder_input_ids": F.pad(seen_BT[:, :-1], (1, 0), value=self.start),
        }
        return inputs, targets_BT

    def _targets(self, text: str) -> list[int]:
        """The tokens of a text, with what the tokenizer puts around it, and its end."""
        end = self.tokenizer.eos_token_id
        ids = self.tokenizer(text)["input_ids"]
        # The decoder's first token is given to it, and not learnt.
        ids = ids[1:] if ids[:1] == [self.start] else ids
        ids = ids if ids[-1:] == [end] else [*ids, end]
        return ids[: self.longest]


class Recordings(Dataset[Any]):
    """Recordings and their texts, read when they are fetched.

    Args:
        recordings: The recordings.
        lengths: The samples of each.
        tokenizer: The library's tokenizer of characters.
        padded: To how many samples every row is padded; None: to the longest of the batch, with a
            mask.

    Attributes:
        longest_sample: The number of the longest recording.
    """

    def __init__(
        self,
        recordings: list[Listed],
        lengths: list[int],
        *,
        tokenizer: Any,
        padded: int | None,
    ) -> None:
        self.recordings = recordings
        self.tokenizer = tokenizer
        self.padded = padded
        self.longest_sample = int(np.argmax(lengths)) if lengths else 0

    def __len__(self) -> int:
        return len(self.recordings)

    def __getitem__(self, index: int) -> SoundBatch:
        inputs, targets = self.__getitems__([index])
        return (
            {name: value[0] for name, value in inputs.items()},
            {name: value[0] for name, value in targets.items()},
        )

    def __getitems__(self, indices: Sequence[int]) -> SoundBatch:
        chosen = [self.recordings[index] for index in indices]
        sounds = [read_sound(each.path, RATE, each.place) for each in chosen]
        inputs = standardised_sound(sounds, padded=self.padded, has_mask=self.padded is None)
        ids = [self.tokenizer(each.text)["input_ids"] for each in chosen]
        labels_BL = torch.full((len(ids), max(map(len, ids))), IGNORED)
        for row, each in zip(labels_BL, ids, strict=True):
            row[: len(each)] = torch.tensor(each)
        # A model that has no mask reads the padding too.
        lengths_B = torch.tensor([self.padded or len(sound) for sound in sounds])
        return inputs, {"labels": labels_BL, "samples": lengths_B}
