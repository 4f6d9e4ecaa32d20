"""What a coordinate check measures: powers of the width, and whether a rate holds."""

import math

import pytest

from app.config.io import load_config
from app.errors import UserError
from experiments.coordinate_check import at_widths, check, growth, table

pytestmark = pytest.mark.pure

DIGITS = [
    "task=image_classification",
    "task_args={data: digits, model: mlp, model_args: {hidden: [256, 256]}}",
    "optimizer.lr=0.01",
    "train.global_batch_size=32",
]
BASE = "optimizer.width_transfer={base: {model_args: {hidden: [32, 32]}}}"


def test_growth_is_the_power_of_the_width() -> None:
    assert growth({64: 3.0, 128: 3.0}) == pytest.approx(0)
    assert growth({width: 5 * width**-0.5 for width in (64, 128, 512)}) == pytest.approx(-0.5)
    assert math.isnan(growth({64: 0.0, 128: 1.0}))
    assert math.isnan(growth({64: math.inf, 128: 1.0}))


@pytest.mark.parametrize(
    ("optimizer", "widths"),
    [
        ("adamw", [32, 128, 512]),
        pytest.param("sgd", [32, 128, 512], marks=pytest.mark.slow),
        # Its products are of matrices as wide, in 16 bits.
        pytest.param("muon", [32, 128, 256], marks=pytest.mark.slow),
    ],
)
def test_the_rate_holds_with_the_transfer_and_not_without(
    optimizer: str, widths: list[int]
) -> None:
    config = load_config([], [*DIGITS, BASE, f"optimizer.name={optimizer}"])
    outcome = check(config, widths, steps=3)
    assert outcome.holds, outcome.verdict
    assert outcome.verdict.startswith("the rate holds: what 3 steps change follows")
    modules = {row.module for row in outcome.transferred}
    assert modules == {"blocks.0", "blocks.1", "head"}
    assert len(outcome.transferred) == len(modules) * 4
    at_base = {(row.module, row.step): row.sizes[32] for row in outcome.transferred}
    assert at_base == {(row.module, row.step): row.sizes[32] for row in outcome.plain}
    without = [row.change_growth or 0 for row in outcome.plain if row.step == 3]
    assert max(abs(power) for power in without) > 0.3
    text = table(outcome)
    assert "without width_transfer" in text and text.endswith(outcome.verdict)


def test_widths_are_those_of_the_base_models_first_number() -> None:
    base = "{model_args: {hidden: [32, 16], dropout: 0.5}}"
    keys = [
        *DIGITS,
        f"optimizer.width_transfer={{base: {base}}}",
        "task_args.model_args.dropout=0.5",
    ]
    wide = {"hidden": [64, 32], "dropout": 0.5}
    assert at_widths(load_config([], keys), [64])[64].task_args["model_args"] == wide
    is_base = load_config([], [*DIGITS, BASE, "task_args.model_args.hidden=[32, 32]"])
    assert at_widths(is_base, [96])[96].task_args["model_args"]["hidden"] == [96, 96]


def test_an_experiment_that_does_not_say_its_width_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no optimizer\.width_transfer, which says what"):
        check(load_config([], DIGITS), [32, 64], steps=1)
    config = load_config([], [*DIGITS, BASE])
    with pytest.raises(UserError, match="--widths is 32: write two or more, such as 64,128"):
        check(config, [32], steps=1)
