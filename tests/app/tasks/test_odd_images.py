"""Images as users have them: each is read as it is meant, or refused with one sentence."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.data.loader import fetch
from app.tasks import load_task
from tests.app.tasks.test_odd_texts import refusal

PIXELS = np.random.RandomState(0).randint(0, 255, (40, 8, 8)).astype(np.uint8)
LABELS = np.arange(40) % 2


def images(path: Path, pixels: Any = PIXELS, labels: Any = LABELS, **task_args: Any) -> Any:
    """A task on these images, written to a .npz or .pt file."""
    content = {"images": pixels, "labels": labels}
    if path.suffix == ".npz":
        np.savez(path, **content)
    else:
        torch.save(content, path)
    return load_task("image_classification", {"data": str(path), "model": "mlp", **task_args})


def colours(*, axis: int, count: int = 3, pixels: np.ndarray = PIXELS) -> np.ndarray:
    """Images with `count` equal channels along an axis."""
    return np.stack([pixels] * count, axis)


@pytest.mark.parametrize(
    "kind", ["u2", "u4", "u8", "i2", "i8", "f2", "f4", "f8", ">u2", ">f4", ">i8", "g"]
)
def test_pixels_of_every_type_are_read(tmp_path: Path, kind: str) -> None:
    expected = images(tmp_path / "a.npz", augment_shift=1)
    task = images(tmp_path / "b.npz", PIXELS.astype(kind), LABELS.astype(kind), augment_shift=1)
    for picks in ([(0, 0), (1, 1)], [(31, 7)]):
        inputs, targets = fetch(task.train_data(), picks)
        expected_inputs, labels = fetch(expected.train_data(), picks)
        assert torch.allclose(inputs, expected_inputs, atol=1e-5) and torch.equal(targets, labels)


TENSOR = torch.from_numpy(PIXELS)


@pytest.mark.parametrize(
    "pixels",
    [
        TENSOR.float().requires_grad_(),
        TENSOR.bfloat16(),
        TENSOR.float().to_sparse(),
        list(TENSOR),
        PIXELS.tolist(),
    ],
    ids=["with gradients", "bfloat16", "sparse", "list of tensors", "lists"],
)
def test_tensors_of_every_kind_are_read(tmp_path: Path, pixels: Any) -> None:
    task = images(tmp_path / "a.pt", pixels, LABELS.tolist())
    expected = images(tmp_path / "a.npz")
    inputs, _ = fetch(task.train_data(), [(0, 0)])
    expected_inputs, _ = fetch(expected.train_data(), [(0, 0)])
    assert torch.allclose(inputs, expected_inputs, atol=1e-5)


@pytest.mark.parametrize(
    ("pixels", "shape"),
    [
        (colours(axis=-1), (3, 8, 8)),
        (colours(axis=1), (3, 8, 8)),
        (colours(axis=-1, count=2), (2, 8, 8)),
        (colours(axis=-1, count=5), (5, 8, 8)),
        (colours(axis=1, count=5), (5, 8, 8)),
        (colours(axis=-1, pixels=PIXELS[:, :4, :4]), (3, 4, 4)),
        (colours(axis=-1, pixels=PIXELS[:, :, :6]), (3, 8, 6)),
    ],
)
def test_the_axis_of_channels_is_recognized(
    tmp_path: Path, pixels: np.ndarray, shape: tuple[int, ...]
) -> None:
    inputs, _ = fetch(images(tmp_path / "a.npz", pixels).train_data(), [(0, 0)])
    assert inputs.shape[1:] == shape


def test_boolean_labels_and_a_constant_channel_are_read(tmp_path: Path) -> None:
    constant = np.stack([PIXELS / 255, np.full(PIXELS.shape, 0.1)], 1)
    task = images(tmp_path / "a.npz", constant, LABELS.astype(bool))
    inputs, targets = fetch(task.train_data(), [(i, i) for i in range(8)])
    assert inputs[:, 1].abs().max() < 1e-6 and targets.dtype == torch.int64


def ragged() -> np.ndarray:
    """Two images of different sizes."""
    return np.array([PIXELS[0], PIXELS[0, :4]], dtype=object)


BAD_IMAGES: list[tuple[Any, Any, str]] = [
    (np.where(PIXELS == 3, np.nan, PIXELS), LABELS, "not finite in float32"),
    (np.where(PIXELS == 3, -np.inf, PIXELS), LABELS, "not finite in float32"),
    (PIXELS * 1e300, LABELS, "not finite in float32"),
    (PIXELS + 1j, LABELS, "type complex128; they must be numbers"),
    (PIXELS.astype("M8[s]"), LABELS, "they must be numbers"),
    (ragged(), LABELS[:2], "it holds Python objects, as of images of several sizes"),
    (PIXELS, LABELS - 1, "label -1 of image 0 is out of range; labels begin at 0"),
    (PIXELS, 0 * LABELS, "has one class only"),
    (PIXELS, np.eye(2)[LABELS], "are one-hot, of shape (40, 2); write one whole number per image"),
    (PIXELS, np.eye(2, dtype=bool)[LABELS], "are one-hot"),
    (PIXELS, np.full((40, 2), 0.5), "one whole number per image, not float64 (40, 2)"),
    (PIXELS, LABELS / 2, "one whole number per image"),
    (PIXELS, np.where(LABELS, np.nan, 0), "one whole number per image"),
    (PIXELS, np.where(LABELS, -np.inf, 0), "one whole number per image"),
    (PIXELS, LABELS.astype(str), "one whole number per image, not <U"),
]


@pytest.mark.parametrize(("pixels", "labels", "message"), BAD_IMAGES)
@pytest.mark.filterwarnings("error")
def test_images_that_cannot_be_learnt_are_refused(
    tmp_path: Path, pixels: Any, labels: Any, message: str
) -> None:
    assert message in refusal(lambda: images(tmp_path / "a.npz", pixels, labels), tmp_path)


def test_tensors_that_are_no_arrays_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.pt"
    for pixels in ([TENSOR[0], TENSOR[0, :4]] * 20, TENSOR.float().to(torch.float8_e4m3fn)):
        message = refusal(partial(images, file, pixels, LABELS.tolist()), tmp_path)
        assert "that is not an array of numbers" in message
    message = refusal(lambda: images(file), tmp_path)
    assert "other things than tensors, such as NumPy's" in message


def test_folders_and_files_of_pictures_are_refused(tmp_path: Path) -> None:
    def read(path: Path) -> Any:
        return load_task("image_classification", {"data": str(path)})

    (tmp_path / "cats").mkdir()
    (tmp_path / "cats" / "one.JPG").write_bytes(b"\xff\xd8 damaged")
    message = refusal(lambda: read(tmp_path), tmp_path)
    expected = "is a folder of pictures (cats/one.JPG), which are not read; write them into a .npz"
    assert expected in message
    message = refusal(lambda: read(tmp_path / "cats" / "one.JPG"), tmp_path)
    assert "is not image data but one picture" in message
    for name in ("empty.npz", "empty.pt"):
        (tmp_path / name).write_bytes(b"")
        assert "cannot be read" in refusal(partial(read, tmp_path / name), tmp_path)
