"""Preference tuning: its losses, its data, and its reference on every layout."""

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.config.io import load_config
from app.data.loader import fetch
from app.data.mixture import order_of
from app.data.order import hold_out
from app.errors import UserError
from app.models.prediction import Predictor
from app.planner.read import Reader
from app.tasks.huggingface.conversations import IGNORED
from app.tasks.huggingface.task import HuggingFace
from app.training.flops import sample_flops
from tests.app.kit import logged, training_of
from tests.app.tasks.test_tasks import built_model
from tests.app.tasks.test_tasks_huggingface import GROUPED, SMALL, arguments, make_task
from tests.pool import run_distributed
from tests.running import invoke, same_bits, weights

BETA = 0.5
STEPS = 10
BATCH = 4
METRICS = ("loss", "rewards/margins", "rewards/accuracies", "logps/chosen", "logps/rejected")

# --- the loss -------------------------------------------------------------------------------------


def plain_logp(model: Any, prompt: list[int], answer: list[int]) -> Tensor:
    """The log-probability of an answer, of which the model sees no padding."""
    logps = model(torch.tensor([prompt + answer])).logits[0].log_softmax(-1)
    return torch.stack([logps[len(prompt) - 1 + i, token] for i, token in enumerate(answer)]).sum()


PLAIN_LOSSES: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "sigmoid": ({}, lambda h, _: -torch.log(torch.sigmoid(BETA * h))),
    "smoothed": (
        {"label_smoothing": 0.1},
        lambda h, _: (
            -0.9 * torch.log(torch.sigmoid(BETA * h)) - 0.1 * torch.log(torch.sigmoid(-BETA * h))
        ),
    ),
    "hinge": ({"loss_type": "hinge"}, lambda h, _: (1 - BETA * h).clamp(min=0)),
    "ipo": ({"loss_type": "ipo"}, lambda _, mean_h: (mean_h - 1 / (2 * BETA)) ** 2),
}


@pytest.mark.parametrize(
    "loss_type",
    [pytest.param(name, marks=[pytest.mark.slow] * (name != "sigmoid")) for name in PLAIN_LOSSES],
)
def test_losses_and_rewards_are_those_of_the_equations(
    loss_type: str, data: Path, tmp_path: Path
) -> None:
    """Beside a plain loop with a second model as reference, one answer at a time."""
    options, plain_loss = PLAIN_LOSSES[loss_type]
    args = arguments("preferences", data)
    args |= {"dpo": {"beta": BETA, **options}, "eval_samples": 2}
    config = load_config(
        [],
        [
            "task=huggingface",
            f"task_args={json.dumps(args)}",
            f"train.steps={STEPS}",
            f"train.global_batch_size={BATCH}",
            "train.micro_batch_size=2",
            "train.log_every=1",
            "optimizer.lr=1e-3",
        ],
    )
    training, events = training_of(config, tmp_path)
    model = copy.deepcopy(training.parallel.inner)
    reference = copy.deepcopy(model).eval()
    training.run()
    curve = [event.values for event in logged(events, "train/loss")]
    assert len(curve) == STEPS

    rows = [json.loads(line) for line in (data / "preferred.jsonl").read_text().splitlines()]
    train_index, _ = hold_out(len(rows), 2)
    order = order_of(training.data, config.train.seed).indices(0, STEPS * BATCH)
    tokenizer = training.task.tokenizer  # type: ignore[attr-defined]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step, values in enumerate(curve):
        of_pairs = []
        for position in order[step * BATCH : (step + 1) * BATCH]:
            row = rows[train_index[position]]
            prompt = tokenizer(row["prompt"])["input_ids"]
            logps = []
            ratios = []
            mean_ratios = []
            for name in ("chosen", "rejected"):
                answer = tokenizer(row[name] + "<|im_end|>")["input_ids"]
                logp = plain_logp(model, prompt, answer)
                with torch.no_grad():
                    ratio = logp - plain_logp(reference, prompt, answer)
                logps.append(logp)
                ratios.append(logp - (logp - ratio).detach())
                mean_ratios.append(ratios[-1] / len(answer))
            h = ratios[0] - ratios[1]
            loss = plain_loss(h, mean_ratios[0] - mean_ratios[1])
            of_pairs.append(torch.stack([loss, BETA * h, (h > 0).float(), *logps]))
        means = torch.stack(of_pairs).mean(0)
        for name, mean in zip(METRICS, means.tolist(), strict=True):
            # Of equal answers rounding decides which is likelier; in the first step all are equal.
            if name != "rewards/accuracies" or step:
                assert values[f"train/{name}"] == pytest.approx(mean, rel=1e-4, abs=2e-5), name
        optimizer.zero_grad()
        means[0].backward()
        optimizer.step()
    assert curve[-1]["train/loss"] < curve[0]["train/loss"]


def test_the_model_itself_is_the_reference_until_there_is_one(data: Path) -> None:
    task = make_task("preferences", data)
    assert task.loss(built_model(task), fetch(task.train_data(), [(0, 0)])).item() == (
        pytest.approx(math.log(2))
    )


@pytest.mark.parametrize(("kind", "file"), [("instructions", "talk"), ("preferences", "preferred")])
def test_an_encoder_looks_back_only(kind: str, file: str, data: Path) -> None:
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    path = str(data / f"{file}.jsonl")
    task = HuggingFace(model="bert", config=SMALL | no_dropout, kind=kind, data=path)
    model = built_model(task)
    tokens_1T = torch.arange(8)[None]
    changed_1T = tokens_1T.clone()
    changed_1T[0, -1] = 9
    first, second = (model(input_ids=tokens).logits for tokens in (tokens_1T, changed_1T))
    assert torch.equal(first[:, :-1], second[:, :-1])


# --- data -----------------------------------------------------------------------------------------

USER = {"role": "user", "content": "2 + 2?"}
FOUR = {"role": "assistant", "content": "it is 4"}
FIVE = {"role": "assistant", "content": "it is 5"}


def preferring(folder: Path, *rows: Any, **args: Any) -> Any:
    path = folder / "rows.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return HuggingFace(
        **{"model": "llama", "config": GROUPED, "kind": "preferences", "data": str(path)}
        | {"eval_samples": 0, **args}
    )


def prompts_and_answers(task: Any) -> list[tuple[str, str]]:
    """What the model reads before each answer of the first pair, and the answer."""
    tokens_2T, (targets_2T, _) = task.train_data()[0]
    texts = []
    for tokens_T, targets_T in zip(tokens_2T, targets_2T, strict=True):
        first = int((targets_T != IGNORED).nonzero()[0])
        answer_T = targets_T[targets_T != IGNORED]
        assert torch.equal(tokens_T[first + 1 : first + 1 + len(answer_T)], answer_T)
        decode = task.tokenizer.decode
        texts.append((decode(tokens_T[: first + 1]), decode(answer_T)))
    return texts


CHATML = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
IN_CHATML = [(CHATML, "it is 4<|im_end|>\n"), (CHATML, "it is 5<|im_end|>\n")]
AS_WRITTEN = [("2 + 2?", " 4<|im_end|>"), ("2 + 2?", " 5<|im_end|>")]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "2 + 2?", "chosen": " 4", "rejected": " 5"}, AS_WRITTEN),
        ({"chosen": "2 + 2? 4", "rejected": "2 + 2? 5"}, AS_WRITTEN),
        ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, IN_CHATML),
        ({"chosen": [USER, FOUR], "rejected": [USER, FIVE]}, IN_CHATML),
        ({"prompt": "2 + 2?", "chosen": [FOUR], "rejected": [FIVE]}, IN_CHATML),
        ({"prompt": "2 + 2?", "chosen": [USER, FOUR], "rejected": [USER, FIVE]}, IN_CHATML),
    ],
)
def test_pairs_are_read_in_every_form_that_trl_takes(
    row: Any, expected: Any, tmp_path: Path, own_cache: Path
) -> None:
    task = preferring(tmp_path, row, row)
    assert prompts_and_answers(task) == expected
    answers = Predictor(built_model(task).eval(), task.preprocessor()).predict(["2 + 2?"])
    assert len(answers) == 1


def test_rows_are_cut_and_pairs_without_room_for_an_answer_left_out(
    tmp_path: Path, own_cache: Path
) -> None:
    pair = {"prompt": "2 + 2?", "chosen": " four", "rejected": " 5"}
    too_long = pair | {"prompt": "?" * 8}
    task = preferring(tmp_path, pair, too_long, pair, sequence_length=8)
    assert len(task.train_data()) == 2
    tokens_2T, _ = task.train_data()[0]
    assert tokens_2T.shape == (2, 8) and task.sequence_length == 8
    assert prompts_and_answers(task) == [("2 + 2?", " f"), ("2 + 2?", " 5")]


NOT_A_PAIR = "rows.jsonl:2 is not a pair of answers; write lines such as"
GOOD = {"prompt": "a", "chosen": "b", "rejected": "c"}


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "rows.jsonl:2 is not JSON"),
        ([1], NOT_A_PAIR),
        ({"prompt": "a", "chosen": "b"}, NOT_A_PAIR),
        ({"prompt": "a", "chosen": "b", "rejected": 3}, NOT_A_PAIR),
        ({"prompt": 3, "chosen": "b", "rejected": "c"}, NOT_A_PAIR),
        ({"prompt": "a", "chosen": "b", "rejected": [FIVE]}, NOT_A_PAIR),
        ({"chosen": [FOUR], "rejected": [FIVE]}, NOT_A_PAIR),
        ({"prompt": [USER], "chosen": [{}], "rejected": [FIVE]}, NOT_A_PAIR),
        ({"chosen": "ab", "rejected": "ab"}, "rows.jsonl:2 has no prompt, and its chosen and"),
        ({"chosen": "ab", "rejected": "cb"}, "rows.jsonl:2 has no prompt, and its chosen and"),
        (
            {"prompt": [USER], "chosen": [FOUR], "rejected": [USER]},
            "rows.jsonl:2 has no message of the assistant in rejected",
        ),
        ({"prompt": [USER], "chosen": [FOUR], "rejected": [FIVE]}, "differs from"),
        ({"prompt": "", "chosen": "b", "rejected": "c"}, "rows.jsonl:2 has a prompt without"),
        ({**GOOD, "tools": [{}]}, "rows.jsonl:2 has tools"),
        ({**GOOD, "prompt": "\ud800"}, "rows.jsonl:2: column 'prompt' holds \\ud800"),
    ],
)
def test_a_line_that_is_no_pair_is_told_with_its_place(
    row: Any, message: str, tmp_path: Path, own_cache: Path
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        preferring(tmp_path, GOOD, row)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dpo": {"bet": 1}}, "task_args.dpo.bet: dpo has no such argument"),
        ({"dpo": {"beta": 0}}, "task_args.dpo.beta is 0; it must be a number above 0"),
        ({"dpo": {"loss_type": "sigmod"}}, "'sigmod' (did you mean 'sigmoid'?)"),
        ({"dpo": {"label_smoothing": 0.5}}, "label_smoothing is 0.5; it must be at least 0"),
        ({"dpo": {"loss_type": "ipo", "label_smoothing": 0.1}}, "is for loss_type sigmoid"),
        ({"kind": "causal_lm", "dpo": {}}, "task_args.dpo is for preferences"),
        ({"sequence_length": 1}, "rows.jsonl has 0 pairs of answers to a prompt of fewer than 1"),
    ],
)
def test_a_wrong_option_is_told(args: Any, message: str, tmp_path: Path, own_cache: Path) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        preferring(tmp_path, GOOD, GOOD, **args)


def test_a_plan_has_two_rows_of_the_longest_pair_for_a_sample(
    tmp_path: Path, own_cache: Path
) -> None:
    """And the utilization counts the tokens that pairs have."""
    short = {"prompt": "a", "chosen": "b", "rejected": "c"}
    long = {"prompt": "a" * 40, "chosen": "b", "rejected": "c"}
    task = preferring(tmp_path, *[short] * 7, long)
    reader = Reader(task, splits=False)
    assert (reader.samples, reader.items_per_sample) == (8, 1.0)
    assert task.sequence_length == 64 and reader.sample_bytes == 2 * 2 * 64 * 8 + 2 * 4
    (tmp_path / "text.txt").write_text("a text " * 200)
    one_row = HuggingFace(
        model="llama",
        config=GROUPED | {"vocab_size": task.config.vocab_size},
        data=str(tmp_path / "text.txt"),
        sequence_length=64,
        eval_samples=0,
    )

    def multiplications(of: Reader) -> float:
        """In the forward of a micro-batch of 3 samples."""
        costs = of.costs()
        tables = [costs.parts[name].products_at("forward", 3, 1) for name in costs.order]
        return float(sum(table.prod(1).sum() for table in tables))

    single = Reader(one_row, splits=False)
    assert multiplications(reader) == pytest.approx(2 * multiplications(single))
    assert task.tokens_per_sample == pytest.approx((7 * 2 * 3 + 2 * 42) / 8)
    ratio = (sample_flops(task) or 0) / (sample_flops(one_row) or 1)
    assert ratio == pytest.approx(task.tokens_per_sample / 64)


# --- layouts --------------------------------------------------------------------------------------

LAYOUTS: list[tuple[str, dict[str, int]]] = [
    ("ddp", {}),
    ("fsdp", {}),
    ("tensor", {}),
    ("context", {"cp": 2}),
    ("pipeline", {"pp": 2}),
]


def tuned(
    rank: int, folder: str, args: Any, layouts: Any, world: int
) -> list[tuple[list[float], dict[str, Tensor], dict[str, float]]]:
    """For each layout the losses, the reference and the evaluation of a short run."""
    results = []
    for strategy, degrees in layouts:
        overrides = [
            "task=huggingface",
            f"task_args={json.dumps(args)}",
            "train.steps=3",
            "train.global_batch_size=6",
            "train.log_every=1",
            "optimizer.lr=0.01",
            *(f"parallel.{name}={degree}" for name, degree in degrees.items()),
        ]
        training, events = training_of(
            load_config([], overrides), folder, rank, world, strategy=strategy
        )
        training.run()
        losses = [event.values["train/loss"] for event in logged(events, "train/loss")]
        evaluations = [event.values for event in logged(events, "eval/loss")]
        results.append((losses, training.reference.values, dict(*evaluations)))
    return results


@pytest.mark.alone
@pytest.mark.parametrize(
    ("name", "layouts"),
    [
        ("preferences", [LAYOUTS[1], LAYOUTS[-1]]),
        pytest.param("preferences", LAYOUTS, marks=pytest.mark.slow),
        pytest.param("lora preferences", LAYOUTS[:2], marks=pytest.mark.slow),
    ],
    ids=["preferences in two layouts", "preferences", "lora preferences"],
)
def test_every_layout_has_the_reference_and_the_losses_of_one_device(
    name: str, layouts: list[tuple[str, dict[str, int]]], base: Path, tmp_path: Path
) -> None:
    args = arguments(name, base) | {"eval_samples": 5, "dpo": {"beta": BETA}}
    ((losses, reference, evaluation),) = tuned(0, str(tmp_path), args, [("single", {})], 1)
    assert losses[0] == pytest.approx(math.log(2)) and losses[2] < losses[1] < losses[0]
    assert evaluation["eval/rewards/margins"] > 0 and evaluation["eval/rewards/accuracies"] <= 1
    of_ranks = run_distributed(tuned, 2, str(tmp_path), args, layouts, 2)
    for rank, results in enumerate(of_ranks):
        for (strategy, _), result in zip(layouts, results, strict=True):
            assert result[1].keys() == reference.keys()
            for key, values in reference.items():
                assert torch.allclose(result[1][key], values, rtol=1e-5), (strategy, key)
            if rank == 0:
                assert result[0] == pytest.approx(losses, rel=2e-5), strategy
                assert result[2] == pytest.approx(evaluation, rel=1e-3, abs=1e-5), strategy


@pytest.mark.slow
def test_a_resumed_run_has_the_reference_of_its_beginning(base: Path) -> None:
    """To the last bit; with other data it is refused."""
    args = arguments("lora preferences", base) | {"eval_samples": 4}

    def train(name: str, steps: int, code: int = 0) -> Any:
        return invoke(
            "train",
            "task=huggingface",
            f"task_args={json.dumps(args)}",
            f"run.name={name}",
            f"run.storage={base}",
            f"train.steps={steps}",
            "train.global_batch_size=4",
            "optimizer.lr=0.01",
            "launcher=local",
            "tracking.enabled=false",
            code=code,
        )

    train("whole", 6)
    train("run", 3)
    assert "continuing after step 3" in train("run", 6).stdout
    assert same_bits(weights(base / "whole"), weights(base / "run"))
    lines = (base / "preferred.jsonl").read_text().replace("who", "WHO")
    (base / "preferred.jsonl").write_text(lines)
    refused = train("run", 8, code=2).output
    assert re.search(r"has the reference of other data: reference.train-\w+ is not in it", refused)
