"""Models of Hugging Face that somebody else trained: weights, tokenizers and image processors of a folder or a cache;
adapters, conversations packed into rows, encoders with decoders; saved, exported and continued. (That every layout
trains the same of them: test_tasks_huggingface.py.)"""

import functools
import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from app.data.loader import fetch
from app.errors import UserError
from app.models.prediction import Predictor
from app.planner.read import Reader
from app.results.export import export_run
from app.results.trained import trained
from app.storage.storage import Storage
from app.tasks.huggingface.conversations import IGNORED, pack
from app.tasks.huggingface.task import HuggingFace
from tests.app.tasks.test_tasks import built, one_batch
from tests.app.tasks.test_tasks_huggingface import READS, SMALL, arguments, made
from tests.running import LONG, Lines, committed, end_tree, flip, invoke, same_bits, start, trireme, wait_until, weights


def test_weights_of_a_folder_and_of_the_hubs_cache(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What somebody else saved: a Llama with weights and a tokenizer of its own."""
    from transformers import AutoModelForCausalLM

    folder = base / "base"
    words = {"<pad>": 0, "<s>": 1, "penny": 2, "a": 3, "good": 4, "bad": 5, "day": 6, "[UNK]": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    (folder / "tokenizer_config.json").unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    args: dict[str, Any] = {"model": str(folder), "data": str(base / "text.txt"), "sequence_length": 8}
    learnt = HuggingFace(**args, pretrained=True)
    assert learnt.kind == "causal_lm" and learnt.tokenizer.get_vocab()["penny"] == 2, "the folder's own"
    own = AutoModelForCausalLM.from_pretrained(folder)
    tokens, model = one_batch(learnt)[0], built(learnt)
    assert model.training and torch.equal(model(input_ids=tokens).logits, own(input_ids=tokens).logits)
    assert not torch.equal(built(HuggingFace(**args)).lm_head.weight, own.lm_head.weight)
    task = HuggingFace(model=str(folder), data=str(base / "reviews.csv"), pretrained=True, **READS["reviews.csv"])
    assert task.config.id2label == {0: "no", 1: "yes"} and next(task.structure().parameters()).is_meta
    heads = [built(task).score.weight for _ in range(2)]
    assert torch.equal(*heads) and heads[0].shape == (2, 16)
    (tokens, _), _ = one_batch(task)
    assert (tokens[:, 0] == 1).all() and task.config.pad_token_id == 0  # <s>, and the tokenizer's <pad>
    cached = base / "models--somebody--tiny"
    shutil.copytree(folder, cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    here = functools.partial(huggingface_hub.snapshot_download, cache_dir=base)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", here)
    of_the_hub = built(HuggingFace(**args | {"model": "somebody/tiny"}, pretrained=True))
    assert torch.equal(of_the_hub.lm_head.weight, own.lm_head.weight)


def test_images_are_fitted_to_a_folders_model(tmp_path: Path, own_cache: Path) -> None:
    from transformers import AutoImageProcessor, ViTConfig

    ViTConfig(**SMALL, image_size=12, patch_size=4, num_channels=3).save_pretrained(tmp_path)
    task = HuggingFace(model=str(tmp_path), data="digits")
    assert task.kind == "image_classification"
    pixels = task.arguments(one_batch(task)[0])["pixel_values"]
    assert pixels.shape[1:] == (3, 12, 12) and torch.equal(pixels[:, 0], pixels[:, 2])
    assert built(task)(pixels).logits.shape == (len(pixels), 10)
    asked, raw = task.preprocessor(), task.train_data().images[:2]
    mine = task.arguments(fetch(task.train_data(), [(0, 0), (1, 1)])[0])["pixel_values"]
    assert torch.equal(asked(raw)["pixel_values"], mine)
    task.write_folder(tmp_path)
    theirs = AutoImageProcessor.from_pretrained(tmp_path)
    pixels = theirs(list(raw.expand(-1, 3, -1, -1).numpy()), input_data_format="channels_first")["pixel_values"]
    assert np.abs(np.array(pixels) - mine.numpy()).mean() < 0.1, "but for resizing"


def test_only_adapters_and_a_new_head_are_trained(base: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any) -> None:
    """And peft is told the whole path of the model; the planner counts what is trained."""
    monkeypatch.chdir(base)
    task = HuggingFace(**arguments("lora classifier", base) | {"model": "base"})
    told = task.recipe.build_with_adapters().peft_config["default"]
    assert told.base_model_name_or_path == str((base / "base").resolve())
    model, again = built(task), built(task)
    assert not [warning for warning in recwarn if "peft" in str(warning.message).lower() + warning.filename]
    assert same_bits(model.state_dict(), again.state_dict())
    assert dict(task.structure().named_parameters()).keys() == dict(model.named_parameters()).keys()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name or name.startswith("score.") for name in trained)
    assert len(trained) == 2 * 7 * 2 + 1, "two for each of seven layers of both blocks; the head"
    task.loss(model, one_batch(task)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())
    reader = Reader(HuggingFace(**arguments("lora", base) | {"lora": {"targets": ["q_proj"]}}))
    planned = sum(p.numel for p in reader.size.parameters if p.trainable)
    assert not reader.note and 0 < planned < 0.2 * reader.parameters
    first, other = (reader.costs().parts[name] for name in dict.fromkeys(reader.costs().order))
    assert len(first.products["backward"]) < len(other.products["backward"]), "nothing flows into the embedding"


def test_a_masked_language_models_missing_pooler_is_learnt_but_not_beside_adapters(base: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig(vocab_size=264, **SMALL)).save_pretrained(base / "masked")
    shutil.copy(base / "base" / "tokenizer.json", base / "masked")
    given = arguments("lora classifier", base) | {"model": str(base / "masked")}
    adapted, whole = HuggingFace(**given), HuggingFace(**given | {"lora": None})
    assert dict(built(whole).named_parameters())["bert.pooler.dense.weight"].requires_grad
    with pytest.raises(UserError, match=r"bert.pooler.dense.bias is missing"):
        built(adapted)


def test_packing_leaves_no_room_that_something_fits_into() -> None:
    lengths = [7, 3, 5, 5, 2, 8, 1, 4]
    rows = pack(lengths, 10)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert [sum(lengths[i] for i in row) for row in rows] == [10, 10, 10, 5]


@pytest.mark.parametrize("name", ["instructions", "gpt2 instructions"])
def test_a_packed_conversation_is_as_alone(name: str, data: Path) -> None:
    """The loss is over answers only, and of each conversation what it is without those beside it."""
    task = made(name, data)
    model, rows = built(task).eval(), task.train_data()
    each = [fetch(rows, [(i, 0)]) for i in range(len(rows))]  # type: ignore[arg-type]
    (tokens, positions), targets = max(each, key=lambda batch: int((batch[0][1] == 0).sum()))
    assert (positions == 0).sum() > 2, "several share the row"
    logits = model(**task.arguments((tokens, positions))).logits
    starts = [*positions[0].eq(0).nonzero().flatten().tolist(), len(tokens[0])]
    for first, end in itertools.pairwise(starts):
        alone = model(input_ids=tokens[:, first:end]).logits
        assert torch.allclose(logits[:, first:end], alone, atol=1e-5)
    learnt = task.tokenizer.decode(targets[targets != IGNORED])
    assert learnt.startswith("it is ") and "user" not in learnt and learnt.count("it is") == learnt.count("<|im_end|>")
    total = nn.functional.cross_entropy(logits[0], targets[0], reduction="sum") / task.items(((), targets))
    assert task.loss(model, ((tokens, positions), targets)).item() == pytest.approx(total.item(), rel=1e-6)


def test_the_library_itself_keeps_attention_inside(data: Path) -> None:
    """Where layers see only so far back, or attention is not sdpa, the library finds the beginnings."""
    own, eager = (HuggingFace(**arguments("instructions", data), attention=how) for how in (None, "eager"))
    batch = fetch(own.train_data(), [(0, 0)])
    assert "attention_mask" in own.arguments(batch[0]) and "attention_mask" not in eager.arguments(batch[0])
    assert own.loss(built(own), batch).item() == pytest.approx(eager.loss(built(eager), batch).item(), rel=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_and_a_decoder(name: str, data: Path) -> None:
    task = made(name, data)
    assert task.kind == "seq2seq_lm"
    model, batch = built(task), one_batch(task)
    (source, mask, decoder), targets = batch
    library = model(input_ids=source, attention_mask=mask, labels=targets, use_cache=False)
    assert torch.equal(model(**task.arguments(batch[0])).logits, library.logits), "decoder inputs are shifted targets"
    counted = (targets != IGNORED).sum()
    assert task.loss(model, batch).item() == pytest.approx(library.loss.item(), rel=1e-6)
    assert task.items(batch) == counted and (decoder[:, 0] == task.config.decoder_start_token_id).all()
    assert (targets.gather(1, (targets != IGNORED).sum(1, keepdim=True) - 1) == task.tokenizer.eos_token_id).all()
    assert len(Predictor(model.eval(), task.preprocessor()).predict(["count to 3", "count"])) == 2


def command(folder: Path, name: str, *more: str) -> list[str]:
    given = {**arguments("lora instructions", folder), "eval_samples": 4}
    few = [f"run.storage={folder}", "train.global_batch_size=4", "checkpoint.every_steps=2", "checkpoint.keep_last=9"]
    return ["train", "task=huggingface", f"task_args={json.dumps(given)}", f"run.name={name}", *few, *more]


@pytest.mark.slow
def test_frozen_weights_are_saved_once_and_adapters_are_exported(base: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ended = invoke(*command(base, "run", "train.steps=4", "launcher=local", "tracking.enabled=false"))
    run = base / "run"
    said = re.search(r"run: ([\d,]+) parameters, of which ([\d,]+) train \(", ended.stdout)
    assert said is not None, ended.stdout
    every, few = (int(number.replace(",", "")) for number in said.groups())
    assert f"{few:,} of {every:,} parameters are trained" in ended.stdout
    counts = {name: tensor.numel() for name, tensor in weights(run).items()}
    assert (every, few) == (sum(counts.values()), sum(n for name, n in counts.items() if "lora" in name))
    (frozen,) = (run / "checkpoints" / "frozen").iterdir()
    steps = [*(run / "checkpoints").glob("step-*")]
    held = [set(FileSystemReader(path).read_metadata().state_dict_metadata) for path in (frozen, *steps)]
    assert len(steps) == 2 and {name.partition(".")[0] for name in held[0]} == {"model"}
    assert all("lora" in name and name not in held[0] for names in held[1:] for name in names)
    ours = trained(Storage(str(run))).model
    assert same_bits(weights(run), ours.state_dict())
    tokens = torch.arange(9)[None]
    for to in ("peft", "huggingface"):
        export_run(str(run), to=to, out=str(base / to))
    learnt = AutoModelForCausalLM.from_pretrained(base / "base")
    before = learnt(tokens).logits
    theirs = PeftModel.from_pretrained(learnt, base / "peft").eval()
    assert torch.allclose(theirs(tokens).logits, ours(tokens).logits, atol=1e-6)
    assert not torch.allclose(before, ours(tokens).logits, atol=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(base / "huggingface")
    assert torch.allclose(merged(tokens).logits, ours(tokens).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(base / "peft").chat_template
    flip(frozen / "__0_0.distcp")
    with pytest.raises(UserError, match=r"frozen/.* does not have the content"):
        trained(Storage(str(run)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_it_continues_to_the_last_bit(strategy: str, base: Path, ray_environment: dict[str, str]) -> None:
    import mlflow
    import pandas

    two = ["workers=2", f"strategy={strategy}", "launcher=ray", "train.steps=6"]
    undisturbed = trireme(*command(base, "whole", *two), env=ray_environment)
    assert undisturbed.code == 0, undisturbed.err
    process = start(command(base, "run", *two), env=ray_environment)
    Lines(process)
    wait_until(lambda: committed(base / "run"))
    end_tree(process.pid)
    process.wait(LONG)
    again = trireme(*command(base, "run", *two), env=ray_environment)
    assert again.code == 0 and "continuing after step" in again.out, again.out + again.err
    assert same_bits(weights(base / "whole"), weights(base / "run"))
    assert len(list((base / "run" / "checkpoints" / "frozen").iterdir())) == 1
    mlflow.set_tracking_uri(f"sqlite:///{base}/mlflow.db")
    all_of_them = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    found = mlflow.search_logged_models(all_of_them, output_format="list")
    for model in found:
        loaded = mlflow.pytorch.load_model(model.model_uri)
        assert same_bits(weights(base / "whole"), loaded.model.state_dict())
        assert len(mlflow.pyfunc.load_model(model.model_uri).predict(pandas.DataFrame({"text": ["2 + 2?"]}))) == 1
    assert len(found) == 2
