"""torch.compile, block by block: blocks of one class share one compilation, and start-up does not grow with depth.

Only a block's `forward` is compiled, in place: names stay, and the hooks by which sharded strategies gather parameters
stay outside of the graph, where they work as ever. A model without blocks is compiled whole. Choose it on GPUs for
anything that trains longer than compiling takes (a minute or so); `aot_eager` compiles nothing and shows whether a
model can be. https://docs.pytorch.org/docs/stable/generated/torch.compile.html.
"""

from __future__ import annotations

import torch
from torch import nn

from strategies.dims import LayoutError


def apply(module: nn.Module, blocks: list[str], backend: str) -> None:
    """Replaces the forward of the blocks, in place.

    Raises:
        LayoutError: no such backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise LayoutError(f"train.compile_backend is {backend!r}: write one of {', '.join(known)}")
    for name in blocks or [""]:
        block = module.get_submodule(name)
        block.forward = torch.compile(block.forward, backend=backend)
