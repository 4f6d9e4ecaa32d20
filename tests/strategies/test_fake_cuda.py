"""Every strategy and composition on fake CUDA devices: no tensor on the host, no unknown wait."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.running import ROOT
from tests.strategies.fake_cuda.cases import CASES
from tests.strategies.fake_cuda.device import NoFakeCUDA, library

FindProblems = Callable[[int], list[str]]


@pytest.fixture(scope="module")
def find_problems() -> Iterator[FindProblems]:
    """A function from the number of a case to its problems; one process tries all cases."""
    try:
        library()
    except NoFakeCUDA as reason:
        pytest.skip(str(reason))
    command = [sys.executable, "-m", "tests.strategies.fake_cuda"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def find(number: int) -> list[str]:
            print(number, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield find
        process.stdin.close()


CASE_NUMBERS = [
    pytest.param(number, id=case.name, marks=[pytest.mark.slow] if case.slow else [])
    for number, case in enumerate(CASES)
]


@pytest.mark.parametrize("number", CASE_NUMBERS)
def test_a_case_has_no_problems(find_problems: FindProblems, number: int) -> None:
    assert find_problems(number) == []
