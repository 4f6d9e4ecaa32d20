"""Every strategy and every composition on pretended CUDA devices: where tensors are, and where the host waits."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.running import ROOT
from tests.strategies.fake_cuda.cases import CASES
from tests.strategies.fake_cuda.device import NoFakeCUDA, library

Ask = Callable[[int], list[str]]


@pytest.fixture(scope="module")
def problems() -> Iterator[Ask]:
    """What is wrong with the case of that number, tried in a fork of one process."""
    try:
        library()
    except NoFakeCUDA as why:
        pytest.skip(str(why))
    command = [sys.executable, "-m", "tests.strategies.fake_cuda"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:

        def ask(number: int) -> list[str]:
            print(number, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield ask
        process.stdin.close()


CHOSEN = [pytest.param(i, id=case.name, marks=[pytest.mark.slow] * case.slow) for i, case in enumerate(CASES)]


@pytest.mark.parametrize("number", CHOSEN)
def test_two_steps_on_cuda(problems: Ask, number: int) -> None:
    assert problems(number) == []
