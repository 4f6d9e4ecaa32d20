"""Arguments of the built-in tasks are known without importing PyTorch."""

import inspect
import subprocess
import sys

import pytest

from app.config.task_names import BUILT_IN
from app.config.task_source import argument_names
from app.tasks import find_task


@pytest.mark.parametrize("task", BUILT_IN)
def test_the_arguments_of_a_built_in_task_are_those_of_its_class(task: str) -> None:
    assert argument_names(task) == list(inspect.signature(find_task(task)).parameters)


def test_a_misspelt_argument_of_a_task_is_told_before_torch_is_imported() -> None:
    program = (
        "import sys; from app.config.io import load_config; from app.errors import UserError\n"
        "try: load_config([], ['task=tabular', 'task_args.targt=price'])\n"
        "except UserError as error: print(error, 'torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program]
    output = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    assert output.startswith("task_args.targt: task 'tabular' has no such argument")
    assert "did you mean 'target'?" in output and output.endswith("False\n")
