"""Fine-tuning: adapters, conversations packed into rows, encoders with decoders; the same model under every layout."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

from app.config_io import load_config, to_dict
from app.data.loader import fetch
from app.errors import UserError
from app.export import export_run
from app.planner.read import Reader
from app.prediction import Predictor
from app.randomness import seed_everything
from app.storage import Storage
from app.tasks.huggingface.conversations import NOTHING, pack
from app.tasks.huggingface.task import HuggingFace
from app.trained import trained
from experiments.parity.curves import Curve, begin, difference, train
from experiments.parity.experiment import make_trial
from strategies import ddp
from strategies.cpu_collectives.reduce_scatter import DirectReduceScatter
from strategies.parallelize import Options, choose
from strategies.tree import tree_map
from tests.app.tasks.test_tasks import CPU, built, one_batch
from tests.app.tasks.test_tasks_huggingface import GPT2, GROUPED, data  # noqa: F401
from tests.pool import run_distributed
from tests.running import LONG, Lines, committed, end_tree, flip, same_bits, start, trireme, wait_until, weights

LORA = {"r": 2, "alpha": 4}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BART = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
BART |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "dropout": 0.0}


@pytest.fixture
def folders(data: Path) -> Path:  # noqa: F811
    """A folder with somebody's Llama in `base`, conversations in talk.jsonl and pairs of texts in pairs.csv."""
    talk = [
        [{"role": "user", "content": f"{i} + {i}?"}, {"role": "assistant", "content": f"it is {2 * i}"}] * (1 + i % 3)
        for i in range(24)
    ]
    (data / "talk.jsonl").write_text("\n".join(json.dumps({"messages": each}) for each in talk))
    pairs = [f"count to {i},{' '.join(map(str, range(i % 7)))}." for i in range(24)]
    (data / "pairs.csv").write_text("\n".join(["text,target", *pairs]))
    task = HuggingFace(
        model="llama", config=GROUPED | {"vocab_size": 264}, data=str(data / "text.txt"), sequence_length=8
    )
    seed_everything(5)
    task.build_model().save_pretrained(data / "base")
    task.write_folder(data / "base")
    return data


def arguments(name: str, folder: Path) -> dict[str, Any]:
    base: dict[str, Any] = {"model": str(folder / "base"), "pretrained": True}
    talk = {"kind": "instructions", "data": str(folder / "talk.jsonl"), "sequence_length": 160}
    pairs = {"data": str(folder / "pairs.csv")}
    return {
        "lora": base | {"data": str(folder / "text.txt"), "sequence_length": 8, "lora": LORA},
        "lora classifier": base
        | {"kind": "sequence_classification", "data": str(folder / "reviews.csv"), "lora": LORA},
        "lora instructions": base | talk | {"lora": LORA},
        "instructions": talk | {"model": "llama", "config": GROUPED},
        "gpt2 instructions": talk | {"model": "gpt2", "config": GPT2},
        "t5": pairs | {"model": "t5", "config": T5},
        "bart": pairs | {"model": "bart", "config": BART},
    }[name]


def made(name: str, folder: Path) -> HuggingFace:
    return HuggingFace(**arguments(name, folder))


# --- adapters -------------------------------------------------------------------------------------------------------


def test_only_adapters_and_a_new_head_are_trained(folders: Path) -> None:
    task = made("lora classifier", folders)
    model, again = built(task), built(task)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), again.state_dict().values()))
    with torch.device("meta"):
        assert dict(built(task).named_parameters()).keys() == dict(model.named_parameters()).keys()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name or name.startswith("score.") for name in trained)
    assert len(trained) == 2 * 7 * 2 + 1, "two for each of seven layers of both blocks; the head"
    task.loss(model, one_batch(task)).backward()
    assert all((p.grad is not None) == p.requires_grad for p in model.parameters())


def test_peft_is_told_the_whole_path_and_has_nothing_to_say(
    folders: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.chdir(folders)
    told = HuggingFace(**arguments("lora", folders) | {"model": "base"}).recipe.wrapped().peft_config["default"]
    assert told.base_model_name_or_path == str((folders / "base").resolve())
    assert not [warning for warning in recwarn if "peft" in str(warning.message).lower() + warning.filename]


def test_a_masked_language_models_missing_pooler_is_learnt_but_not_beside_adapters(folders: Path) -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    BertForMaskedLM(BertConfig(vocab_size=264, **sizes)).save_pretrained(folders / "masked")
    shutil.copy(folders / "base" / "tokenizer.json", folders / "masked")
    given = arguments("lora classifier", folders) | {"model": str(folders / "masked")}
    adapted, whole = HuggingFace(**given), HuggingFace(**given | {"lora": None})
    assert dict(built(whole).named_parameters())["bert.pooler.dense.weight"].requires_grad
    with pytest.raises(UserError, match=r"bert.pooler.dense.bias is missing"):
        built(adapted)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora": {"rank": 2}}, ["task_args.lora.rank", "r, alpha, targets, dropout"]),
        ({"lora": {"r": 0}}, ["task_args.lora.r ", "at least 1"]),
        ({"lora": {"targets": "q_proj"}}, ["task_args.lora.targets", "auto"]),
        ({"lora": {"targets": ["qproj"]}}, ["task_args.lora does not fit", "qproj"]),
        ({"lora": LORA, "pretrained": False}, ["task_args.pretrained=true"]),
        ({"lora": 8}, ["task_args.lora is 8", "mapping"]),
    ],
)
def test_a_wrong_lora_is_a_sentence(folders: Path, changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        HuggingFace(**arguments("lora", folders) | changes)
    assert all(word in str(caught.value) for word in words), caught.value


def test_the_planner_counts_what_is_trained(folders: Path) -> None:
    reader = Reader(made("lora", folders))
    trained = sum(p.numel for p in reader.size.parameters if p.trainable)
    assert not reader.note and 0 < trained < 0.2 * reader.parameters
    first, other = (reader.costs().parts[name] for name in dict.fromkeys(reader.costs().order))
    assert len(first.products["backward"]) < len(other.products["backward"]), "nothing flows into the embedding"


# --- conversations --------------------------------------------------------------------------------------------------


def test_packing_leaves_no_room_that_something_fits_into() -> None:
    lengths = [7, 3, 5, 5, 2, 8, 1, 4]
    rows = pack(lengths, 10)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    assert [sum(lengths[i] for i in row) for row in rows] == [10, 10, 10, 5]


@pytest.mark.parametrize("name", ["instructions", "gpt2 instructions"])
def test_a_packed_conversation_is_as_alone(name: str, folders: Path) -> None:
    """The loss is over answers only, and of each conversation what it is without those beside it."""
    task = made(name, folders)
    model = built(task).eval()
    rows = task.train_data()
    each = [fetch(rows, [(i, 0)]) for i in range(len(rows))]  # type: ignore[arg-type]
    (tokens, positions), targets = max(each, key=lambda batch: int((batch[0][1] == 0).sum()))
    assert (positions == 0).sum() > 2, "several share the row"
    logits = model(**task.arguments((tokens, positions))).logits
    starts = [*positions[0].eq(0).nonzero().flatten().tolist(), len(tokens[0])]
    for first, end in itertools.pairwise(starts):
        alone = model(input_ids=tokens[:, first:end]).logits
        assert torch.allclose(logits[:, first:end], alone, atol=1e-5)
    learnt = task.tokenizer.decode(targets[targets != NOTHING])
    assert learnt.startswith("it is ") and "user" not in learnt and learnt.count("it is") == learnt.count("<|im_end|>")
    total = nn.functional.cross_entropy(logits[0], targets[0], reduction="sum") / task.items(((), targets))
    assert task.loss(model, ((tokens, positions), targets)).item() == pytest.approx(total.item(), rel=1e-6)


def test_the_library_itself_keeps_attention_inside(folders: Path) -> None:
    """Where layers see only so far back, or attention is not sdpa, the library finds the beginnings."""
    own, eager = (HuggingFace(**arguments("instructions", folders), attention=how) for how in (None, "eager"))
    batch = fetch(own.train_data(), [(0, 0)])
    assert "attention_mask" in own.arguments(batch[0]) and "attention_mask" not in eager.arguments(batch[0])
    assert own.loss(built(own), batch).item() == pytest.approx(eager.loss(built(eager), batch).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{}", ["talk.jsonl:2", "messages"]),
        ('{"messages": [{"role": "user", "content": "?"}]}', ["talk.jsonl:2", "an answer"]),
        ('{"messages": [{"role": "assistant", "content": 3}]}', ["talk.jsonl:2", "content"]),
    ],
)
def test_a_wrong_line_is_a_sentence(line: str, words: list[str], folders: Path) -> None:
    good = (folders / "talk.jsonl").read_text().splitlines()[0]
    (folders / "talk.jsonl").write_text(f"{good}\n{line}\n")
    with pytest.raises(UserError) as caught:
        made("instructions", folders)
    assert all(word in str(caught.value) for word in words), caught.value


# --- encoders with decoders -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_and_a_decoder(name: str, folders: Path) -> None:
    task = made(name, folders)
    assert task.kind == "seq2seq_lm"
    model, batch = built(task), one_batch(task)
    (source, mask, decoder), targets = batch
    library = model(input_ids=source, attention_mask=mask, labels=targets, use_cache=False)
    assert torch.equal(model(**task.arguments(batch[0])).logits, library.logits), "decoder inputs are shifted targets"
    counted = (targets != NOTHING).sum()
    assert task.loss(model, batch).item() == pytest.approx(library.loss.item(), rel=1e-6)
    assert task.items(batch) == counted and (decoder[:, 0] == task.config.decoder_start_token_id).all()
    assert (targets.gather(1, (targets != NOTHING).sum(1, keepdim=True) - 1) == task.tokenizer.eos_token_id).all()
    asked = task.preprocessor()
    assert asked is not None and len(Predictor(model.eval(), asked).predict(["count to 3", "count"])) == 2


# --- the same model -------------------------------------------------------------------------------------------------


def _curves(rank: int, rows: list[dict[str, Any]], strategy: str, workers: int, degrees: dict[str, int]) -> list[Curve]:
    layout = choose(strategy, workers, **degrees)
    return [train(make_trial(values, steps=3), layout, Options(), CPU) for values in rows]


NAMES = ("lora", "lora classifier", "lora instructions", "gpt2 instructions", "t5", "bart")
PARITY = [
    ("ddp", 2, {}, NAMES, 1e-5),
    ("fsdp", 2, {}, NAMES, 1e-5),
    pytest.param("tensor", 2, {}, ("lora", "instructions", "lora instructions", "t5"), 2e-5, marks=pytest.mark.slow),
    pytest.param("pipeline", 2, {"pp": 2}, ("lora", "instructions"), 1e-5, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "workers", "degrees", "names", "tolerance"), PARITY)
def test_trains_the_same_model(
    strategy: str, workers: int, degrees: dict[str, int], names: tuple[str, ...], tolerance: float, folders: Path
) -> None:
    given = ["task=huggingface", "train.global_batch_size=4", "train.clip_norm=1", "optimizer.lr=0.01"]
    rows = [to_dict(load_config([], [*given, f"task_args={json.dumps(arguments(n, folders))}"])) for n in names]
    split = run_distributed(_curves, workers, rows, strategy, workers, degrees)[0]
    for name, one, other in zip(names, _curves(0, rows, "single", 1, {}), split, strict=True):
        away = difference(one, other)
        assert away.within(tolerance), f"{name}: {away}"


def _sent(rank: int, values: dict[str, Any], strategy: str) -> tuple[int, int, int]:
    """Numbers of gradients that a step reduces; of parameters that are trained, and that are not."""
    sent: list[int] = []

    def averaged(_: Any, bucket: Any) -> torch.Tensor:
        sent.append(bucket.buffer().numel())
        return bucket.buffer()

    def scattered(_: Any, output_tensor: Any, input_tensor: torch.Tensor, **more: Any) -> None:
        sent.append(input_tensor.numel())

    trial, layout = make_trial(values, steps=1), choose(strategy, 2)
    with (
        mock.patch.object(ddp, "_average_", averaged),
        mock.patch.object(DirectReduceScatter, "__call__", scattered),
    ):
        parallel = begin(trial, layout, Options(), CPU)
        parallel.forward_backward([tree_map(lambda t: t[:2], trial.batch(0))], [0.5], trial.loss)
    frozen = [p for _, p in parallel.named_parameters() if not p.requires_grad]
    assert all(p.grad is None for p in frozen)
    learnt = sum(p.numel() for _, p in parallel.named_parameters() if p.requires_grad)
    return sum(sent), learnt, sum(p.numel() for p in frozen)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_frozen_weights_are_not_reduced(strategy: str, folders: Path) -> None:
    given = ["task=huggingface", "train.global_batch_size=4", f"task_args={json.dumps(arguments('lora', folders))}"]
    for sent, learnt, frozen in run_distributed(_sent, 2, to_dict(load_config([], given)), strategy):
        assert sent == learnt and frozen > 5 * learnt


# --- runs -----------------------------------------------------------------------------------------------------------


def command(folders: Path, name: str, *more: str) -> list[str]:
    given = {**arguments("lora instructions", folders), "eval_samples": 4}
    few = ["train.steps=6", "train.global_batch_size=4", "checkpoint.every_steps=2", "checkpoint.keep_last=9"]
    return ["train", "task=huggingface", f"task_args={json.dumps(given)}", f"run.name={name}", *few, *more]


def test_frozen_weights_are_saved_once_and_adapters_are_exported(folders: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer

    storage = f"run.storage={folders}"
    ended = trireme(*command(folders, "run", storage, "launcher=local", "tracking.enabled=false"))
    assert ended.code == 0, ended.err
    run = folders / "run"
    (frozen,) = (run / "checkpoints" / "frozen").iterdir()
    steps = [*(run / "checkpoints").glob("step-*")]
    held = [set(FileSystemReader(path).read_metadata().state_dict_metadata) for path in (frozen, *steps)]
    assert len(steps) == 3 and {name.partition(".")[0] for name in held[0]} == {"model"}
    assert all("lora" in name and name not in held[0] for names in held[1:] for name in names)
    ours, truth = trained(Storage(str(run))).model, weights(run)
    assert same_bits(truth, ours.state_dict())
    tokens = torch.arange(9)[None]
    for to in ("peft", "huggingface"):
        export_run(str(run), to=to, out=str(folders / to))
    base = AutoModelForCausalLM.from_pretrained(folders / "base")
    before = base(tokens).logits
    theirs = PeftModel.from_pretrained(base, folders / "peft").eval()
    assert torch.allclose(theirs(tokens).logits, ours(tokens).logits, atol=1e-6)
    assert not torch.allclose(before, ours(tokens).logits, atol=1e-3)
    merged = AutoModelForCausalLM.from_pretrained(folders / "huggingface")
    assert torch.allclose(merged(tokens).logits, ours(tokens).logits, atol=1e-5)
    assert AutoTokenizer.from_pretrained(folders / "peft").chat_template
    flip(frozen / "__0_0.distcp")
    with pytest.raises(UserError, match=r"frozen/.* does not have the content"):
        trained(Storage(str(run)))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_killed_it_continues_to_the_last_bit(strategy: str, folders: Path, ray_environment: dict[str, str]) -> None:
    import mlflow
    import pandas

    two = ["workers=2", f"strategy={strategy}", "launcher=ray", f"run.storage={folders}"]
    undisturbed = trireme(*command(folders, "whole", *two), env=ray_environment)
    assert undisturbed.code == 0, undisturbed.err
    process = start(command(folders, "run", *two), env=ray_environment)
    Lines(process)
    wait_until(lambda: committed(folders / "run"))
    end_tree(process.pid)
    process.wait(LONG)
    again = trireme(*command(folders, "run", *two), env=ray_environment)
    assert again.code == 0 and "continuing after step" in again.out, again.out + again.err
    assert same_bits(weights(folders / "whole"), weights(folders / "run"))
    assert len(list((folders / "run" / "checkpoints" / "frozen").iterdir())) == 1
    mlflow.set_tracking_uri(f"sqlite:///{folders}/mlflow.db")
    all_of_them = [experiment.experiment_id for experiment in mlflow.search_experiments()]
    found = mlflow.search_logged_models(all_of_them, output_format="list")
    for model in found:
        loaded = mlflow.pytorch.load_model(model.model_uri)
        assert same_bits(weights(folders / "whole"), loaded.model.state_dict())
        assert len(mlflow.pyfunc.load_model(model.model_uri).predict(pandas.DataFrame({"text": ["2 + 2?"]}))) == 1
    assert len(found) == 2
