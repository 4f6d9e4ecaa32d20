"""The total gradient norm over every shard, and clipping to it, exactly: Pascanu et al. 2013.

    ‖g‖ = √ Σ over parameters ‖gₚ‖²       g ← g · min(1, c / (‖g‖ + 1e-6))

A rank holds whole gradients (replicated), shards (over some dimensions of the mesh), or a mixture:
with fsdp × tp a norm's weight is split over dp_shard only and a linear layer's over both. The sum
of squares is taken per *set of groups that a gradient is split over*, each such sum is all-reduced
over exactly those groups, and the sums are added; so that every element counts once, whatever the
mesh. Replicated gradients need no communication at all.

The norm stays on the device: no host waits for it. It is inf or nan if any gradient on any rank is,
on every rank alike, so the loop can decide on it. Without a bound the gradients are not touched.

On the CPU torch adds a tensor's squares one after another in a few float32 sums, whose error grows
with its size: 1e-5 of a million numbers' norm, 3e-3 of forty million's. So there gradients are
measured in pieces, which is right to float32's rounding and takes as long.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from strategies.grad_sync import local

Groups = tuple[dist.ProcessGroup, ...]
PIECE = 1 << 15
"""Numbers that are measured at once on a CPU."""


class GradNorm:
    """Measures and clips the gradients of these parameters; which belong together is found once.

    parameters: each once. device: where the norm is wanted. extra: a group over which further
    parameters are spread (the stages of a pipeline). also: parameters that others count (a tied
    embedding's on a later stage) and that are
    scaled here.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        device: torch.device,
        extra: dist.ProcessGroup | None = None,
        also: Sequence[torch.Tensor] = (),
    ) -> None:
        self.device, self.extra, self.all = device, extra, [*parameters, *also]
        self.by_groups: dict[Groups, list[torch.Tensor]] = {}
        """In the order of the model, so the same on every rank."""
        for parameter in parameters:
            self.by_groups.setdefault(_groups(parameter), []).append(parameter)

    @torch.no_grad()
    def __call__(self, bound: float | None) -> torch.Tensor:
        """The 2-norm, 0-dimensional; gradients longer than `bound` are scaled down to it."""
        norms = [self._norm(groups, _gradients(some)) for groups, some in self.by_groups.items()]
        norm = (
            norms[0]
            if len(norms) == 1
            else get_total_norm(norms or [torch.zeros((), device=self.device)])
        )
        if self.extra is not None:
            norm = _over(norm, (self.extra,))
        if bound is not None:
            clip_grads_with_norm_(
                [_with_gradient(shard) for shard in _gradients(self.all)], bound, norm
            )
        return norm

    def _norm(self, groups: Groups, gradients: list[torch.Tensor]) -> torch.Tensor:
        """Of gradients that are split over the same groups."""
        real = (torch.view_as_real(g.resolve_conj()) if g.is_complex() else g for g in gradients)
        split = (
            g.reshape(-1).split(PIECE) if g.is_cpu and g.numel() > PIECE else (g,) for g in real
        )
        norm = get_total_norm(
            [piece.float() for pieces in split for piece in pieces] or [torch.zeros(())]
        )
        return _over(norm.to(self.device), groups)


def _over(norm: torch.Tensor, groups: Groups) -> torch.Tensor:
    """The norm of what all ranks of the groups have."""
    if not groups:
        return norm
    square = norm.square()
    for group in groups:
        dist.all_reduce(square, group=group)
    return square.sqrt()


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """This rank's shards of the gradients that there are."""
    shards = []
    for p in parameters:
        if (
            isinstance(p, DTensor)
            and isinstance(p.grad, DTensor)
            and p.grad.placements != p.placements
        ):
            p.grad = p.grad.redistribute(
                placements=p.placements
            )  # torch 2.11 leaves terms of a sum (Partial)
        if p.grad is not None:
            shards.append(local(p.grad))
    return [shard for shard in shards if shard.numel()]


def _with_gradient(shard: torch.Tensor) -> torch.Tensor:
    """A tensor whose gradient is this shard: torch scales gradients of tensors, many at once."""
    carrier = shard.detach()
    carrier.grad = shard
    return carrier


def _groups(parameter: torch.Tensor) -> Groups:
    """The groups over which the parameter, and so its gradient, is split."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    return tuple(
        mesh.get_group(i) for i, placement in enumerate(placements) if not placement.is_replicate()
    )
