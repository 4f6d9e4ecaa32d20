"""Hugging Face models that somebody else saved: weights, tokenizers and image processors of a folder or a cache."""

import functools
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from app.data.loader import fetch
from app.tasks.huggingface.task import HuggingFace
from tests.app.tasks.test_tasks import built, one_batch
from tests.app.tasks.test_tasks_huggingface import READS, SMALL


@pytest.fixture
def folder(base: Path) -> Path:
    """What somebody else saved: a Llama with weights and a tokenizer of its own."""
    words = {"<pad>": 0, "<s>": 1, "penny": 2, "a": 3, "good": 4, "bad": 5, "day": 6, "[UNK]": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    (base / "base" / "tokenizer_config.json").unlink()
    tokenizer.save(str(base / "base" / "tokenizer.json"))
    return base / "base"


def test_pretrained_weights_from_a_folder_and_a_classifiers_new_head(folder: Path, data: Path) -> None:
    from transformers import AutoModelForCausalLM

    args: dict[str, Any] = {"model": str(folder), "data": str(data / "text.txt"), "sequence_length": 8}
    learnt = HuggingFace(**args, pretrained=True)
    assert learnt.kind == "causal_lm" and learnt.tokenizer.get_vocab()["penny"] == 2, "the folder's own"
    own = AutoModelForCausalLM.from_pretrained(folder)
    tokens, model = one_batch(learnt)[0], built(learnt)
    assert model.training and torch.equal(model(input_ids=tokens).logits, own(input_ids=tokens).logits)
    assert not torch.equal(built(HuggingFace(**args)).lm_head.weight, own.lm_head.weight)
    task = HuggingFace(model=str(folder), data=str(data / "reviews.csv"), pretrained=True, **READS["reviews.csv"])
    assert task.config.id2label == {0: "no", 1: "yes"} and next(task.structure().parameters()).is_meta
    heads = [built(task).score.weight for _ in range(2)]
    assert torch.equal(*heads) and heads[0].shape == (2, 16)
    (tokens, _), _ = one_batch(task)
    assert (tokens[:, 0] == 1).all() and task.config.pad_token_id == 0  # <s>, and the tokenizer's <pad>


def test_from_the_hubs_cache(folder: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached = data / "models--somebody--tiny"
    shutil.copytree(folder, cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    here = functools.partial(huggingface_hub.snapshot_download, cache_dir=data)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", here)
    task = HuggingFace(model="somebody/tiny", data=str(data / "text.txt"), sequence_length=8, pretrained=True)
    assert built(task).lm_head.weight.shape == (264, 16)


def test_images_are_fitted_to_a_folders_model(tmp_path: Path, own_cache: Path) -> None:
    from transformers import AutoImageProcessor, ViTConfig

    ViTConfig(**SMALL, image_size=12, patch_size=4, num_channels=3).save_pretrained(tmp_path)
    task = HuggingFace(model=str(tmp_path), data="digits")
    assert task.kind == "image_classification"
    pixels = task.arguments(one_batch(task)[0])["pixel_values"]
    assert pixels.shape[1:] == (3, 12, 12) and torch.equal(pixels[:, 0], pixels[:, 2])
    assert built(task)(pixels).logits.shape == (len(pixels), 10)
    asked = task.preprocessor()
    assert asked is not None
    raw = task.train_data().images[:2]  # type: ignore[attr-defined]
    mine = task.arguments(fetch(task.train_data(), [(0, 0), (1, 1)])[0])["pixel_values"]
    assert torch.equal(asked(raw)["pixel_values"], mine)
    task.write_folder(tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)
    pixels = theirs(list(raw.expand(-1, 3, -1, -1).numpy()), input_data_format="channels_first")["pixel_values"]
    assert np.abs(np.array(pixels) - mine.numpy()).mean() < 0.1, "but for resizing"
