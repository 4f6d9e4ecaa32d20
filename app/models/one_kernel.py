"""Small functions whose operations a compiler makes one kernel of on a GPU, also where the model is not compiled.

Operation by operation each reads and writes its tensors in the GPU's memory, and that is all the time they take.
"""

import functools
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, TypeVar

import torch

Function = TypeVar("Function", bound=Callable[..., Any])


def one_kernel(function: Function) -> Function:
    """The function, compiled where its first argument is on a GPU for which torch can compile.

    It is for what an autograd function of its own calls: nothing here has a gradient.
    """

    @functools.cache
    def compiled() -> Any:  # when it is needed first, as torch.compile takes seconds to import
        return torch.compile(function)  # not fullgraph: after too many unlike calls it then runs as it is written

    @functools.wraps(function)
    def chosen(first: torch.Tensor, *others: Any) -> Any:
        if torch.compiler.is_compiling() or not (first.is_cuda and compiles(first.device)):
            return function(first, *others)
        return compiled()(first, *others)

    return chosen  # type: ignore[return-value]


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether torch.compile has all that it needs for a GPU: Triton, and a C compiler, which many images lack."""
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    able = torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (7, 0)
    return able and find_spec("triton") is not None and any(map(shutil.which, compilers))
