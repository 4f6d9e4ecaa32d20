"""A pipeline behind the interface that every layout has for the training loop."""

from collections.abc import Callable, Mapping, Sequence
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
    """One stage of a pipeline."""

    def __init__(
        self,
        module: nn.Module,
        *,
        layout: Layout,
        device: torch.device,
        options: Options,
        runtime: Runtime,
        stage_group: dist.ProcessGroup,
        shared: Mapping[dist.ProcessGroup, Named],
        counted: Sequence[nn.Parameter],
        after_step: Callable[[], None],
        group: dist.ProcessGroup | None = None,
        notes: tuple[str, ...] = (),
        context: Context | None = None,
    ) -> None:
        """Take over a stage that is sharded and connected.

        Args:
            module: The model, with this stage's parameters only.
            layout: The degrees of parallelism.
            device: This worker's.
            options: The schedule and its chunks.
            runtime: Runs schedules on this stage.
            stage_group: The stages of this pipeline.
            shared: The parameters that several stages use, by the stages that share them.
            counted: The parameters that this stage counts in the gradient's norm.
            after_step: Called once the step's gradients are complete.
            group: The data-parallel workers.
            notes: Remarks for the user, one sentence each.
            context: The workers that share a sequence.
        """
        super().__init__(module, layout, device, group=group, notes=notes, context=context)
        self.runtime = runtime
        self.options = options
        self.stage_group = stage_group
        self._shared = dict(shared)
        self._after_step = after_step
        trained = [parameter for _, parameter in self._named if parameter.requires_grad]
        counted_ids = {id(parameter) for parameter in counted}
        self._grad_norm = GradNorm(
            [parameter for parameter in trained if id(parameter) in counted_ids],
            device,
            stage_group=stage_group,
            scaled_only=[parameter for parameter in trained if id(parameter) not in counted_ids],
        )
        last_part = runtime.placement.parts - 1
        self.has_loss = last_part in runtime.stage.parts
        self._is_gathered = False
        """Whether sharded parameters are whole at the moment."""
        self._is_profiling = False

    def schedule(self, micro_batches: int) -> Schedule:
        """The instructions of a step with that number of micro-batches."""
        return schedules.make_schedule(
            self.options.schedule,
            stages=self.layout.dims.pp,
            micro_batches=micro_batches,
            chunks=self.options.chunks,
        )

    def forward_backward(
        self,
        batches: Sequence[Any],
        weights: Sequence[float | Tensor],
        loss: Loss,
        scale: float | Tensor = 1.0,
    ) -> Tensor:
        """See Parallel. Collective over all workers.

        Raises:
            LayoutError: The schedule cannot use that number of micro-batches, or the model's shapes
                change from batch to batch.
        """
        schedule = self.schedule(len(batches))
        if self.context is not None:
            batches, weights = self.context.split(batches, weights)
            loss = self.context.loss_of_part(loss)
        # Averaging over data-parallel workers divides by their number.
        workers = self.layout.dims.dp
        step = Step(
            batches=batches,
            weights=weights,
            factors=[weight * workers * scale for weight in weights],
            signatures=[self.runtime.stage.signature(batch) for batch in batches],
            loss=loss,
        )
        self._gather()
        total = self.runtime.step(schedule, step, is_profiled=self._is_profiling)
        with self.runtime.timed_reduction():
            self._complete_gradients()
        return total

    def _complete_gradients(self) -> None:
        if self.runtime.sync is not None:
            self.runtime.sync.finish()
        self._is_gathered = False
        add_over_stages(self._shared)
        self._after_step()

    @torch.no_grad()
    def forward(self, function: Callable[[nn.Module, Any], T], batch: Any) -> T | None:
        """See Parallel. Collective over all workers."""
        self._gather()
        if self.context is not None:
            function = self.context.averaged(function)
        answer = self.runtime.evaluate(function, batch)
        if self.runtime.sync is not None:
            self.runtime.sync.free()
        self._is_gathered = False
        return answer if self.has_loss else None

    def _gather(self) -> None:
        if self.runtime.sync is not None and not self._is_gathered:
            self.runtime.sync.gather()
            self._is_gathered = True

    def profile(self, step: Callable[[], None]) -> list[Span]:
        """Take a step by calling `step`. Collective over all workers.

        Returns:
            What this rank did in it.
        """
        self._is_profiling = True
        try:
            step()
        finally:
            self._is_profiling = False
        return self.runtime.timeline.spans() if self.runtime.timeline is not None else []

    # --- state ------------------------------------------------------------------------------------

    def load_model_state(self, values: dict[str, Any]) -> None:
        """See Parallel. `values` may have the state of other stages, which is left out."""
        own_names = self.inner.state_dict().keys()
        names_of_others = self.runtime.stage.state_names - own_names
        # Names that are in no stage of the model stay in, so that they are reported.
        own_values = {name: value for name, value in values.items() if name not in names_of_others}
        state.load_model_state(self.inner, own_values)

    def full_model_state(self) -> dict[str, Tensor]:
        """The whole model's state on the CPU of rank 0; empty on other ranks.

        Collective over all workers. Only one tensor at a time is whole on a device.
        """
        stage_state = {
            name: tensor
            for name, tensor in self.model_state().items()
            if isinstance(tensor, Tensor)
        }
        own_shapes = [
            (name, tuple(tensor.shape), tensor.dtype) for name, tensor in stage_state.items()
        ]
        shapes_by_stage: list[Any] = [None] * self.layout.dims.pp
        dist.all_gather_object(shapes_by_stage, own_shapes, group=self.stage_group)
        full_state: dict[str, Tensor] = {}
        for stage, shapes in enumerate(shapes_by_stage):
            source = dist.get_global_rank(self.stage_group, stage)
            for name, shape, dtype in shapes:
                if stage == self.runtime.comm.stage:
                    whole = state.whole_tensor(stage_state[name].detach(), self.device)
                    tensor = whole.to(self.device).contiguous()
                else:
                    tensor = torch.empty(shape, dtype=dtype, device=self.device)
                dist.broadcast(tensor, source, group=self.stage_group)
                if dist.get_rank() == 0:
                    full_state[name] = state.host_copy(tensor)
        return full_state
