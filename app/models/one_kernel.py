"""Small functions whose operations torch.compile fuses into one kernel on a GPU.

They are compiled even where the model is not. Operation by operation each of them would read and
write its tensors in the GPU's memory, and that is all the time they take.
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
    """Compile a function for tensors on a GPU for which torch can compile.

    It is for functions that are called inside an autograd.Function, because nothing in them has a
    gradient.

    Args:
        function: Its first argument is the tensor whose device decides.
    """

    @functools.cache
    def compiled() -> Callable[..., Any]:
        # torch.compile takes seconds to import, so it waits for the first call on a GPU. Without
        # fullgraph the function still runs after too many recompilations.
        return torch.compile(function)

    @functools.wraps(function)
    def call(tensor: torch.Tensor, *args: Any) -> Any:
        if torch.compiler.is_compiling():  # first, so that a compiler traces none of the rest
            return function(tensor, *args)
        if tensor.is_cuda and compiles(tensor.device):
            return compiled()(tensor, *args)
        return function(tensor, *args)

    return call  # type: ignore[return-value]


@functools.cache
def compiles(device: torch.device) -> bool:
    """Whether torch.compile has what it needs for a GPU.

    That is Triton and a C compiler, which many images do not have.
    """
    is_new_enough = torch.version.hip is not None
    if not is_new_enough:
        is_new_enough = torch.cuda.get_device_capability(device) >= (7, 0)
    compilers = (os.environ.get("CC", ""), "gcc", "clang")
    has_compiler = any(shutil.which(compiler) for compiler in compilers)
    return is_new_enough and find_spec("triton") is not None and has_compiler
