"""A pipeline behind the face that every layout shows to the training loop."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies import state
from strategies.clip import GradNorm
from strategies.context.apply import Context
from strategies.dims import Layout
from strategies.grad_sync import Named, add_over_stages
from strategies.options import Options
from strategies.parallel import Loss, Parallel
from strategies.pipeline import schedules
from strategies.pipeline.runtime import Runtime, Step
from strategies.pipeline.schedules import Schedule
from strategies.pipeline.simulate import Span

T = TypeVar("T")


class PipelineParallel(Parallel):
    """One stage of a pipeline. group: data-parallel workers."""

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        device: torch.device,
        runtime: Runtime,
        shared: dict[dist.ProcessGroup, Named],
        options: Options,
        *,
        stage_group: dist.ProcessGroup,
        counted: list[nn.Parameter],
        after_step: Callable[[], None],
        group: dist.ProcessGroup | None = None,
        notes: tuple[str, ...] = (),
        context: Context | None = None,
    ) -> None:
        super().__init__(module, layout, device, group=group, notes=notes, context=context)
        self.runtime, self.options, self.stage_group = runtime, options, stage_group
        self._shared, self._after_step = shared, after_step
        trained = [p for _, p in self._named if p.requires_grad]
        chosen = {id(p) for p in counted}
        self._grad_norm = GradNorm(
            [p for p in trained if id(p) in chosen],
            device,
            extra=stage_group,
            also=[p for p in trained if id(p) not in chosen],
        )
        self.has_loss = runtime.placement.parts - 1 in runtime.stage.own
        self._gathered = self._profiling = False

    def schedule(self, micro_batches: int) -> Schedule:
        """The instructions of a step of that number of micro-batches."""
        wanted = self.options
        return schedules.make(wanted.schedule, self.layout.dims.pp, micro_batches, wanted.chunks)

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | Tensor],
        loss: Loss,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """See Parallel. Collective over all workers.

        Raises:
            LayoutError: micro-batches that the schedule cannot use; a model whose shapes change from batch to batch.
        """
        schedule = self.schedule(len(batches))
        if self.context is not None:
            (batches, weights), loss = self.context.split(batches, weights), self.context.counted(loss)
        ways = self.layout.dims.dp
        factors = [weight * ways * scale for weight in weights]
        kinds = [self.runtime.stage.signature(batch) for batch in batches]
        self._gather()
        total = self.runtime.step(
            schedule, Step(batches, weights, factors, loss, kinds), self.device, profiled=self._profiling
        )
        self.runtime.reduced(self._finish)
        return total

    def _finish(self) -> None:
        if self.runtime.sync is not None:
            self.runtime.sync.finish()
        self._gathered = False
        add_over_stages(self._shared)
        self._after_step()

    @torch.no_grad()
    def forward(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T | None:
        self._gather()
        if self.context is not None:
            function = self.context.averaged(function)
        found = self.runtime.evaluate(function, batch)
        if self.runtime.sync is not None:
            self.runtime.sync.free()
        self._gathered = False
        return found if self.has_loss else None

    def _gather(self) -> None:
        if self.runtime.sync is not None and not self._gathered:
            self.runtime.sync.gather()
            self._gathered = True

    def profile(self, step: Callable[[], None]) -> list[Span]:
        """Takes a step; what this rank did in it, in seconds from its start. Collective."""
        self._profiling = True
        try:
            step()
        finally:
            self._profiling = False
        return self.runtime.timeline.spans() if self.runtime.timeline is not None else []

    # --- state --------------------------------------------------------------------------------------------------

    def load_model_state(self, values: dict[str, Any]) -> None:
        own = self.inner.state_dict().keys()
        foreign = values.keys() - self.runtime.stage.tracer.names
        state.load_model_state(self.inner, {k: v for k, v in values.items() if k in own or k in foreign})

    def full_model_state(self) -> dict[str, Tensor]:
        """Everything whole and on the CPU, on rank 0; empty on others. Collective; one tensor at a time is whole."""
        own = {name: tensor for name, tensor in self.model_state().items() if isinstance(tensor, Tensor)}
        described: list[Any] = [None] * self.layout.dims.pp
        dist.all_gather_object(
            described, [(name, tuple(t.shape), t.dtype) for name, t in own.items()], group=self.stage_group
        )
        found: dict[str, Tensor] = {}
        for stage, tensors in enumerate(described):
            source = dist.get_global_rank(self.stage_group, stage)
            for name, shape, dtype in tensors:
                if stage == self.runtime.comm.stage:
                    value = state.whole_tensor(own[name].detach(), self.device).to(self.device).contiguous()
                else:
                    value = torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(value, source, group=self.stage_group)
                if dist.get_rank() == 0:
                    found[name] = value.cpu().clone(memory_format=torch.contiguous_format)
        return found
