"""Memory and time of a layout: the strategies' cost functions, the model's parts, the links.

Memory is that of the fullest device. During the backward of a part the device has what all parts up
to it have saved, with 16-bit copies of their parameters, the part's own working memory, and the
gradients of the parts after it. The peak is the largest of these moments and of the optimizer's
step. What a strategy gathers, and what waits to be reduced, comes on top.

What layouts have in common (the costs of parts, the sizes of units, the stages of a pipeline) is
computed once for all of them.
"""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.planner.corrections import Correction, correction_for, corrections_of, multiplied
from app.planner.device import Device, constants, family_of
from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.model_costs import ModelCosts
from app.planner.part_costs import PartCost, Work, part_costs, variant_of
from app.planner.ranges import ADAPTERS, DENSE, MIXTURE, Traits, fit_probability, spread_of
from app.planner.read import Reader, Variant
from app.planner.timing import Case, timing
from app.planner.trace import AFTER, BEFORE
from strategies.activation_checkpointing import recomputed_blocks
from strategies.activation_offloading import ON_DEVICE, moved_blocks
from strategies.context.apply import choose_method
from strategies.costs import (
    FLOAT32_BYTES,
    ITEMSIZES,
    STEP_COPIES,
    RankSize,
    StepShape,
    UnitSize,
    part_of,
    rank_size,
    unit_size,
)
from strategies.dims import ParallelDims
from strategies.fsdp import gradients_are_large, parameters_are_large
from strategies.options import Options
from strategies.pipeline import partition
from strategies.pipeline.schedules import SPLIT, Placement
from strategies.pipeline.simulate import activations_by_formula, backward_moments

CLOSE = 0.1
"""A plan within this share of a GPU's memory is called close: plans err by as much (README.md)."""


@dataclass(kw_only=True)
class Estimate:
    """The memory and time of one layout.

    Args:
        candidate: The layout.
        capacity: Bytes of a device that tensors may take.
        memory: Bytes on the fullest device, by kind: parameters, gradients, optimizer, activations,
            communication, buffers, margin.
        seconds: Of one optimizer step, by the parts that timing.py names.
        flops: Of the whole step, without what is recomputed.
        reduces_each_microbatch: Whether the gradients of every micro-batch are reduced
            (parallel.accumulate_sharded); None if the layout leaves no choice.
        stages: The number of blocks of each chunk of a pipeline; None without a pipeline.
        speed_range: Between these shares of the planned speed are 80 % of runs of this kind.
        host_memory_bytes: Of a host's memory that offloaded state and activations of its GPUs take.
        host_bytes: The memory of a host; None if it is not known.
        unmeasured: Traits of the plan that none of the runs behind `speed_range` had.
        on_cpu: Whether the workers compute on CPUs.
        of_another_trainer: Whether another trainer than Trireme is described to the plan.
    """

    candidate: Candidate
    capacity: float
    memory: dict[str, float]
    seconds: dict[str, float]
    flops: float
    reduces_each_microbatch: bool | None
    stages: tuple[int, ...] | None
    speed_range: tuple[float, float] = (1.0, 1.0)
    host_memory_bytes: float = 0.0
    host_bytes: float | None = None
    unmeasured: tuple[str, ...] = ()
    on_cpu: bool = False
    of_another_trainer: bool = False

    def __post_init__(self) -> None:
        self.memory_bytes = sum(self.memory.values())
        self.step_seconds = sum(self.seconds.values())
        self.fits = self.memory_bytes <= self.capacity and not self.exceeds_host

    @property
    def allocated_bytes(self) -> float:
        """Bytes of tensors at the worst moment, without what fragmentation wastes."""
        return self.memory_bytes - self.memory.get("margin", 0.0)

    @property
    def host_memory_share(self) -> float | None:
        """Share of a host's memory that is offloaded to; None if its size is not known."""
        if not self.host_memory_bytes:
            return 0.0
        return self.host_memory_bytes / self.host_bytes if self.host_bytes else None

    @property
    def exceeds_host(self) -> bool:
        """Whether what is offloaded takes more than the memory of a host."""
        return (self.host_memory_share or 0.0) > 1

    @property
    def fit_probability(self) -> float:
        """The probability that it fits, by how far measured peaks were from their plans."""
        if self.exceeds_host:
            return 0.0
        peaks = constants()["peaks_of_others" if self.of_another_trainer else "peaks"]
        return fit_probability(self.capacity, self.memory_bytes, peaks)

    @property
    def verdict(self) -> str:
        """fits, close (the plan's error decides) or does not fit."""
        is_close = abs(self.memory_bytes / self.capacity - 1) < CLOSE
        if is_close and not self.exceeds_host:
            return "close"
        return "fits" if self.fits else "does not fit"

    def compare(self, seconds: float, memory: float) -> dict[str, float]:
        """The estimate beside what a run measured, as metrics to log.

        Args:
            seconds: Measured seconds per step.
            memory: Measured bytes of the model on the fullest worker; 0 if they are not known. On a
                CPU, by how much its resident memory has grown: with libraries, threads and what
                malloc keeps, which no plan counts, so that there is no error.
        """
        metrics = {
            "plan/step_seconds": self.step_seconds,
            "plan/step_seconds_measured": seconds,
            "plan/step_error": self.step_seconds / seconds - 1,
            "plan/memory_bytes": self.memory_bytes,
        }
        if memory > 0 and self.on_cpu:
            metrics["plan/resident_bytes"] = memory
        elif memory > 0:
            metrics["plan/memory_bytes_measured"] = memory
            metrics["plan/memory_error"] = self.allocated_bytes / memory - 1
        return metrics


@functools.cache
def _balanced_partition(
    costs: tuple[float, ...], parts: int, *, first: float, last: float
) -> tuple[int, ...]:
    """partition.balanced_partition, remembered: most layouts of a model are cut in the same way."""
    return partition.balanced_partition(costs, parts, first, last)


class ParameterShards(NamedTuple):
    """Into how many shards the data-parallel workers cut parameters.

    Args:
        dp_shard: Shards of all parameters but split experts.
        ep: Groups into which expert parallelism splits experts.
        expert_shards: Shards of a group's experts; None without expert parallelism.
    """

    dp_shard: int
    ep: int
    expert_shards: int | None

    @classmethod
    def of(cls, dims: ParallelDims) -> "ParameterShards":
        """The shards under these degrees, as parameters see them."""
        expert_shards = dims.for_experts().dp_shard if dims.ep > 1 else None
        return cls(dims.dp_shard, dims.ep, expert_shards)


class Stages(NamedTuple):
    """How a pipeline is cut into stages. Counts have an entry per part of the model.

    Args:
        sizes: The number of blocks of each chunk; None without a pipeline.
        slowest: How many of each part the slowest stage has.
        candidates_for_fullest: The stages one of which needs the most memory.
    """

    sizes: tuple[int, ...] | None
    slowest: tuple[int, ...]
    candidates_for_fullest: list["StageParts"]


class StageParts(NamedTuple):
    """The parts of the model that a stage has.

    Args:
        number: The stage's.
        counts: How many of each part.
        chunks: The same of each of its chunks.
    """

    number: int
    counts: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]


@dataclass(kw_only=True)
class Estimator:
    """Estimates layouts of one model on one machine.

    Args:
        reader: The model.
        machine: The machine.
        options: Of the configuration. What a candidate decides (precision, recomputation,
            schedule and so on) is taken from the candidate.
        optimizer: The optimizer's name.
        state_itemsize: Bytes of a number of its state.
        clips: Whether gradients are clipped.
        watched_stage: The number of the pipeline stage whose memory is estimated, such as 0 for a
            trainer of which rank 0 logs its own; None: the fullest one's.
    """

    reader: Reader
    machine: Machine
    options: Options
    optimizer: str = "adamw"
    state_itemsize: int = FLOAT32_BYTES
    clips: bool = False
    watched_stage: int | None = None

    def __post_init__(self) -> None:
        self._part_costs = functools.cache(self._read_part_costs)
        self._unit_sizes = functools.cache(self._read_unit_sizes)
        self._rank_size = functools.cache(self._read_rank_size)
        self._stages = functools.cache(self._cut_stages)
        self._traits = functools.cache(self._read_traits)
        self.correction = functools.cache(self._find_correction)

    def estimate(self, candidate: Candidate) -> Estimate:
        """The memory and time of a layout."""
        strategy = candidate.strategy
        stages = self._stages(
            self._work(candidate), candidate.dims.pp, candidate.schedule, candidate.chunks
        )
        case = self._case(candidate, stages)
        memory = self._memory(case, stages)
        capacity = self.machine.device.capacity
        accumulates = candidate.micro_batches > 1 and candidate.dims.pp == 1
        has_choice = strategy.is_sharded and accumulates
        decision = strategy.reduces_each_microbatch(self.options.accumulate_sharded, None)
        is_undecided = decision is None
        if has_choice and is_undecided and sum(memory.values()) > capacity:
            # Whole gradients do not fit, so every micro-batch's are reduced, which takes longer.
            step = replace(case.step, reduce_scatter_each_microbatch=True)
            case = replace(case, step=step)
            memory = self._memory(case, stages)
        seconds, flops = timing(
            case,
            sample_bytes=self.reader.sample_bytes,
            parameter_tensors=len(self.reader.size.parameters),
            clips=self.clips,
        )
        correction = self.correction(candidate.precision)
        if correction is not None:
            seconds = multiplied(seconds, correction.factors)
        host_memory_bytes = self._host_memory_bytes(case, stages)
        spread = spread_of(self.traits(candidate), self.machine.device.ranges)
        return Estimate(
            candidate=candidate,
            capacity=capacity,
            memory=memory,
            seconds=seconds,
            flops=flops,
            reduces_each_microbatch=(
                case.step.reduce_scatter_each_microbatch if has_choice else None
            ),
            stages=stages.sizes,
            speed_range=(spread.low, spread.high),
            host_memory_bytes=host_memory_bytes,
            host_bytes=self.machine.host_bytes,
            unmeasured=spread.unmeasured,
            on_cpu=self.machine.device.is_cpu,
            of_another_trainer=self.machine.device.of_another_trainer,
        )

    def changed(
        self, device: Device, stages: tuple[int, ...] | None, *, watched_stage: int | None = None
    ) -> "Estimator":
        """The same model on another device, or cut into other stages.

        What depends on neither, such as the sizes of parts, is not computed again.

        Args:
            device: The device.
            stages: The number of blocks of each chunk of a pipeline.
            watched_stage: See Estimator.
        """
        estimator = replace(
            self,
            machine=replace(self.machine, device=device),
            options=replace(self.options, stages=stages),
            watched_stage=watched_stage,
        )
        if device.whole_embedding == self.machine.device.whole_embedding:
            estimator._unit_sizes = self._unit_sizes
            estimator._rank_size = self._rank_size
        return estimator

    def traits(self, candidate: Candidate) -> Traits:
        """What the error of the layout's plan depends on."""
        share = _attention_share(self._part_costs(self._work(candidate)))
        return self._traits(candidate.model_split)._replace(attention=share)

    def _read_traits(self, layout: str) -> Traits:
        parameters = self.reader.size.parameters
        gpu = self.machine.device.gpu
        if any(parameter.is_expert for parameter in parameters):
            model = MIXTURE
        elif any(not parameter.trainable for parameter in parameters):
            model = ADAPTERS
        else:
            model = DENSE
        return Traits(
            layout=layout,
            model=model,
            family=family_of(gpu),
            gpu=gpu.base if gpu.name == gpu.base else f"{gpu.base} limited",
            billions=sum(parameter.numel for parameter in parameters) / 1e9,
            sequence=getattr(self.reader, "sequence_length", None),
        )

    def _find_correction(self, precision: str) -> Correction | None:
        """What runs of models like this one have measured on this machine."""
        corrections = corrections_of(self.machine.device.corrections)
        parameters = sum(parameter.numel for parameter in self.reader.size.parameters)
        return correction_for(corrections, parameters, precision)

    # --- a layout's case ------------------------------------------------------------------------

    def _work(self, candidate: Candidate) -> Work:
        dims = candidate.dims
        return Work(
            batch=candidate.micro_batch / dims.cp,
            samples=candidate.micro_batch,
            tp=dims.tp,
            precision=candidate.precision,
            variant=variant_of(
                is_sharded=(candidate.strategy.is_sharded or self.machine.device.shared_copies > 0),
                tp=dims.tp,
                pp=dims.pp,
                precision=candidate.precision,
                weight_dtype=self.options.weight_dtype,
            ),
            checkpointing=candidate.checkpointing,
            moves_activations=candidate.moves_activations,
            ep=dims.ep,
        )

    def _case(self, candidate: Candidate, stages: Stages) -> Case:
        dims = candidate.dims
        work = self._work(candidate)
        shards = ParameterShards.of(candidate.parameter_dims)
        return Case(
            candidate=candidate,
            machine=self.machine,
            work=work,
            step=self._step_shape(candidate, work, shards),
            parts=self._part_costs(work),
            units=self._unit_sizes(work.variant, dims.tp, shards),
            counts=stages.slowest,
            options=self.options,
            context_method=choose_method(
                self.options.context,
                heads=self.reader.heads,
                dims=dims,
                workers_per_node=self.machine.per_node,
            ),
            expert_bytes=self._expert_bytes(candidate, work),
            experts=next(((m.count, m.top_k) for m in self.reader.mixtures), (1, 1)),
            expert_workers=candidate.dims.ep * self._experts_over_tp(candidate.dims.tp),
            orthogonalised=self._orthogonalised(work.variant, stages.slowest),
        )

    def _orthogonalised(
        self, variant: Variant, counts: tuple[int, ...]
    ) -> tuple[tuple[int, int, int], ...]:
        """(rows, columns, how many) of the matrices that Muon makes orthogonal."""
        if self.optimizer != "muon":
            return ()
        model = self._model_costs(variant)
        matrices: Counter[tuple[int, int]] = Counter()
        for name, count in zip(model.parts, counts):
            for size in model.parameters[name] if name.startswith("block") else ():
                if size.trainable and len(size.shape) == 2:
                    matrices[size.shape[0], size.shape[1]] += count
        return tuple((rows, columns, count) for (rows, columns), count in matrices.items())

    def _step_shape(self, candidate: Candidate, work: Work, shards: ParameterShards) -> StepShape:
        options = self.options
        strategy = candidate.strategy
        device = self.machine.device
        reduce_itemsize = 2 if options.reduce_dtype == "bf16" else 4
        whole_model = tuple(self._model_costs(work.variant).counts.values())
        size = self._rank_size(work.variant, work.tp, shards, whole_model)
        numbers = size.root + size.blocks
        gpu_memory = None if device.is_cpu else device.capacity
        return StepShape(
            dp_replicate=candidate.parameter_dims.dp_replicate,
            dp_shard=candidate.parameter_dims.dp_shard,
            tp=candidate.dims.tp,
            pp=candidate.dims.pp,
            micro_batches=candidate.micro_batches,
            compute_itemsize=work.itemsize,
            reduce_itemsize=reduce_itemsize,
            reshard_after_forward=strategy.reshards_after_forward(
                options.reshard_after_forward,
                parameters_are_large(numbers * work.itemsize, gpu_memory),
            ),
            reduce_scatter_each_microbatch=strategy.reduces_each_microbatch(
                options.accumulate_sharded,
                gradients_are_large(numbers * reduce_itemsize, gpu_memory),
            ),
            optimizer=self.optimizer,
            gradient_itemsize=ITEMSIZES[options.weight_dtype],
            state_itemsize=self.state_itemsize,
        )

    @functools.cached_property
    def _experts_are_shared(self) -> bool:
        """Whether tensor-parallel workers hold different experts, rather than a part of each."""
        parameters = self.reader.size.parameters
        return any(size.is_expert and size.split_dim == 0 for size in parameters)

    def _experts_over_tp(self, tp: int) -> int:
        """Into how many groups tensor parallelism splits a mixture's experts."""
        return tp if self._experts_are_shared else 1

    def _expert_bytes(self, candidate: Candidate, work: Work) -> float:
        """Bytes of a micro-batch that a stage sends to experts and back, if they are split."""
        dims = candidate.dims
        blocks = self.reader.blocks
        recomputed_share = recomputed_blocks(candidate.checkpointing, blocks) / max(1, blocks)
        numbers = self.reader.exchanged_numel * candidate.micro_batch / dims.cp / dims.pp
        # A tensor-parallel worker sends the rows for its experts only.
        numbers /= self._experts_over_tp(dims.tp)
        return numbers * work.itemsize * (1 + recomputed_share / 2)

    # --- what layouts share ---------------------------------------------------------------------

    def _model_costs(self, variant: Variant) -> ModelCosts:
        return self.reader.costs(variant.casting, whole_model=variant.whole_model)

    def _read_part_costs(self, work: Work) -> list[PartCost]:
        return part_costs(
            self._model_costs(work.variant),
            work,
            self.machine.device,
            compiles_blocks=self.options.compile and self.options.compile_backend == "inductor",
            compiles_loss=self.reader.compiles_loss,
        )

    def _read_unit_sizes(
        self, variant: Variant, tp: int, shards: ParameterShards
    ) -> list[UnitSize]:
        """The sizes of one part of each kind, on one rank."""
        model = self._model_costs(variant)
        units = []
        for name in model.parts:
            is_whole = name == BEFORE and self.machine.device.whole_embedding > 0
            part_tp = 1 if is_whole else tp
            parameters = tuple(part_of(size, part_tp, shards.ep) for size in model.parameters[name])
            units.append(
                unit_size(
                    parameters,
                    shards.dp_shard,
                    is_root=not name.startswith("block"),
                    expert_shards=shards.expert_shards,
                )
            )
        return units

    def _read_rank_size(
        self, variant: Variant, tp: int, shards: ParameterShards, counts: tuple[int, ...]
    ) -> RankSize:
        units = self._unit_sizes(variant, tp, shards)
        repeated = [unit for unit, count in zip(units, counts) for _ in range(count)]
        return rank_size(repeated, self.reader.size.buffer_bytes)

    def _cut_stages(self, work: Work, pp: int, schedule: str, chunks: int) -> Stages:
        """Stages of which the slowest is as fast as possible, or those that the user has cut."""
        model = self._model_costs(work.variant)
        if pp == 1:
            whole_model = tuple(model.counts.values())
            return Stages(None, whole_model, [StageParts(0, whole_model, (whole_model,))])
        seconds = {
            part.name: part.forward_seconds + part.backward_seconds
            for part in self._part_costs(work)
        }
        sizes = self.options.stages
        if sizes is None or len(sizes) != pp * chunks:
            # Costs are in blocks, and rounded, so that most layouts share one partition.
            block_seconds = max(seconds[name] for name in model.order)
            sizes = _balanced_partition(
                tuple(round(seconds[name] / block_seconds, 2) for name in model.order),
                pp * chunks,
                first=round(seconds.get(BEFORE, 0.0) / block_seconds, 1),
                last=round(seconds.get(AFTER, 0.0) / block_seconds, 1),
            )
        placement = Placement.of(schedule, pp, chunks)
        parts_of_chunk = [Counter(names) for names in _parts_of_chunks(model.order, sizes)]

        def parts_of(stage: int) -> StageParts:
            counts_of_chunks = tuple(
                tuple(parts_of_chunk[part][name] for name in model.parts)
                for part in placement.parts_of(stage)
            )
            counts = tuple(map(sum, zip(*counts_of_chunks)))
            return StageParts(stage, counts, counts_of_chunks)

        parts_of_stages = [parts_of(stage) for stage in range(pp)]
        stage_seconds = [
            sum(count * seconds[name] for count, name in zip(stage.counts, model.parts))
            for stage in parts_of_stages
        ]
        slowest = stage_seconds.index(max(stage_seconds))
        # Early stages have the most micro-batches in flight; the last one has the head.
        candidates = sorted({0, min(1, pp - 1), slowest, pp - 1})
        if self.watched_stage is not None:
            candidates = [self.watched_stage]
        return Stages(
            tuple(sizes),
            parts_of_stages[slowest].counts,
            [parts_of_stages[stage] for stage in candidates],
        )

    # --- memory ---------------------------------------------------------------------------------

    def _memory(self, case: Case, stages: Stages) -> dict[str, float]:
        """Bytes of the fullest device, by kind."""
        of_stages = [self._stage_memory(case, stage) for stage in stages.candidates_for_fullest]
        fullest = max(of_stages, key=lambda memory: sum(memory.values()))
        margin = sum(fullest.values()) * self.machine.device.fragmentation
        return {**fullest, "margin": margin}

    def _stage_memory(self, case: Case, stage: StageParts) -> dict[str, float]:
        candidate = case.candidate
        strategy = candidate.strategy
        size = self._rank_size_of(case, stage.counts)
        step = case.step
        if self.machine.device.kept_weights:
            step = replace(step, reshard_after_forward=False)
        cost = strategy.cost(size, step)
        if candidate.dims.pp > 1:
            activations = _pipeline_activations(case, stage)
            gradients_at_peak = 0.0 if strategy.is_sharded else float(cost.gradients)
        else:
            # Offloaded gradients are not on the device at any moment.
            activations, gradients_at_peak = _worst_moment(
                case, 0.0 if candidate.offload else float(cost.gradients)
            )
        is_on_device = not candidate.offload
        optimizer = float(cost.optimizer)
        # The optimizer's step comes when activations and gathered parameters are gone.
        step_copies = self._step_copies * float(cost.gradients)
        optimizer += max(0.0, step_copies - activations - float(cost.transient))
        # All gradients are counted below, but at the peak of activations some are still to come.
        missing_gradients = (cost.gradients - gradients_at_peak) * is_on_device
        return {
            "parameters": cost.parameters * is_on_device + self._copied_weights(case, size),
            "gradients": cost.gradients * is_on_device,
            "optimizer": optimizer * is_on_device,
            "activations": max(activations - missing_gradients, 0.0),
            "communication": float(cost.transient),
            "buffers": float(cost.buffers),
        }

    def _copied_weights(self, case: Case, size: RankSize) -> float:
        """Bytes of copies of weights that another trainer keeps for the whole step."""
        device = self.machine.device
        candidate = case.candidate
        copies = 0.0
        if candidate.precision == "fp8":
            copies += size.blocks * device.weight_copies
        # Those of sharded strategies are gathered (`Cost.transient`).
        is_narrow = self.options.weight_dtype != "fp32" or candidate.precision == "fp32"
        if device.shared_copies and not candidate.strategy.is_sharded and not is_narrow:
            copies += size.parameters / FLOAT32_BYTES * case.work.itemsize
        return copies

    @property
    def _step_copies(self) -> float:
        """Copies of a worker's trained parameters that the optimizer's step makes."""
        device = self.machine.device
        copies = 0 if device.is_cpu else STEP_COPIES.get(self.optimizer, 0)
        return max(device.update, float(copies))

    def _host_memory_bytes(self, case: Case, stages: Stages) -> float:
        """Bytes of a host's memory for what is offloaded from its GPUs: state and activations."""
        candidate = case.candidate
        gpu_bytes = 0.0
        if candidate.offload:
            size = self._rank_size_of(case, stages.slowest)
            cost = candidate.strategy.cost(size, case.step)
            gpu_bytes += float(cost.parameters + cost.gradients + cost.optimizer)
        if candidate.moves_activations and not self.machine.device.is_cpu:
            gpu_bytes += max(
                _moved_activations(case, stage.number, stage.counts)
                for stage in stages.candidates_for_fullest
            )
        return gpu_bytes * min(self.machine.per_node, self.machine.world)

    def _rank_size_of(self, case: Case, counts: tuple[int, ...]) -> RankSize:
        shards = ParameterShards.of(case.candidate.parameter_dims)
        return self._rank_size(case.work.variant, case.candidate.dims.tp, shards, counts)


def _attention_share(parts: list[PartCost]) -> float:
    """The share of the seconds of a model's kernels that attention takes."""
    attention = 0.0
    total = 0.0
    for part in parts:
        forward, backward = part.attention_seconds
        attention += (forward * part.attention_forwards + backward) * part.count
        total += (part.forward_seconds + part.backward_seconds) * part.count
    return attention / total if total else 0.0


def _parts_of_chunks(order: list[str], sizes: tuple[int, ...]) -> list[list[str]]:
    """The names of the parts in each chunk of a pipeline that has `sizes` blocks a chunk."""
    ends = [0, *itertools.accumulate(sizes)]
    chunks = [order[begin:end] for begin, end in itertools.pairwise(ends)]
    chunks[0] = [BEFORE, *chunks[0]]
    chunks[-1] = [*chunks[-1], AFTER]
    return chunks


def _in_flight(candidate: Candidate, stage: int) -> float:
    """The micro-batches whose activations a stage of a pipeline keeps at the same time."""
    activations = activations_by_formula(
        candidate.schedule,
        stages=candidate.dims.pp,
        micro_batches=candidate.micro_batches,
        chunks=candidate.chunks,
        stage=stage,
    )
    return activations / candidate.chunks


def _moved_activations(case: Case, stage: int, counts: tuple[int, ...]) -> float:
    """Bytes of a worker's saved tensors that are in host memory at the same time."""
    is_pipeline = case.candidate.dims.pp > 1
    blocks = sum(count for part, count in zip(case.parts, counts) if part.is_block)
    saved = sum(part.moved_bytes * count for part, count in zip(case.parts, counts))
    share = moved_blocks(blocks, is_pipeline=is_pipeline) / max(1, blocks)
    return saved * share * (_in_flight(case.candidate, stage) if is_pipeline else 1)


def _bytes_not_moved_yet(case: Case, blocks: int) -> float:
    """Bytes on a device of blocks whose tensors are to be moved, or are there again.

    On a CPU, where `saved_bytes` has the copies too, the last block's are no copies.

    Args:
        case: The layout.
        blocks: How many blocks there are up to the one that is at work.
    """
    at_once = ON_DEVICE - 1 if case.machine.device.is_cpu else ON_DEVICE
    return max(part.moved_bytes for part in case.parts) * min(at_once, blocks)


def _pipeline_activations(case: Case, stage: StageParts) -> float:
    """Bytes of the micro-batches that a stage has in flight, and of the part that is at work.

    The worst moment is one at which a micro-batch goes backward through a chunk, whose later parts
    have freed what they had saved. A backward that is split keeps it for the gradients of weights.
    Outputs that were sent are kept as well (runtime.py): backward begins with them.
    """
    candidate = case.candidate
    saved_of_chunks = [
        sum(part.saved_bytes * count for part, count in zip(case.parts, counts))
        + _sent_bytes(case, counts)
        for counts in stage.chunks
    ]
    moments = backward_moments(
        candidate.schedule,
        stages=candidate.dims.pp,
        micro_batches=candidate.micro_batches,
        chunks=candidate.chunks,
        stage=stage.number,
    )
    frees = candidate.schedule not in SPLIT
    at_work = [_chunk_at_work(case, counts, frees=frees) for counts in stage.chunks]
    copied_bytes = sum(part.copied_bytes * count for part, count in zip(case.parts, stage.counts))
    worst = max(
        sum(saved * count for saved, count in zip(saved_of_chunks, live)) + at_work[chunk]
        for chunk, live in moments
    )
    blocks = sum(count for part, count in zip(case.parts, stage.counts) if part.is_block)
    return worst + copied_bytes + _bytes_not_moved_yet(case, blocks)


def _chunk_at_work(case: Case, counts: tuple[int, ...], *, frees: bool) -> float:
    """Bytes of a backward through a chunk at its worst moment, beside all that the chunk has saved.

    Args:
        case: The layout.
        counts: How many of each part the chunk has.
        frees: Whether parts free what they have saved as soon as their backward is done.
    """
    present = [(part, count) for part, count in zip(case.parts, counts) if count]
    received = _sent_bytes(case, counts)  # the output's gradient, from the next stage
    freed = 0.0
    worst = received
    for part, count in reversed(present):
        worst = max(worst, part.recomputed_bytes + part.working_bytes + received - freed)
        freed += part.saved_bytes * count * frees
    return worst


def _sent_bytes(case: Case, counts: tuple[int, ...]) -> float:
    """Bytes of what a chunk with so many of each part sends on for a micro-batch."""
    of_blocks = [
        part.output_bytes for part, count in zip(case.parts, counts) if part.is_block and count
    ]
    has_loss = any(part.name == AFTER and count for part, count in zip(case.parts, counts))
    return of_blocks[-1] if of_blocks and not has_loss else 0.0


def _worst_moment(case: Case, gradient_bytes: float) -> tuple[float, float]:
    """The moment of backward at which activations and the gradients so far take the most.

    Returns:
        (bytes of activations, bytes of gradients)
    """
    strategy = case.candidate.strategy
    accumulates = case.candidate.micro_batches > 1
    # If whole gradients wait for the last micro-batch (`Cost.transient` has those), the shards
    # take their place one after the other.
    waits_for_last = (
        accumulates and strategy.is_sharded and not case.step.reduce_scatter_each_microbatch
    )
    all_gradients = 0.0 if waits_for_last else float(gradient_bytes)
    # Gradients of earlier micro-batches exist from the start, and so do DDP's buckets.
    exist_from_start = accumulates or (strategy.averages_gradients and case.candidate.dims.tp == 1)
    saved_before = 0.0
    blocks_before = 0
    gradients_after = all_gradients
    worst = (float("-inf"), 0.0, 0.0)
    for part, unit, count in zip(case.parts, case.units, case.counts):
        part_gradients = unit.sharded_gradients if strategy.is_sharded else unit.gradients
        at_work = part.recomputed_bytes + part.working_bytes
        saved = part.saved_bytes + part.copied_bytes
        for place in {1, count}:  # of equal blocks in a row either the first or the last is worst
            if exist_from_start:
                gradients = all_gradients
            else:
                gradients = max(0.0, gradients_after - part_gradients * place)
            blocks = blocks_before + place * part.is_block
            on_device = _bytes_not_moved_yet(case, blocks)
            activations = saved_before + saved * place + at_work + on_device
            worst = max(worst, (activations + gradients, activations, gradients))
        saved_before += saved * count
        blocks_before += count * part.is_block
        gradients_after = max(0.0, gradients_after - part_gradients * count)
    _, activations, gradients = worst
    return activations, gradients
