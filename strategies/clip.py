"""The exact norm of the gradient over all shards, and clipping to a bound: Pascanu et al. 2013.

    ‖g‖ = √ Σ over parameters ‖gₚ‖²       g ← g · min(1, c / (‖g‖ + 1e-6))

A rank has whole gradients (replicated), shards (over some dimensions of the mesh), or a mixture:
with fsdp × tp the weight of a norm is split over dp_shard only, and that of a linear layer over
both. The sum of squares is computed for each *set of groups that gradients are split over*, and
all-reduced over exactly those groups. Then these sums are added, so that every element counts once,
whatever the mesh. Replicated gradients need no communication at all.

The norm stays on the device, so no host waits for it. If any gradient on any rank is inf or nan, so
is the norm, on every rank, and the loop can decide by it. Without a bound the gradients are not
changed.

On a CPU torch adds a tensor's squares one after another in a few float32 sums, whose error grows
with the tensor: 1e-5 of the norm for a million numbers, 3e-3 for forty million. So there gradients
are measured in pieces, which is accurate to float32's rounding and takes as long.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from strategies.grad_sync import local

Groups = tuple[dist.ProcessGroup, ...]
PIECE = 1 << 15
"""Numbers in a piece of a gradient that is measured at once on a CPU."""


class GradNorm:
    """Measures and clips the gradients of a set of parameters.

    Parameters that are split over the same process groups are collected once, at construction.

    Args:
        parameters: Each parameter once.
        device: Where the norm is wanted.
        stage_group: The stages of a pipeline, each of which has other parameters; None without one.
        scaled_only: Parameters whose gradients are scaled here but measured by another rank, such
            as a tied embedding on a later stage.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        device: torch.device,
        stage_group: dist.ProcessGroup | None = None,
        scaled_only: Sequence[Tensor] = (),
    ) -> None:
        self._device = device
        self._stage_group = stage_group
        self._scaled = [*parameters, *scaled_only]
        self._by_groups: dict[Groups, list[Tensor]] = {}
        """In the order of the model, and so the same on every rank."""
        for parameter in parameters:
            self._by_groups.setdefault(_split_groups(parameter), []).append(parameter)

    @torch.no_grad()
    def __call__(self, bound: float | None) -> Tensor:
        """Measures the gradients, and scales them down to the norm `bound` if they are longer.

        Returns:
            Their 2-norm before scaling, 0-dimensional.
        """
        norms = [
            self._norm(_local_gradients(parameters), groups)
            for groups, parameters in self._by_groups.items()
        ]
        if len(norms) == 1:
            norm = norms[0]
        else:
            norm = get_total_norm(norms or [torch.zeros((), device=self._device)])
        if self._stage_group is not None:
            norm = _norm_over(norm, (self._stage_group,))
        if bound is not None:
            carriers = [_with_gradient(shard) for shard in _local_gradients(self._scaled)]
            clip_grads_with_norm_(carriers, bound, norm)
        return norm

    def _norm(self, gradients: list[Tensor], groups: Groups) -> Tensor:
        """The norm of gradients that are all split over the same groups."""
        pieces: list[Tensor] = []
        for gradient in gradients:
            if gradient.is_complex():
                gradient = torch.view_as_real(gradient.resolve_conj())
            if gradient.is_cpu and gradient.numel() > PIECE:
                pieces += gradient.reshape(-1).split(PIECE)
            else:
                pieces.append(gradient)
        norm = get_total_norm([piece.float() for piece in pieces] or [torch.zeros(())])
        return _norm_over(norm.to(self._device), groups)


def _norm_over(norm: Tensor, groups: Groups) -> Tensor:
    """The norm of what all ranks of the groups have together."""
    if not groups:
        return norm
    square = norm.square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def _local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """This rank's shards of those gradients that exist and are not empty."""
    shards = []
    for parameter in parameters:
        gradient = _gradient(parameter)
        if gradient is None:
            continue
        shard = local(gradient)
        if shard.numel():
            shards.append(shard)
    return shards


def _gradient(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, split as the parameter is.

    torch 2.11 may leave it as terms that are still to be summed over workers (Partial).
    """
    gradient = parameter.grad
    if not isinstance(parameter, DTensor) or not isinstance(gradient, DTensor):
        return gradient
    if gradient.placements != parameter.placements:
        gradient = gradient.redistribute(placements=parameter.placements)
        parameter.grad = gradient
    return gradient


def _with_gradient(shard: Tensor) -> Tensor:
    """A tensor whose gradient is this shard: torch scales gradients of tensors, many at once."""
    carrier = shard.detach()
    carrier.grad = shard
    return carrier


def _split_groups(parameter: Tensor) -> Groups:
    """The groups over which a parameter, and so its gradient, is split."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh = parameter.device_mesh
    return tuple(
        mesh.get_group(mesh_dim)
        for mesh_dim, placement in enumerate(parameter.placements)
        if not placement.is_replicate()
    )
