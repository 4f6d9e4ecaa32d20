"""The total gradient norm over every shard, and clipping to it, exactly: Pascanu et al. 2013.

    ‖g‖ = √ Σ over parameters ‖gₚ‖²       g ← g · min(1, c / (‖g‖ + 1e-6))

A rank holds whole gradients (replicated), parts (split over some sides of the mesh), or a mixture: with fsdp × tp a
norm's weight is split over dp_shard only and a linear layer's over both. The sum of squares is taken per *set of
groups that a gradient is split over*, each such sum is all-reduced over exactly those groups, and the sums are added;
so that every element counts once, whatever the mesh. Replicated gradients need no communication at all.

The norm stays on the device: nobody waits for it. It is inf or nan if any gradient on any rank is, on every rank
alike, so the loop can decide on it. Without a bound the gradients are not touched.

On the CPU torch adds a tensor's squares one after another in a few float32 sums, whose error grows with its size: 1e-5
of a million numbers' norm, 3e-3 of forty million's. So a large gradient's norm is that of the norms of its pieces,
which is right to float32's rounding and reads memory once, as the other does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

Groups = tuple[dist.ProcessGroup, ...]
LARGE = 1 << 16
PIECE = 4096
"""Numbers of a gradient that is measured in pieces, and of a piece."""


class GradNorm:
    """Measures and clips the gradients of these parameters; which belong together is found once.

    parameters: each once. device: where the norm is wanted. extra: a group over which further parameters are spread
    (the stages of a pipeline). also: parameters that others count (a tied embedding's on a later stage) and that are
    scaled here.
    """

    def __init__(
        self,
        parameters: Sequence[torch.Tensor],
        device: torch.device,
        extra: dist.ProcessGroup | None = None,
        also: Sequence[torch.Tensor] = (),
    ) -> None:
        self.device, self.extra, self.also = device, extra, list(also)
        # For each set of groups, for each device: the parameters. The order is that of the model, so every rank's.
        self.split: dict[Groups, dict[torch.device, list[torch.Tensor]]] = {}
        for parameter in parameters:
            places = self.split.setdefault(_groups(parameter), {})
            places.setdefault(parameter.device, []).append(parameter)

    @torch.no_grad()
    def __call__(self, bound: float | None) -> torch.Tensor:
        """The 2-norm, 0-dimensional; gradients longer than `bound` are scaled down to it."""
        kept = [(groups, _gradients(places)) for groups, places in self.split.items()]
        parts = [self._part(groups, gradients) for groups, gradients in kept]
        norm = parts[0] if len(parts) == 1 else torch.linalg.vector_norm(torch.stack(parts or [self._zero()]))
        if self.extra is not None:
            square = norm.square()
            dist.all_reduce(square, group=self.extra)
            norm = square.sqrt()
        if bound is not None:
            scale = torch.clamp(bound / (norm + 1e-6), max=1.0)
            also = [_gradients({self.device: self.also})] if self.also else []
            for gradients in [*(gradients for _, gradients in kept), *also]:
                for some in gradients:
                    torch._foreach_mul_(some, scale.to(some[0].device))
        return norm

    def _part(self, groups: Groups, gradients: list[list[torch.Tensor]]) -> torch.Tensor:
        norms = [_norm(some).to(self.device) for some in gradients]
        norm = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms or [self._zero()]))
        if not groups:
            return norm
        square = norm.square()
        for group in groups:
            dist.all_reduce(square, group=group)
        return square.sqrt()

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), device=self.device)


def _gradients(places: dict[torch.device, list[torch.Tensor]]) -> list[list[torch.Tensor]]:
    """This rank's parts of the gradients that there are, by device."""
    lists = []
    for parameters in places.values():
        gradients = [p.grad for p in parameters if p.grad is not None]
        local = [g._local_tensor if isinstance(g, DTensor) else g for g in gradients]
        if local := [g for g in local if g.numel()]:
            lists.append(local)
    return lists


def _norm(gradients: list[torch.Tensor]) -> torch.Tensor:
    """As torch.nn.utils.get_total_norm computes it; large ones on the CPU in pieces."""
    if gradients[0].device.type != "cpu" or all(g.numel() < LARGE for g in gradients):
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        return torch.linalg.vector_norm(torch.stack(norms))
    small = [g for g in gradients if g.numel() < LARGE]
    parts = [torch.stack(torch._foreach_norm(small, 2.0, dtype=torch.float32))] if small else []
    for large in (g.reshape(-1) for g in gradients if g.numel() >= LARGE):
        whole = large.numel() - large.numel() % PIECE
        parts.append(torch.linalg.vector_norm(large[:whole].view(-1, PIECE), dim=1, dtype=torch.float32))
        if whole < large.numel():
            parts.append(torch.linalg.vector_norm(large[whole:], dtype=torch.float32).view(1))
    return torch.linalg.vector_norm(torch.cat(parts), dtype=torch.float64).float()


def _groups(parameter: torch.Tensor) -> Groups:
    """The groups over which the parameter, and so its gradient, is split."""
    if not isinstance(parameter, DTensor):
        return ()
    mesh, placements = parameter.device_mesh, parameter.placements
    return tuple(mesh.get_group(i) for i, placement in enumerate(placements) if not placement.is_replicate())
