"""Pretrained models of Hugging Face, of a folder or the hub's cache.

Covers their weights, tokenizers and image processors; adapters, conversations packed into rows,
and encoders with decoders; saving, exporting and resuming. That every layout trains the same
model: test_tasks_huggingface.py.
"""

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
from app.tasks.huggingface.lora import adapter_config, with_adapters
from app.tasks.huggingface.task import HuggingFace
from strategies.torch_internals import OperationMode
from tests.app.tasks.test_tasks import built_model, one_batch
from tests.app.tasks.test_tasks_huggingface import READS, SMALL, arguments, make_task
from tests.running import (
    LONG,
    Lines,
    committed,
    end_tree,
    flip,
    invoke,
    same_bits,
    start,
    trireme,
    wait_until,
    weights,
)


def test_weights_of_a_folder_and_of_the_hubs_cache(
    base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A saved Llama with its weights and its own tokenizer."""
    from transformers import AutoModelForCausalLM

    folder = base / "base"
    words = ("<pad>", "<s>", "penny", "a", "good", "bad", "day", "[UNK]")
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    begins_with_s = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.post_processor = begins_with_s
    (folder / "tokenizer_config.json").unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    args: dict[str, Any] = {
        "model": str(folder),
        "data": str(base / "text.txt"),
        "sequence_length": 8,
    }
    pretrained = HuggingFace(**args, pretrained=True)
    assert pretrained.kind == "causal_lm"
    assert pretrained.tokenizer.get_vocab()["penny"] == 2, "the folder's tokenizer"
    library_model = AutoModelForCausalLM.from_pretrained(folder)
    tokens = one_batch(pretrained)[0]
    model = built_model(pretrained)
    assert model.training
    assert torch.equal(model(input_ids=tokens).logits, library_model(input_ids=tokens).logits)
    assert not torch.equal(
        built_model(HuggingFace(**args)).lm_head.weight, library_model.lm_head.weight
    )
    reviews: dict[str, Any] = READS["reviews.csv"] | {"data": str(base / "reviews.csv")}
    task = HuggingFace(model=str(folder), pretrained=True, **reviews)
    assert task.config.id2label == {0: "no", 1: "yes"}
    assert next(task.structure().parameters()).is_meta
    heads = [built_model(task).score.weight for _ in range(2)]
    assert torch.equal(*heads) and heads[0].shape == (2, 16)
    (tokens, _), _ = one_batch(task)
    assert (tokens[:, 0] == vocabulary["<s>"]).all()
    assert task.config.pad_token_id == vocabulary["<pad>"]
    cached = base / "models--somebody--tiny"
    shutil.copytree(folder, cached / "snapshots" / "0123")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123")
    cached_download = functools.partial(huggingface_hub.snapshot_download, cache_dir=base)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached_download)
    from_hub = built_model(HuggingFace(**args | {"model": "somebody/tiny"}, pretrained=True))
    assert torch.equal(from_hub.lm_head.weight, library_model.lm_head.weight)


def test_images_are_resized_for_the_model_of_a_folder(tmp_path: Path, own_cache: Path) -> None:
    from transformers import AutoImageProcessor, ViTConfig

    ViTConfig(**SMALL, image_size=12, patch_size=4, num_channels=3).save_pretrained(tmp_path)
    task = HuggingFace(model=str(tmp_path), data="digits")
    assert task.kind == "image_classification"
    pixels = task.arguments(one_batch(task)[0])["pixel_values"]
    assert pixels.shape[1:] == (3, 12, 12) and torch.equal(pixels[:, 0], pixels[:, 2])
    assert built_model(task)(pixels).logits.shape == (len(pixels), 10)
    preprocessor = task.preprocessor()
    images = task.train_data().images[:2]
    expected = task.arguments(fetch(task.train_data(), [(0, 0), (1, 1)])[0])["pixel_values"]
    assert torch.equal(preprocessor(images)["pixel_values"], expected)
    task.write_folder(tmp_path)
    library_processor = AutoImageProcessor.from_pretrained(tmp_path)
    rgb_images = list(images.expand(-1, 3, -1, -1).numpy())
    processed = library_processor(rgb_images, input_data_format="channels_first")["pixel_values"]
    difference = np.abs(np.array(processed) - expected.numpy())
    assert difference.mean() < 0.1, "equal but for the method of resizing"


def test_only_adapters_and_a_new_head_are_trained(
    base: Path, monkeypatch: pytest.MonkeyPatch, recwarn: Any
) -> None:
    """peft gets the absolute path of the model, and the planner counts trained parameters only."""
    monkeypatch.chdir(base)
    task = HuggingFace(**arguments("lora classifier", base) | {"model": "base"})
    lora_config = task.recipe.build_with_adapters().peft_config["default"]
    assert lora_config.base_model_name_or_path == str((base / "base").resolve())
    model = built_model(task)
    rebuilt = built_model(task)
    texts = [str(warning.message).lower() + warning.filename for warning in recwarn]
    assert not [text for text in texts if "peft" in text]
    assert same_bits(model.state_dict(), rebuilt.state_dict())
    assert dict(task.structure().named_parameters()).keys() == dict(model.named_parameters()).keys()
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    for name in trained:
        assert ".lora_A." in name or ".lora_B." in name or name.startswith("score.")
    assert len(trained) == 2 * 7 * 2 + 1, "two for each of seven layers of two blocks; the head"
    task.loss(model, one_batch(task)).backward()
    assert all(
        (parameter.grad is not None) == parameter.requires_grad for parameter in model.parameters()
    )
    reader = Reader(HuggingFace(**arguments("lora", base) | {"lora": {"targets": ["q_proj"]}}))
    planned = sum(parameter.numel for parameter in reader.size.parameters if parameter.trainable)
    assert not reader.note and 0 < planned < 0.2 * reader.parameters
    embedding, block = (reader.costs().parts[name] for name in dict.fromkeys(reader.costs().order))
    assert len(embedding.products["backward"]) < len(block.products["backward"]), (
        "the embedding gets no gradient"
    )


class _Casts(OperationMode):
    """Counts the casts of tensors of one shape."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_adapters_casts_its_input_once_under_autocast(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    """peft alone casts it to and fro, and the results are the same."""

    def layer(*, has_hooks: bool) -> nn.Module:
        torch.manual_seed(0)
        options = {"r": 2, "targets": ["0"]}
        model = with_adapters(
            nn.Sequential(nn.Linear(8, 6)),
            adapter_config(options, None, tmp_path),
            trains_head=False,
        ).get_base_model()
        nn.init.normal_(model.get_parameter("0.lora_B.default.weight"))
        if not has_hooks:
            model[0]._forward_pre_hooks.clear()
        return model

    x = torch.randn(4, 8).to(dtype)
    outputs = []
    counts = []
    for has_hooks in (False, True):
        model = layer(has_hooks=has_hooks)
        casts = _Casts((4, 8))
        with torch.autocast("cpu", dtype=torch.bfloat16), casts:
            outputs.append(model(x))
        counts.append(casts.count)
    assert torch.equal(*outputs)
    by_type = {torch.float32: [2, 1], torch.bfloat16: [2, 0]}
    assert counts == by_type[dtype]
    # Without autocast peft casts an input of another type than the adapter's.
    model = layer(has_hooks=True)
    model[0].base_layer.bfloat16()
    assert model(x.bfloat16()).dtype == torch.bfloat16


def test_a_pooler_missing_in_the_weights_is_trained_but_not_beside_adapters(base: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    BertForMaskedLM(BertConfig(vocab_size=264, **SMALL)).save_pretrained(base / "masked")
    shutil.copy(base / "base" / "tokenizer.json", base / "masked")
    args = arguments("lora classifier", base) | {"model": str(base / "masked")}
    adapted = HuggingFace(**args)
    fully_trained = HuggingFace(**args | {"lora": None})
    assert dict(built_model(fully_trained).named_parameters())[
        "bert.pooler.dense.weight"
    ].requires_grad
    with pytest.raises(UserError, match=r"bert.pooler.dense.bias is missing"):
        built_model(adapted)


def test_packing_leaves_no_room_that_a_later_item_would_fit() -> None:
    lengths = [7, 3, 5, 5, 2, 8, 1, 4]
    rows = pack(lengths, 10)
    assert sorted(item for row in rows for item in row) == list(range(len(lengths)))
    assert [sum(lengths[item] for item in row) for row in rows] == [10, 10, 10, 5]


@pytest.mark.parametrize("name", ["instructions", "gpt2 instructions"])
def test_a_packed_conversation_is_learnt_as_if_it_were_alone(name: str, data: Path) -> None:
    """The loss is over answers only, and independent of other conversations in the row."""
    task = make_task(name, data)
    model = built_model(task).eval()
    rows = task.train_data()
    batches = [fetch(rows, [(i, 0)]) for i in range(len(rows))]  # type: ignore[arg-type]

    def conversations(batch: Any) -> int:
        return int((batch[0][1] == 0).sum())

    (tokens, positions), targets = max(batches, key=conversations)
    assert (positions == 0).sum() > 2, "several conversations share the row"
    logits = model(**task.arguments((tokens, positions))).logits
    starts = [*positions[0].eq(0).nonzero().flatten().tolist(), len(tokens[0])]
    for first, end in itertools.pairwise(starts):
        separate = model(input_ids=tokens[:, first:end]).logits
        assert torch.allclose(logits[:, first:end], separate, atol=1e-5)
    answers = task.tokenizer.decode(targets[targets != IGNORED])
    assert answers.startswith("it is ")
    assert "user" not in answers
    assert answers.count("it is") == answers.count("<|im_end|>")
    total = nn.functional.cross_entropy(logits[0], targets[0], reduction="sum")
    expected = total / task.items(((), targets))
    loss = task.loss(model, ((tokens, positions), targets))
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)


def test_the_library_itself_limits_attention_to_a_conversation(data: Path) -> None:
    """With sliding windows, or attention other than sdpa, it finds the start of conversations."""
    default = HuggingFace(**arguments("instructions", data), attention=None)
    eager = HuggingFace(**arguments("instructions", data), attention="eager")
    batch = fetch(default.train_data(), [(0, 0)])
    assert "attention_mask" in default.arguments(batch[0])
    assert "attention_mask" not in eager.arguments(batch[0])
    eager_loss = eager.loss(built_model(eager), batch).item()
    assert default.loss(built_model(default), batch).item() == pytest.approx(eager_loss, rel=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_with_a_decoder_has_the_loss_of_the_library(name: str, data: Path) -> None:
    task = make_task(name, data)
    assert task.kind == "seq2seq_lm"
    model = built_model(task)
    batch = one_batch(task)
    (source, mask, decoder), targets = batch
    library = model(input_ids=source, attention_mask=mask, labels=targets, use_cache=False)
    logits = model(**task.arguments(batch[0])).logits
    assert torch.equal(logits, library.logits), "the decoder's inputs are shifted targets"
    target_tokens = (targets != IGNORED).sum()
    assert task.loss(model, batch).item() == pytest.approx(library.loss.item(), rel=1e-6)
    assert task.items(batch) == target_tokens
    assert (decoder[:, 0] == task.config.decoder_start_token_id).all()
    last_targets = targets.gather(1, (targets != IGNORED).sum(1, keepdim=True) - 1)
    assert (last_targets == task.tokenizer.eos_token_id).all()
    assert len(Predictor(model.eval(), task.preprocessor()).predict(["count to 3", "count"])) == 2


def command(
    folder: Path, name: str, *overrides: str, model: str = "lora instructions"
) -> list[str]:
    """Arguments that train adapters, by default on conversations, in a run of this name."""
    args = {**arguments(model, folder), "eval_samples": 4}
    return [
        "train",
        "task=huggingface",
        f"task_args={json.dumps(args)}",
        f"run.name={name}",
        f"run.storage={folder}",
        "train.global_batch_size=4",
        "checkpoint.every_steps=2",
        "checkpoint.keep_last=9",
        *overrides,
    ]


@pytest.mark.slow
def test_frozen_weights_are_saved_once_and_adapters_are_exported(base: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ended = invoke(
        *command(base, "run", "train.steps=4", "launcher=local", "tracking.enabled=false")
    )
    run = base / "run"
    counted = re.search(r"run: ([\d,]+) parameters, of which ([\d,]+) train \(", ended.stdout)
    assert counted is not None, ended.stdout
    every, few = (int(number.replace(",", "")) for number in counted.groups())
    assert f"{few:,} of {every:,} parameters are trained" in ended.stdout
    counts = {name: tensor.numel() for name, tensor in weights(run).items()}
    assert (every, few) == (
        sum(counts.values()),
        sum(n for name, n in counts.items() if "lora" in name),
    )
    (frozen,) = (run / "checkpoints" / "frozen").iterdir()
    steps = [*(run / "checkpoints").glob("step-*")]

    def names(checkpoint: Path) -> set[str]:
        return set(FileSystemReader(checkpoint).read_metadata().state_dict_metadata)

    frozen_names = names(frozen)
    assert {name.partition(".")[0] for name in frozen_names} == {"model"}
    assert len(steps) == 2
    for checkpoint in steps:
        assert all("lora" in name and name not in frozen_names for name in names(checkpoint))
    run_model = trained(Storage(str(run))).model
    assert same_bits(weights(run), run_model.state_dict())
    tokens = torch.arange(9)[None]
    for file_format in ("peft", "huggingface"):
        export_run(str(run), to=file_format, out=str(base / file_format))
    base_model = AutoModelForCausalLM.from_pretrained(base / "base")
    base_logits = base_model(tokens).logits
    with_adapters = PeftModel.from_pretrained(base_model, base / "peft").eval()
    assert torch.allclose(with_adapters(tokens).logits, run_model(tokens).logits, atol=1e-6)
    assert not torch.allclose(base_logits, run_model(tokens).logits, atol=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(base / "huggingface")
    assert torch.allclose(merged(tokens).logits, run_model(tokens).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(base / "peft").chat_template
    flip(frozen / "__0_0.distcp")
    with pytest.raises(UserError, match=r"frozen/.* does not have the content"):
        trained(Storage(str(run)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "model"), [("ddp", "lora instructions"), ("fsdp", "lora preferences")]
)
def test_a_killed_finetuning_continues_to_the_last_bit(
    strategy: str, model: str, base: Path, ray_environment: dict[str, str]
) -> None:
    import mlflow
    import pandas

    overrides = ["workers=2", f"strategy={strategy}", "launcher=ray", "train.steps=6"]
    undisturbed = trireme(*command(base, "whole", *overrides, model=model), env=ray_environment)
    assert undisturbed.code == 0, undisturbed.err
    process = start(command(base, "run", *overrides, model=model), env=ray_environment)
    Lines(process)
    wait_until(lambda: committed(base / "run"))
    end_tree(process.pid)
    process.wait(LONG)
    resumed = trireme(*command(base, "run", *overrides, model=model), env=ray_environment)
    assert resumed.code == 0 and "continuing after step" in resumed.out, resumed.out + resumed.err
    assert same_bits(weights(base / "whole"), weights(base / "run"))
    assert len(list((base / "run" / "checkpoints" / "frozen").iterdir())) == 1
    mlflow.set_tracking_uri(f"sqlite:///{base}/mlflow.db")
    experiments = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    logged_models = mlflow.search_logged_models(experiments, output_format="list")
    for model in logged_models:
        loaded = mlflow.pytorch.load_model(model.model_uri)
        assert same_bits(weights(base / "whole"), loaded.model.state_dict())
        questions = pandas.DataFrame({"text": ["2 + 2?"]})
        assert len(mlflow.pyfunc.load_model(model.model_uri).predict(questions)) == 1
    assert len(logged_models) == 2
