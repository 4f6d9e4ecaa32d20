"""Recordings from sound files, as numbers from -1 to 1.

WAV files are read by scipy, and every other format that libsndfile has (FLAC, OGG, MP3, …) by the
package soundfile, if it is installed.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from app.errors import UserError

Samples = npt.NDArray[np.float32]
WAV = (".wav", ".wave")


def read_sound(path: Path, rate: int, place: str) -> Samples:
    """The samples of a recording; several channels are averaged.

    Args:
        path: The file.
        rate: How many samples a second must have.
        place: Where the file is named, for messages.

    Raises:
        UserError: The file cannot be read, or has another rate.
    """
    samples, file_rate = _read(path, place)
    if file_rate != rate:
        raise UserError(
            f"{place}: {path} has {file_rate:,} samples a second, and the model takes {rate:,}; "
            f"convert it: ffmpeg -i {path.name} -ac 1 -ar {rate} NEW.wav"
        )
    numbers = samples.astype(np.float32)
    if samples.dtype == np.uint8:  # WAV files of 8 bits have silence at 128
        numbers -= np.float32(128)
        numbers /= np.float32(128)
    elif samples.dtype.kind == "i":
        numbers /= np.float32(-np.iinfo(samples.dtype).min)
    return numbers if numbers.ndim == 1 else numbers.mean(1, dtype=np.float32)


def sound_length(path: Path, place: str) -> int:
    """The number of samples of a recording, without reading them all.

    Args:
        path: The file.
        place: Where the file is named, for messages.

    Raises:
        UserError: The file cannot be read.
    """
    if path.suffix.lower() in WAV:
        samples, _ = _read(path, place)
        return len(samples)
    try:
        return int(_soundfile(path, place).info(str(path)).frames)
    except RuntimeError as error:
        raise _unreadable(path, place, error) from error


def _read(path: Path, place: str) -> tuple[npt.NDArray[Any], int]:
    """The samples (n,) or (n, channels) as they are in the file, and their rate."""
    if not path.is_file():
        raise UserError(f"{place} names {path}, which is not there; write an existing file")
    if path.suffix.lower() not in WAV:
        try:
            samples, rate = _soundfile(path, place).read(str(path), dtype="float32")
        except RuntimeError as error:
            raise _unreadable(path, place, error) from error
        return samples, int(rate)
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings(action="ignore"):  # of parts of the file that are not sound
            rate, samples = wavfile.read(path, mmap=True)
    except Exception as error:  # for damaged files from scipy, struct or NumPy
        try:
            with warnings.catch_warnings(action="ignore"):  # 24 bits cannot be mapped
                rate, samples = wavfile.read(path)
        except Exception:
            raise _unreadable(path, place, error) from error
    return samples, int(rate)


def _soundfile(path: Path, place: str) -> ModuleType:
    try:
        import soundfile
    except ImportError as error:
        raise UserError(
            f"{place}: {path} needs the package soundfile: pip install soundfile, "
            "or convert it to .wav"
        ) from error
    return soundfile


def _unreadable(path: Path, place: str, error: Exception) -> UserError:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return UserError(f"{place}: {path} cannot be read as sound ({lines[-1].rstrip('.')})")
