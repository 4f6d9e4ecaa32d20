"""Which modules are a model's repeating blocks: the unit of sharding, recomputation, compilation, pipeline stages.

Nearly every deep model is a chain of modules of one class held by a ModuleList, ModuleDict or
Sequential: the layers of a Hugging Face decoder, the stages of a ResNet, a user's nn.Sequential.
So: of the containers met from the outside in, take the children whose class occurs at least twice
among all containers' children, preferring modules made of modules to bare layers. What is inside a
block is not looked at. A model without such a chain is one unit.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from strategies.dims import LayoutError, did_you_mean

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(module: nn.Module, named: list[str] | None = None) -> list[str]:
    """Names of the blocks, in order: those `named`, checked, or those found; [] if the model has none.

    Raises:
        LayoutError: a name that is not a module, or a block inside another.
    """
    if named is not None:
        return _checked(module, named)
    children = [
        (name, child) for name, child in _held(module, "") if any(True for _ in child.parameters())
    ]
    composite = [(name, child) for name, child in children if any(True for _ in child.children())]
    for candidates in (composite, children):
        classes = Counter(type(child) for _, child in candidates)
        chain = [name for name, child in candidates if classes[type(child)] > 1]
        if chain:
            return [
                name for name in chain if not any(name.startswith(other + ".") for other in chain)
            ]
    return []


def _held(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """What containers hold. A container held by a container is itself looked into, not a block."""
    inside = isinstance(module, CONTAINERS)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if inside and not isinstance(child, CONTAINERS):
            yield path, child
        yield from _held(child, path)


def _checked(module: nn.Module, named: list[str]) -> list[str]:
    modules = dict(module.named_modules())
    for name in named:
        if name not in modules or not name:
            hint = did_you_mean(name, modules, f"it has {', '.join(list(modules)[1:6])}, …")
            raise LayoutError(
                f"the task names the block {name!r}, which {type(module).__name__} does not have: "
                f"{hint}"
            )
        inside = [other for other in named if name.startswith(other + ".")]
        if inside:
            raise LayoutError(
                f"the task names the block {name!r}, which is inside the block {inside[0]!r}: name "
                "one"
            )
    return list(named)


def separable(module: nn.Module, blocks: list[str]) -> list[str]:
    """The blocks that share no parameter with anything outside them, so that they can be sharded on their own."""
    owners: dict[int, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((block for block in blocks if name.startswith(block + ".")), "")
        owners.setdefault(id(parameter), set()).add(unit)
    shared = {unit for units in owners.values() if len(units) > 1 for unit in units}
    return [block for block in blocks if block not in shared]


def compile_blocks(module: nn.Module, blocks: list[str], backend: str) -> None:
    """torch.compile, block by block: blocks of one class share one compilation, and start-up does not grow with depth.

    Only a block's `forward` is compiled, in place: names stay, and the hooks by which sharded
    strategies gather parameters stay outside of the graph, where they work as ever. A model without
    blocks is compiled whole. Choose it on GPUs for anything that trains longer than compiling takes
    (a minute or so); `aot_eager` compiles nothing and shows whether a model can be.
    https://docs.pytorch.org/docs/stable/generated/torch.compile.html

    DDP's gradients leave after each block's backward, while those below still compute. Only a model
    that is compiled whole needs torch to cut its graph where DDP's buckets end, which would make
    several small graphs of every block
    (https://docs.pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer).

    Raises:
        LayoutError: no such backend.
    """
    known = torch.compiler.list_backends(exclude_tags=())
    if backend not in known:
        raise LayoutError(f"train.compile_backend is {backend!r}: write one of {', '.join(known)}")
    torch._dynamo.config.optimize_ddp = not blocks
    for name in blocks or [""]:
        block = module.get_submodule(name)
        block.forward = torch.compile(block.forward, backend=backend)
