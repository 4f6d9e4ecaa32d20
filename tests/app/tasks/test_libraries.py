"""Libraries that tasks import say nothing that a user can do nothing about."""

import subprocess
import sys

import pytest

IMPORTS = "from app.tasks.huggingface import lora, quantized\nlora.library()\nquantized.library()\n"


@pytest.mark.slow
def test_importing_the_libraries_of_adapters_prints_nothing() -> None:
    words = [sys.executable, "-c", IMPORTS]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    assert ended.stdout + ended.stderr == ""
