"""Models drawn at random under every strategy: equal to one device, or refused before they start.

For a longer survey: `python -m tests.generated --models 2000 --seed 1`.
"""

from __future__ import annotations

import functools
import os
import time
from typing import Any

import pytest
import torch

from tests.generated import compare
from tests.generated.__main__ import Survey
from tests.generated.compare import (
    ALWAYS,
    RIVALS,
    WIDE,
    Comparison,
    Invalid,
    Kind,
    Rival,
    Verdict,
    drawn,
    shrunk,
)
from tests.generated.grammar import AXES, PLAIN, Model

pytestmark = [pytest.mark.alone, pytest.mark.pure]
SECONDS = float(os.environ.get("TRIREME_GENERATED", "240"))
"""How long a survey of drawn models takes."""
RIGHT = (Kind.EQUAL, Kind.REFUSED, Kind.NOTED, Kind.RANDOM)
BY_NAME = {rival.name: rival for rival in (*RIVALS, *WIDE)}
CORE = [BY_NAME[name] for name in ALWAYS]


def model(*names: str) -> Model:
    """The plain model but for these choices, in the first domain that all of them fit."""
    axis_of = {name: axis for axis, features in AXES.items() for name in features}
    choices = {axis_of[name]: name for name in names}
    features = [AXES[axis][name] for axis, name in choices.items()]
    domains = [
        domain
        for domain in AXES["domain"]
        if all(domain in feature.domains for feature in features)
    ]
    return Model.of(**{"domain": domains[0], **choices})


def wrong(verdicts: dict[str, Verdict]) -> dict[str, str]:
    """The texts of the verdicts that are mistakes, by rival."""
    return {name: verdict.text for name, verdict in verdicts.items() if verdict.kind not in RIGHT}


FIXED = (
    "tied_ends nested skip",
    "attributes scalar adam_decay",
    "multihead answer_pair clipped",
    "conv_group_norm pair_none",
)
"""Models of a few choices at once; every `make test` compares the second."""


@pytest.mark.parametrize(
    "names",
    [
        FIXED[1],
        *(pytest.param(names, marks=pytest.mark.slow) for names in FIXED if names != FIXED[1]),
    ],
)
def test_a_model_is_equal_under_every_strategy_or_refused(names: str) -> None:
    rivals = drawn(seed=len(names), extra=2)
    assert wrong(Comparison(model(*names.split())).verdicts(rivals)) == {}


MENDED = {
    "complex parameters": (
        "complex clipped",
        "complex_linear",
        "net_complex sgd",
        "complex module_dict own_groups",
    ),
    "sparse embeddings": ("sparse sgd", "sparse clipped", "sparse_bag sgd_plain", "sparse rmsprop"),
    "parameters that are not contiguous": (
        "strided",
        "net_strided clipped",
        "expanded",
        "channels_last sgd",
    ),
    "several types in one unit": (
        "float32_norms",
        "float32_head dict",
        "net_double sgd",
        "net_half skip",
    ),
    "parameters without elements or dimensions": (
        "empty",
        "empty sgd clipped",
        "scalar nested",
        "net_scalar nesterov",
    ),
    "weights made of other parameters": (
        "old_weight_norm",
        "weight_norm_head",
        "weight_norm",
        "orthogonal attributes",
    ),
    "lazy layers": ("lazy", "lazy_head", "lazy module_dict", "lazy_head answer_dict sgd"),
    "tensors in a list": (
        "listed_tensors",
        "in_a_list",
        "listed_tensors tied_blocks",
        "in_a_list layers dict",
    ),
    "stochastic gradient descent": (
        "sgd",
        "sgd_plain skip",
        "nesterov multihead",
        "sgd clipped frozen_block",
    ),
    "norms over a batch": ("batch_norm", "net_batch_norm", "conv_batch_norm", "batch_norm layers"),
    "hooks on tensors": (
        "tensor_hook",
        "retain_grad",
        "block_tensor_hook",
        "tensor_hook layers dict",
    ),
    "tensors that blocks keep": (
        "left_by_blocks",
        "cached",
        "left_by_net",
        "left_by_blocks layers pair",
    ),
    "blocks inside containers": (
        "sequences",
        "sequences dict",
        "sequences sgd",
        "sequences tensor_hook",
    ),
    "float64": ("float64", "float64 sgd", "float64 multihead", "float64 clipped tied_blocks"),
}
"""Kinds of models that once failed in a worker or gave other results."""
OF_NUMBERS = (
    "sparse embeddings",
    "several types in one unit",
    "stochastic gradient descent",
    "float64",
)
"""Kinds that differ by types and optimizers alone, which other tests of strategies have too."""


def _mended_rows() -> list[Any]:
    """Models with their rivals.

    `make test` has the first model of every second kind, but for those in OF_NUMBERS.
    """
    rows = []
    for number, (kind, several) in enumerate(MENDED.items()):
        quick = [BY_NAME[name] for name in ALWAYS if name != ("tensor", ALWAYS[-1])[number % 2]]
        marks = [pytest.mark.slow] if kind in OF_NUMBERS or number % 2 else []
        rows.append(pytest.param(several[0], quick, marks=marks, id=f"{kind}: {several[0]}"))
        for names in several:
            row_id = f"{kind} under each: {names}"
            rows.append(pytest.param(names, CORE, id=row_id, marks=pytest.mark.slow))
    return rows


@pytest.mark.parametrize(("names", "rivals"), _mended_rows())
def test_a_kind_of_model_that_once_failed_is_trained(names: str, rivals: list[Rival]) -> None:
    verdicts = Comparison(model(*names.split())).verdicts(rivals)
    assert wrong(verdicts) == {}
    kinds = {verdicts[name].kind for name in ("ddp", "fsdp")}
    assert kinds <= {Kind.EQUAL, Kind.NOTED}, "it is trained, not refused"


SURVEYED = {
    ("conv_batch_norm two_blocks", "single checkpointing"): Kind.EQUAL,
    ("no_parameters two_blocks", "pipeline 1f1b"): Kind.EQUAL,
    ("no_parameters", "pipeline zbv"): Kind.EQUAL,
    ("no_parameters own_groups", "pipeline zbv"): Kind.EQUAL,
    ("frozen_all_blocks sgd", "pipeline zbv"): Kind.EQUAL,
    ("in_place two_blocks", "tensor"): Kind.EQUAL,
    ("recording_hook set_on_blocks", "pipeline 1f1b"): Kind.EQUAL,
    ("two_blocks bfloat16 sgd", "tensor"): Kind.EQUAL,
    ("functional_call two_blocks", "dp"): Kind.REFUSED,
    ("branch_on_batch", "fsdp"): Kind.REFUSED,
    ("used_by_half tokens", "ddp"): Kind.REFUSED,
    ("used_by_half", "single micro"): Kind.NOTED,
    ("unused_expert two_blocks", "single micro"): Kind.NOTED,
    ("every_second_step two_blocks", "ddp"): Kind.REFUSED,
    ("every_second_step two_blocks", "zero2"): Kind.REFUSED,
    ("every_second_step two_blocks", "fsdp"): Kind.EQUAL,
    ("every_second_step attributes", "ddp checkpointing"): Kind.REFUSED,
    ("momentum_copy two_blocks", "single micro"): Kind.REFUSED,
    ("clamp two_blocks", "single micro"): Kind.EQUAL,
    ("post_accumulate_hook two_blocks", "single micro"): Kind.REFUSED,
    ("requires_grad_changed two_blocks", "single micro"): Kind.REFUSED,
    ("scheduled two_blocks", "pipeline 1f1b"): Kind.NOTED,
    ("scaled_by_frequency two_blocks", "fsdp"): Kind.NOTED,
    ("masked no_grad_context two_blocks", "fsdp"): Kind.NOTED,
    ("lazy post_accumulate_clamp two_blocks", "tensor"): Kind.REFUSED,
    ("gru_cell two_blocks", "single selective"): Kind.REFUSED,
    ("gradient_penalty weight_norm two_blocks", "single selective"): Kind.REFUSED,
    ("conv_batch_norm two_blocks", "single micro"): Kind.NOTED,
    ("detached left_by_blocks", "fsdp"): Kind.REFUSED,
    ("checkpoint_reentrant tied_blocks", "ddp"): Kind.REFUSED,
    ("in_place keywords two_blocks", "fsdp"): Kind.REFUSED,
    ("in_place keywords two_blocks", "single checkpointing"): Kind.REFUSED,
    ("attributes in_place_batch", "ddp checkpointing"): Kind.REFUSED,
    ("attributes python_counter", "single checkpointing"): Kind.REFUSED,
    ("hardest orthogonal two_blocks", "ddp"): Kind.NOTED,
    ("bfloat16 python_counter tokens", "pipeline 1f1b"): Kind.NOTED,
    ("in_place_batch loss_inside", "pipeline zbv"): Kind.EQUAL,
    ("in_place_batch loss_inside", "pipeline 1f1b"): Kind.EQUAL,
    ("masked recording_hook", "ddp"): Kind.NOTED,
    ("attributes conv in_place", "single selective"): Kind.REFUSED,
    ("functional_call weight_norm_head", "pipeline 1f1b"): Kind.REFUSED,
    ("lazy recording_hook sequences", "pipeline zbv"): Kind.EQUAL,
    ("parts_only recording_hook two_blocks", "pipeline 1f1b"): Kind.EQUAL,
}
"""Mistakes of earlier surveys: choices, a strategy, and the right verdict; `make test` has some."""


@pytest.mark.parametrize(
    ("names", "rival", "kind"),
    [
        pytest.param(
            *key, kind, id=" under ".join(key), marks=[pytest.mark.slow] * (number % 8 != 0)
        )
        for number, (key, kind) in enumerate(SURVEYED.items())
    ],
)
def test_a_mistake_that_a_survey_found_is_mended(names: str, rival: str, kind: Kind) -> None:
    verdict = Comparison(model(*names.split())).verdicts([BY_NAME[rival]])[rival]
    assert verdict.kind is kind, verdict.text


BF16 = Rival("fsdp bf16", "fsdp", values={"train.precision": "bf16"})


@pytest.mark.parametrize(
    ("names", "rival"),
    [
        ("float32_norms two_blocks", BF16),
        pytest.param("float32_head two_blocks", BF16, marks=pytest.mark.slow),
        ("float32_head two_blocks", BY_NAME["fsdp+pipeline zb_h1"]),
    ],
)
def test_trained_parameters_of_several_types_are_sharded(names: str, rival: Rival) -> None:
    verdict = Comparison(model(*names.split())).verdicts([rival])[rival.name]
    assert verdict.kind is Kind.EQUAL, verdict.text


REPORTED = {
    "a penalty on all weights in the loss": "penalty",
    "a momentum encoder moved in forward": "momentum_copy",
    "weights clamped in forward": "clamp",
    "a hook on a parameter": "parameter_hook",
    "a penalty on the gradient by the input": "gradient_penalty",
    "a part of the loss that the model puts on its blocks": "set_on_blocks",
    "a part of the loss that blocks keep": "left_by_blocks",
    "samples without a target that counts": "masked_items_only",
    "a table with sparse gradients": "sparse sgd",
    "a table that keeps its rows short": "max_norm",
    "float32 norms in a bfloat16 model": "float32_norms",
    "a transposed parameter": "net_strided",
    "the old weight_norm": "old_weight_norm",
    "double precision": "float64",
    "lazy layers": "lazy lazy_head",
    "complex weights": "complex_linear",
    "blocks that change their input": "in_place",
    "negatives within the batch": "contrastive",
}
"""What users have reported of their models, as choices of the grammar."""


@pytest.mark.slow
@pytest.mark.parametrize("names", REPORTED.values(), ids=REPORTED.keys())
def test_a_model_that_users_reported_is_right(names: str) -> None:
    assert wrong(Comparison(model(*names.split())).verdicts(RIVALS)) == {}


@functools.cache
def survey() -> Survey:
    """A survey of models with new seeds for TRIREME_GENERATED seconds."""
    new_survey = Survey()
    seed = time.time_ns() % 10**6 * 1000
    until = time.monotonic() + SECONDS
    while time.monotonic() < until:
        new_survey.look_at(seed, (*RIVALS, *WIDE), extra=3)
        seed += 1
    return new_survey


@pytest.mark.slow
def test_no_drawn_model_is_wrong() -> None:
    assert not survey().mistakes, survey().findings()


@pytest.mark.slow
def test_one_device_trains_nearly_all_that_is_drawn() -> None:
    """A grammar of models that do not train would prove nothing."""
    assert len(survey().invalid) <= 0.1 * survey().models, survey().invalid


def test_a_mistake_is_noticed_and_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planted mistake depends on two choices, not on a strategy."""
    shifted = Rival("shifted", "single", 1)

    def verdicts(self: Comparison, rivals: list[Rival]) -> dict[str, Verdict]:
        is_wrong = {"clipped", "dict"} <= self.model.unusual
        return {shifted.name: Verdict(Kind.WRONG if is_wrong else Kind.EQUAL, "", "other numbers")}

    monkeypatch.setattr(Comparison, "verdicts", verdicts)
    big = model("clipped", "dict", "skip", "scalar", "sgd", "answer_pair")
    smallest, verdict = shrunk(big, shifted, "other numbers")
    assert smallest.unusual - {"two_blocks"} == {"clipped", "dict"}
    assert verdict.kind is Kind.WRONG


@pytest.mark.parametrize(
    "change", ["optimizer.lr", "optimizer.weight_decay", "train.clip_norm", "train.seed"]
)
def test_other_results_are_distinguished_from_rounding(change: str) -> None:
    """A changed learning rate, decay, clipping bound or seed is not taken for rounding."""
    value = {"train.clip_norm": 0.1, "train.seed": 1}.get(change, 0.012)
    changed = Rival("other", "single", 1, {change: value})
    assert _of_mlp().verdicts([changed])["other"].kind is Kind.WRONG


@functools.cache
def _of_mlp() -> Comparison:
    return Comparison(model("mlp"))


def test_a_slow_machine_is_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "TIMEOUT", 0.05)
    monkeypatch.setattr(compare, "PATIENCE", 10_000)
    assert _of_mlp().verdicts([BY_NAME["ddp"]])["ddp"].kind is Kind.EQUAL


def test_what_one_device_does_not_train_is_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = Model.of().source().replace("return Net()", "raise RuntimeError('not built')")
    monkeypatch.setattr(Model, "source", lambda self: broken)
    with pytest.raises(Invalid, match="not built"):
        Comparison(model("mlp"))


def test_a_seed_is_a_model_and_every_choice_is_drawn() -> None:
    assert [Model.draw(seed) for seed in range(50)] == [Model.draw(seed) for seed in range(50)]
    drawn_names = {name for seed in range(3000) for _, name in Model.draw(seed).choices}
    assert drawn_names == {name for features in AXES.values() for name in features}


PLACEHOLDERS = ("BLOCKS", "CALL", "STEP", "ANSWER", "CRITERION", "PREDICTION", "AGAIN")


def test_models_are_valid_python() -> None:
    for seed in range(300):
        source = Model.draw(seed).source()
        compile(source, f"seed {seed}", "exec")
        assert not any(placeholder in source for placeholder in PLACEHOLDERS)


def test_a_smaller_model_has_one_unusual_choice_less() -> None:
    big = model("clipped", "dict", "skip")
    removed = {frozenset({"clipped", "dict", "skip"}) - small.unusual for small in big.smaller()}
    assert removed >= {frozenset({name}) for name in ("clipped", "dict", "skip")}


def test_the_plain_model_is_plain() -> None:
    assert Model.of().unusual == frozenset()
    assert set(PLAIN) == set(AXES)
    assert torch.get_default_dtype() is torch.float32
