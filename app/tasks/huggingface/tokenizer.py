"""Tokenizers of the library: the one that is written, the model's own, or bytes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.files import existing
from app.data.text import BYTES, load_tokenizer
from app.errors import UserError
from app.tasks.huggingface.model import ModelSource, library

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The chat template of tokenizers that have none
(https://github.com/openai/openai-python/blob/v0.27.0/chatml.md)."""
PADDING_TOKENS = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
"""Tokens that can serve as padding, the best first."""
MARKS = {
    "cls_token": ("[CLS]", "<s>"),
    "sep_token": ("[SEP]", "</s>"),
    "mask_token": ("[MASK]", "<mask>"),
}
"""The tokens of an encoder: before a text, after it, and in place of a hidden token."""
LENGTH_MULTIPLE = 8  # of lengths: matrix units are faster with it, and fewer shapes occur
CANDIDATES = 16  # texts with the most characters, among which the one with the most tokens is found


def choose_tokenizer(source: ModelSource, written: str | None, *, pretrained: bool) -> str:
    """The tokenizer that is written, else the model folder's own, else bytes.

    Args:
        source: The model.
        written: `task_args.tokenizer`.
        pretrained: Whether training starts from the folder's weights.

    Returns:
        `bytes`, or the path of a tokenizers file.

    Raises:
        UserError: The file is missing, or it is not known what the weights' tokens mean.
    """
    if written is not None:
        return BYTES if written == BYTES else str(existing(written, "task_args.tokenizer"))
    if source.tokenizer is not None:
        return str(source.tokenizer)
    if pretrained:
        raise UserError(
            f"task_args.tokenizer: {source.folder} has weights but no tokenizer.json; "
            "write the path of the one that they were trained with"
        )
    return BYTES


def open_tokenizer(source: ModelSource, path: str, *, padded: bool) -> PreTrainedTokenizerFast:
    """The library's tokenizer.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
        padded: Whether it needs a token for padding.

    Raises:
        UserError: The file cannot be read.
    """
    tokenizer_class = library().PreTrainedTokenizerFast
    if path == BYTES:
        tokenizer = tokenizer_class(
            tokenizer_object=byte_tokenizer(padded=padded), clean_up_tokenization_spaces=False
        )
    elif source.folder is not None and path == str(source.tokenizer):
        tokenizer = tokenizer_class.from_pretrained(source.folder)
    else:
        load_tokenizer(Path(path))  # for its clear error if the file is damaged
        tokenizer = tokenizer_class(tokenizer_file=path)
    _set_padding(tokenizer, source, padded=padded)
    return tokenizer


def _set_padding(tokenizer: PreTrainedTokenizerFast, source: ModelSource, *, padded: bool) -> None:
    tokenizer.padding_side = "right"
    if padded and source.folder is not None and isinstance(source.base.pad_token_id, int):
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(source.base.pad_token_id)
        return
    if tokenizer.pad_token is not None:
        return
    vocabulary = tokenizer.get_vocab()
    usable = [token for token in PADDING_TOKENS if token in vocabulary]
    if usable:
        tokenizer.pad_token = usable[0]
    elif padded:
        tokenizer.add_special_tokens({"pad_token": "<pad>"})


def chat_tokenizer(source: ModelSource, path: str) -> PreTrainedTokenizerFast:
    """The library's tokenizer with a chat template: its own, else ChatML.

    For a model without weights the marks of ChatML are tokens.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
    """
    tokenizer = open_tokenizer(source, path, padded=source.folder is None)
    if tokenizer.chat_template is None:
        tokenizer.chat_template = CHATML
        if source.folder is None:
            tokenizer.add_special_tokens(
                {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
            )
    return tokenizer


def pair_tokenizer(source: ModelSource, path: str) -> PreTrainedTokenizerFast:
    """The library's tokenizer with padding and a token that ends a text.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
    """
    tokenizer = open_tokenizer(source, path, padded=True)
    _set_end(tokenizer, source)
    return tokenizer


def preference_tokenizer(source: ModelSource, path: str) -> PreTrainedTokenizerFast:
    """The library's tokenizer with a chat template and a token that ends a text.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
    """
    tokenizer = chat_tokenizer(source, path)
    _set_end(tokenizer, source)
    return tokenizer


def encoder_tokenizer(source: ModelSource, path: str) -> PreTrainedTokenizerFast:
    """The library's tokenizer with padding and the marks of an encoder, such as `[CLS]`.

    Marks that the vocabulary has are used. For a model without weights the others are added, and a
    tokenizer that puts nothing around a text gets `[CLS] text [SEP]` and, for two texts,
    `[CLS] text [SEP] text [SEP]`.

    Args:
        source: The model.
        path: What `choose_tokenizer` returned.
    """
    # A tokenizer of bytes keeps the numbers of bytes as its first tokens.
    tokenizer = open_tokenizer(source, path, padded=path != BYTES)
    if tokenizer.pad_token is None:
        tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    vocabulary = tokenizer.get_vocab()
    for name, tokens in MARKS.items():
        if getattr(tokenizer, name) is not None:
            continue
        usable = [token for token in tokens if token in vocabulary]
        if usable or source.folder is None:
            tokenizer.add_special_tokens({name: (usable or tokens)[0]})
    puts_nothing_around = tokenizer.num_special_tokens_to_add() == 0
    if source.folder is None and puts_nothing_around:
        tokenizer.backend_tokenizer.post_processor = _marks_around(tokenizer)
    return tokenizer


def _marks_around(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Puts an encoder's marks around one text or two."""
    from tokenizers.processors import TemplateProcessing

    begin = tokenizer.cls_token
    end = tokenizer.sep_token
    return TemplateProcessing(
        single=f"{begin} $A {end}",
        pair=f"{begin} $A {end} $B:1 {end}:1",
        special_tokens=[(begin, tokenizer.cls_token_id), (end, tokenizer.sep_token_id)],
    )


def marks_of(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """The keys of a model's configuration for the special tokens of its tokenizer."""
    names = ("pad_token_id", "cls_token_id", "sep_token_id", "mask_token_id")
    numbers = {name: getattr(tokenizer, name) for name in names}
    return {name: number for name, number in numbers.items() if number is not None}


def _set_end(tokenizer: PreTrainedTokenizerFast, source: ModelSource) -> None:
    if tokenizer.eos_token is None:
        end_id = source.base.eos_token_id if source.folder is not None else None
        end = "</s>" if end_id is None else tokenizer.convert_ids_to_tokens(end_id)
        tokenizer.add_special_tokens({"eos_token": end})


def byte_tokenizer(*, padded: bool) -> Tokenizer:
    """The equal of `bytes` as a tokenizers file: byte-pair encoding without any pairs.

    (Sennrich et al. 2016, https://arxiv.org/abs/1508.07909.)

    Args:
        padded: Whether token 0 is padding, and the token of a byte is the byte plus 1.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # The library writes bytes as letters, as GPT-2 does: a printable byte as itself, any other as
    # one of the letters from 256 on, in order (Radford et al. 2019).
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    unprintable = iter([letter for letter in letters if ord(letter) > 255])
    first_id = 1 if padded else 0
    vocabulary = {"<pad>": 0} if padded else {}
    for byte in range(256):
        letter = chr(byte) if chr(byte) in letters else next(unprintable)
        vocabulary[letter] = first_id + byte
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>"] if padded else [])
    return tokenizer


# --- lengths ---


def padded_encoding(
    tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], *, longest: int, **options: Any
) -> Any:
    """Texts as tokens, cut at a length and padded to the longest of them.

    Args:
        tokenizer: The library's tokenizer, with padding.
        texts: The texts.
        longest: How many tokens of a text are used.
        options: Further arguments of the tokenizer.

    Returns:
        The library's encoding; its `input_ids` and `attention_mask` are int64 (B, T).
    """
    return tokenizer(
        list(texts),
        padding=True,
        truncation=True,
        max_length=longest,
        pad_to_multiple_of=LENGTH_MULTIPLE if longest % LENGTH_MULTIPLE == 0 else None,
        return_tensors="pt",
        **options,
    )


def longest_text(texts: Sequence[str], tokenizer: PreTrainedTokenizerFast, *, limit: int) -> int:
    """The number of the text with the most tokens, by which runs are planned.

    Only the texts with the most characters are tokenised.

    Args:
        texts: The texts.
        tokenizer: The library's tokenizer.
        limit: How many tokens of a text are used.
    """
    candidates = sorted(range(len(texts)), key=lambda number: -len(texts[number]))[:CANDIDATES]
    if not candidates:
        return 0
    encoded = tokenizer([texts[number] for number in candidates])["input_ids"]
    lengths = [min(len(ids), limit) for ids in encoded]
    return candidates[lengths.index(max(lengths))]


def accepted(names: Sequence[str], model: Any) -> list[str]:
    """Those of some arguments that a model's forward takes.

    Args:
        names: The arguments.
        model: The model.
    """
    parameters = inspect.signature(model.forward).parameters
    return [name for name in names if name in parameters]
