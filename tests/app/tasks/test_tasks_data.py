"""What each built-in task makes of its data: the held-out part, augmentation, windows, units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from app.data.loader import fetch, train_batches
from app.tasks import load_task
from app.tasks.vision import shifted
from tests.app.tasks.test_tasks import CPU, SIXTEEN, built, evaluated, one_batch

pytestmark = pytest.mark.usefixtures("own_cache")


def test_mnist_holds_out_a_thousand_class_by_class_always_the_same() -> None:
    first = load_task("image_classification", {"data": "mnist", "eval_samples": 1000})
    held_out = first.eval_data()
    assert held_out is not None
    images, train_labels = fetch(first.train_data(), [(i, i) for i in range(4000)])
    held, held_labels = fetch(held_out, [(i, i) for i in range(1000)])
    assert torch.bincount(train_labels).tolist() == [400] * 10
    assert torch.bincount(held_labels).tolist() == [100] * 10
    assert images.mean().abs() < 1e-4 and (images.std() - 1).abs() < 1e-4
    assert not (images.flatten(1)[:, None] == held.flatten(1)[None, :20]).all(-1).any()


def test_held_out_sizes(tmp_path: Path) -> None:
    def sizes(data: str, **changes: Any) -> tuple[int, int]:
        task: Any = load_task("image_classification", {"data": data, **changes})
        return len(task.train_data()), len(task.eval_data() or ())

    assert sizes("digits") == (1438, 359)
    assert sizes("digits", eval_samples=97) == (1700, 97)
    assert sizes("digits", eval_samples=0) == (1797, 0)
    images, labels, own = np.zeros((9, 8, 8), dtype=np.uint8), np.arange(9) % 3, str(tmp_path / "a.npz")
    np.savez(own, x_train=images, y_train=labels, x_test=images[:4], y_test=labels[:4])
    assert sizes(own) == (9, 4), "its own test part"
    assert sizes(own, eval_samples=3) == (6, 3)


def test_shifts_move_images_and_are_a_function_of_the_position() -> None:
    images = torch.arange(1, 26).float().reshape(1, 1, 5, 5).repeat(200, 1, 1, 1)
    moved = shifted(images, 2, np.arange(200, dtype=np.uint64))
    assert torch.equal(moved, shifted(images, 2, np.arange(200, dtype=np.uint64)))
    centres = [(image[0] == 13).nonzero()[0].tolist() for image in moved]
    assert {tuple(centre) for centre in centres} == {(row, column) for row in range(5) for column in range(5)}
    for image, (row, column) in zip(moved, centres, strict=True):
        padded = nn.functional.pad(images[0, 0], (2, 2, 2, 2))
        assert torch.equal(image[0], padded[4 - row : 9 - row, 4 - column : 9 - column])


def test_augmented_training_is_the_same_after_a_resume_and_on_more_workers() -> None:
    task = load_task("image_classification", {"data": "digits", "augment_shift": 2})

    def load(**changes: Any) -> list[Tensor]:
        given = {"dp_rank": 0, "dp_size": 1, "samples_seen": 0, "steps": 4, "micro_batch_size": None} | changes
        steps = train_batches(task.train_data(), seed=1, global_batch_size=8, device=CPU, **given)
        return [torch.cat([inputs for inputs, _ in step]) for step in steps]

    whole = load()
    for one, other in zip(whole[2:], load(samples_seen=16, steps=2, micro_batch_size=3), strict=True):
        assert torch.equal(one, other)
    halves = [load(dp_rank=rank, dp_size=2) for rank in range(2)]
    for step in range(4):
        assert torch.equal(whole[step], torch.cat([half[step] for half in halves]))
    second_epoch = load(samples_seen=8 * 1438, steps=1)  # the same images come again, moved otherwise
    assert not any(torch.equal(second_epoch[0], step) for step in whole)


def test_language_data_is_held_out_at_the_end(text: str, tmp_path: Path) -> None:
    task = load_task("language_modelling", {"data": text, "eval_samples": 7, **SIXTEEN})
    train, held = task.train_data(), task.eval_data()
    assert held is not None and len(held) == 7  # type: ignore[arg-type]
    content = Path(text).read_bytes()
    total = (len(content) - 1) // 16
    assert len(train) == total - 7  # type: ignore[arg-type]
    assert bytes(held[0][0].tolist()) == content[16 * (total - 7) : 16 * (total - 6)]
    assert task.unit == "tokens" and task.items(one_batch(task, 3)) == 48
    assert task.heads() == 2 and task.tensor_plan(built(task))


def test_language_from_a_token_file(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 70_000, 5000).astype(np.uint32)
    (tmp_path / "a.bin").write_bytes(tokens.tobytes())
    given = {"data": str(tmp_path / "a.bin"), "token_dtype": "uint32", "vocab_size": 70_000, **SIXTEEN}
    task = load_task("language_modelling", given)
    assert task.train_data()[2][0].tolist() == tokens[32:48].tolist()
    assert "bits_per_byte" not in task.metrics(built(task), one_batch(task, 2))


def test_regression_figures_are_in_the_targets_units(table: str) -> None:
    task = load_task("tabular", {"data": table, "target": "y"})
    held_out = task.eval_data()
    assert held_out is not None
    targets = torch.stack([held_out[i][1] for i in range(len(held_out))])  # type: ignore[arg-type]
    in_units = targets * task.std + task.mean  # type: ignore[attr-defined]

    class Mean(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return targets.mean().expand(len(x), 1)

    figures = evaluated(task, Mean(1, 1))
    assert figures["r2"] == pytest.approx(0, abs=1e-5)
    assert figures["mse"] == pytest.approx(in_units.var(unbiased=False).item(), rel=1e-5)
    assert figures["rmse"] == pytest.approx(in_units.std(unbiased=False).item(), rel=1e-5)
    assert figures["mae"] == pytest.approx((in_units - in_units.mean()).abs().mean().item(), rel=1e-5)


def test_table_columns_and_kinds(table: str) -> None:
    """`kind` auto; rows without a target are left out."""
    regression = load_task("tabular", {"data": table, "target": "y", "ignore": ["class", "code"]})
    assert len(regression.train_data()) + len(regression.eval_data()) == 199  # type: ignore[arg-type]
    assert one_batch(regression, 1)[0].shape == (1, 2 + 2)  # a, its missing mark; kinds x and z
    numbers: Any = load_task("tabular", {"data": table, "target": "code"})
    assert not numbers.classes
    names: Any = load_task("tabular", {"data": table, "target": "code", "kind": "classification"})
    assert names.classes == ["0", "1", "2"]
