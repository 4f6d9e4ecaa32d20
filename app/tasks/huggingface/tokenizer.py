"""From text to a model's numbers: which tokenizer, what fills up, and the tokenizer files of an exported model."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.data.files import existing
from app.data.text import BYTES, load_tokenizer
from app.errors import UserError
from app.tasks.huggingface.find import Found, read_json
from app.tasks.huggingface.labelled_text import BYTE_ENCODING, Encoding

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PADDING = ("[PAD]", "<pad>", "<|pad|>", "<|endoftext|>", "<|end_of_text|>", "</s>")
"""What tokenizers call the token that fills up, or can serve as one, the best first."""
COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


def chosen_tokenizer(found: Found, written: str | None, weights: bool) -> str:
    """`bytes`, or the path of a tokenizers file: what is written, else the model folder's own, else bytes.

    Raises UserError where learnt weights would meet another's tokens unasked.
    """
    if written is not None:
        return BYTES if written == BYTES else str(existing(written, "task_args.tokenizer"))
    if found.tokenizer is not None:
        return str(found.tokenizer)
    if weights:
        raise UserError(
            f"task_args.tokenizer: {found.folder} has weights but no tokenizer.json; write the path of the one that "
            "they were trained with"
        )
    return BYTES


def encoding(found: Found, tokenizer: str, longest: int) -> Encoding:
    """How a classifier's texts become numbers, at most `longest` each."""
    if tokenizer == BYTES:
        return BYTE_ENCODING
    model = load_tokenizer(Path(tokenizer))
    model.no_padding()
    model.enable_truncation(longest)
    size = model.get_vocab_size()
    padding = _padding(found, model)
    return Encoding(partial(_encoded, model), max(size, padding + 1), padding)


def _encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text).ids)


def _padding(found: Found, tokenizer: Tokenizer) -> int:
    """The model's own padding, else a token that can serve, else one more than the tokenizer has."""
    if found.folder is not None and isinstance(found.base.pad_token_id, int):
        return int(found.base.pad_token_id)
    named = read_json(found.folder / "tokenizer_config.json").get("pad_token") if found.folder else None
    named = named.get("content") if isinstance(named, dict) else named
    for name in filter(None, (named, *PADDING)):
        number = tokenizer.token_to_id(name)
        if number is not None:
            return int(number)
    return int(tokenizer.get_vocab_size())


def write_tokenizer(folder: Path, found: Found, tokenizer: str, *, shifted: bool) -> None:
    """Puts into `folder` what AutoTokenizer needs to read text as the training did.

    shifted: bytes plus one, 0 being padding (LabelledText), instead of bytes.
    """
    if found.folder is not None and tokenizer == str(found.tokenizer):
        for name in COPIED:
            if (found.folder / name).is_file():
                shutil.copyfile(found.folder / name, folder / name)
        return
    about: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if tokenizer == BYTES:
        byte_tokenizer(shifted).save(str(folder / "tokenizer.json"))
        about |= {"pad_token": "<pad>"} if shifted else {}
    else:
        shutil.copyfile(tokenizer, folder / "tokenizer.json")
        known = load_tokenizer(Path(tokenizer))
        filling = [name for name in PADDING if known.token_to_id(name) is not None]
        about |= {"pad_token": filling[0]} if filling else {}
    (folder / "tokenizer_config.json").write_text(json.dumps(about, indent=2))


def byte_tokenizer(shifted: bool) -> Tokenizer:
    """A tokenizers file's equal of `bytes`: byte-pair encoding (Sennrich et al. 2016) that has learnt no pair."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocabulary = {letter: byte + shifted for byte, letter in enumerate(_letters())}
    if shifted:
        vocabulary["<pad>"] = 0
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    if shifted:
        tokenizer.add_special_tokens(["<pad>"])
    return tokenizer


def _letters() -> list[str]:
    """The letter that stands for each byte in byte-level vocabularies: itself where it can be seen, else one from 256
    on (GPT-2, Radford et al. 2019)."""
    seen = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in seen]
    return [chr(byte) if byte in seen else chr(256 + hidden.index(byte)) for byte in range(256)]
