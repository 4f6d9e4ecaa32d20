"""A model's repeating blocks: the units of sharding, recomputation, compilation and stages.

Nearly every deep model is a chain of modules of one class in a ModuleList, ModuleDict or
Sequential: the layers of a Hugging Face decoder, the stages of a ResNet, a user's nn.Sequential. So
the blocks are those children of containers, from the outside in, whose class occurs at least twice
among all children of containers. Modules that consist of modules are preferred to single layers.
What is inside a block is not searched. A model without such a chain is one unit.
"""

from collections import Counter
from collections.abc import Iterator

import torch
from torch import nn

from strategies.dims import LayoutError, did_you_mean

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def find_blocks(module: nn.Module, named: list[str] | None = None) -> list[str]:
    """The names of a model's blocks, in order; [] if it has none.

    Args:
        module: The model.
        named: The blocks that the task names. None: they are searched for.

    Raises:
        LayoutError: A name is not a module, or a block is inside another.
    """
    if named is not None:
        _check_names(module, named)
        return list(named)
    children = [
        (name, child)
        for name, child in _children_of_containers(module, "")
        if any(True for _ in child.parameters())
    ]
    composite = [(name, child) for name, child in children if any(True for _ in child.children())]
    for candidates in (composite, children):
        counts = Counter(type(child) for _, child in candidates)
        repeated = [name for name, child in candidates if counts[type(child)] > 1]
        if repeated:
            return [name for name in repeated if not _is_inside_one_of(repeated, name)]
    return []


def _is_inside_one_of(blocks: list[str], name: str) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)


def _children_of_containers(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """The children of all containers, except containers, whose children these are instead."""
    is_container = isinstance(module, CONTAINERS)
    for name, child in module.named_children():
        path = f"{prefix}.{name}" if prefix else name
        if is_container and not isinstance(child, CONTAINERS):
            yield path, child
        yield from _children_of_containers(child, path)


def _check_names(module: nn.Module, named: list[str]) -> None:
    modules = dict(module.named_modules())
    for name in named:
        if name not in modules or not name:
            hint = did_you_mean(name, modules, f"it has {', '.join(list(modules)[1:6])}, …")
            raise LayoutError(
                f"the task names the block {name!r}, which {type(module).__name__} does not have: "
                f"{hint}"
            )
        outer = [other for other in named if name.startswith(f"{other}.")]
        if outer:
            raise LayoutError(
                f"the task names the block {name!r}, which is inside the block {outer[0]!r}: name "
                "one"
            )


def separable(module: nn.Module, blocks: list[str]) -> list[str]:
    """The blocks that share no parameter with anything else, and so can be sharded separately."""
    units_of: dict[int, set[str]] = {}
    """By parameter, the blocks that hold it; "" for what is outside of the blocks."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        unit = next((block for block in blocks if name.startswith(f"{block}.")), "")
        units_of.setdefault(id(parameter), set()).add(unit)
    sharing = {unit for units in units_of.values() if len(units) > 1 for unit in units}
    return [block for block in blocks if block not in sharing]


def compile_blocks(module: nn.Module, blocks: list[str], backend: str) -> None:
    """Compiles a model block by block, in place, or as a whole if it has no blocks.

    Blocks of one class share one compilation, so that start-up does not grow with depth. Only a
    block's `forward` is compiled: names stay, and the hooks by which sharded strategies gather
    parameters stay outside of the graph. Choose it on GPUs for anything that trains longer than
    compiling takes (a minute or so). `aot_eager` compiles nothing and shows whether a model can be
    compiled. https://docs.pytorch.org/docs/stable/generated/torch.compile.html

    DDP sends gradients after each block's backward, while those below still compute. So torch must
    cut its graph where DDP's buckets end only if the model is compiled as a whole; it would make
    several small graphs of every block
    (https://docs.pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer).

    Args:
        module: The model.
        blocks: Names of its blocks.
        backend: A backend of torch.compile.

    Raises:
        LayoutError: There is no such backend.
    """
    backends = torch.compiler.list_backends(exclude_tags=())
    if backend not in backends:
        raise LayoutError(
            f"train.compile_backend is {backend!r}: write one of {', '.join(backends)}"
        )
    torch._dynamo.config.optimize_ddp = not blocks
    for name in blocks or [""]:
        block = module.get_submodule(name)
        block.forward = torch.compile(block.forward, backend=backend)
