"""Estimates layouts of one model on one machine.

A layout's `Case` has all that its time (timing.py) and its memory (memory.py) depend on. What
layouts have in common (the costs of parts, the sizes of units, the stages of a pipeline) is
computed once for all of them.
"""

import functools
from collections import Counter
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.planner.case import Case, ExpertExchange
from app.planner.corrections import Correction, correction_for, corrections_of, multiplied
from app.planner.device import Device, family_of
from app.planner.estimate import Estimate
from app.planner.layouts import Candidate
from app.planner.machine import Machine
from app.planner.memory import SizeOnRank, memory_on_device, memory_on_host
from app.planner.model_costs import ModelCosts
from app.planner.part_costs import PartCost, part_costs
from app.planner.part_trace import BEFORE, names_block
from app.planner.ranges import ADAPTERS, DENSE, MIXTURE, Traits, spread_of
from app.planner.read import Reader, Variant
from app.planner.stages import Stages, balanced_sizes, cut_into_stages, single_stage
from app.planner.timing import step_flops, step_seconds
from app.planner.work import Work, variant_of
from strategies.activation_checkpointing import recomputed_blocks
from strategies.context.apply import choose_method
from strategies.costs import (
    FLOAT32_BYTES,
    ITEMSIZES,
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
from strategies.pipeline.schedules import Placement


class ParameterShards(NamedTuple):
    """Into how many shards the data-parallel workers cut parameters.

    Args:
        dp_shard: Shards of all parameters except split experts.
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


@dataclass(kw_only=True)
class Estimator:
    """Estimates layouts of one model on one machine.

    Args:
        reader: The model.
        machine: The machine.
        options: The options of the configuration. What a candidate decides (precision,
            recomputation, schedule and so on) is taken from the candidate.
        optimizer: The name of the optimizer.
        state_itemsize: Bytes of a number of its state.
        clips: Whether gradients are clipped.
        watched_stage: The number of the pipeline stage whose memory is estimated, such as 0 for a
            trainer whose rank 0 logs its own; None for the fullest stage.
    """

    reader: Reader
    machine: Machine
    options: Options
    optimizer: str = "adamw"
    state_itemsize: int = FLOAT32_BYTES
    clips: bool = False
    watched_stage: int | None = None

    def __post_init__(self) -> None:
        # Thousands of layouts share these, so each is computed once.
        self._part_costs = functools.cache(self._read_part_costs)
        self._unit_sizes = functools.cache(self._read_unit_sizes)
        self._rank_size = functools.cache(self._read_rank_size)
        self._stages = functools.cache(self._cut_stages)
        self._traits = functools.cache(self._read_traits)
        self.correction = functools.cache(self._find_correction)

    def estimate(self, candidate: Candidate) -> Estimate:
        """The memory and time of a layout."""
        device = self.machine.device
        stages = self._stages(
            self._work(candidate), candidate.dims.pp, candidate.schedule, candidate.chunks
        )
        case = self._case(candidate, stages)
        size_on_rank = self._size_on_rank(case)
        memory = memory_on_device(case, stages, size_on_rank)
        strategy = candidate.strategy
        accumulates = candidate.micro_batches > 1 and candidate.dims.pp == 1
        has_choice = strategy.is_sharded and accumulates
        decision = strategy.reduces_each_microbatch(self.options.accumulate_sharded, None)
        if has_choice and decision is None and sum(memory.values()) > device.capacity:
            # Whole gradients do not fit, so every micro-batch's are reduced, which takes longer.
            step = replace(case.step, reduce_scatter_each_microbatch=True)
            case = replace(case, step=step)
            memory = memory_on_device(case, stages, size_on_rank)
        seconds = step_seconds(
            case,
            sample_bytes=self.reader.sample_bytes,
            parameter_tensors=len(self.reader.size.parameters),
            clips=self.clips,
        )
        correction = self.correction(candidate.precision)
        if correction is not None:
            seconds = multiplied(seconds, correction.factors)
        spread = spread_of(self.traits(candidate), device.ranges)
        return Estimate(
            candidate=candidate,
            capacity=device.capacity,
            memory=memory,
            seconds=seconds,
            flops=step_flops(case),
            reduces_each_microbatch=(
                case.step.reduce_scatter_each_microbatch if has_choice else None
            ),
            stages=stages.sizes,
            speed_range=(spread.low, spread.high),
            host_memory_bytes=memory_on_host(case, stages, size_on_rank),
            host_bytes=self.machine.host_bytes,
            unmeasured=spread.unmeasured,
            on_cpu=device.is_cpu,
            of_another_trainer=device.of_another_trainer,
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
        """What a worker does with a micro-batch of a layout."""
        dims = candidate.dims
        gathers_16_bits = candidate.strategy.is_sharded or self.machine.device.shared_copies > 0
        return Work(
            batch=candidate.micro_batch / dims.cp,
            samples=candidate.micro_batch,
            tp=dims.tp,
            precision=candidate.precision,
            variant=variant_of(
                is_sharded=gathers_16_bits,
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
            exchange=self._expert_exchange(candidate, work),
            orthogonalised=self._orthogonalised(work.variant, stages.slowest),
        )

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

    def _expert_exchange(self, candidate: Candidate, work: Work) -> ExpertExchange:
        """What the mixtures of a stage send, if the model has some."""
        dims = candidate.dims
        blocks = self.reader.blocks
        # Tensor-parallel workers may hold different experts, rather than a part of each. Then one
        # of them sends the rows for its own experts only.
        groups_over_tp = dims.tp if self._tp_splits_experts else 1
        numbers = self.reader.exchanged_numel * candidate.micro_batch / dims.cp / dims.pp
        numbers /= groups_over_tp
        recomputed_share = recomputed_blocks(candidate.checkpointing, blocks) / max(1, blocks)
        mixture = next(iter(self.reader.mixtures), None)
        return ExpertExchange(
            sent_bytes=numbers * work.itemsize * (1 + recomputed_share / 2),
            experts=mixture.count if mixture else 1,
            top_k=mixture.top_k if mixture else 1,
            workers=dims.ep * groups_over_tp,
        )

    @functools.cached_property
    def _tp_splits_experts(self) -> bool:
        """Whether tensor-parallel workers hold different experts, rather than a part of each."""
        parameters = self.reader.size.parameters
        return any(size.is_expert and size.split_dim == 0 for size in parameters)

    def _orthogonalised(
        self, variant: Variant, counts: tuple[int, ...]
    ) -> tuple[tuple[int, int, int], ...]:
        """(rows, columns, how many) of the matrices that Muon makes orthogonal.

        Args:
            variant: Which computation of the model the workers run.
            counts: How many of each part a stage has.
        """
        if self.optimizer != "muon":
            return ()
        model = self._model_costs(variant)
        matrices: Counter[tuple[int, int]] = Counter()
        for name, count in zip(model.parts, counts):
            if not names_block(name):
                continue
            for size in model.parameters[name]:
                if size.trainable and len(size.shape) == 2:
                    matrices[size.shape[0], size.shape[1]] += count
        return tuple((rows, columns, count) for (rows, columns), count in matrices.items())

    def _size_on_rank(self, case: Case) -> SizeOnRank:
        """Gives what one rank holds of a stage, by how many of each part the stage has."""
        shards = ParameterShards.of(case.candidate.parameter_dims)
        return functools.partial(self._rank_size, case.work.variant, case.work.tp, shards)

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
        """The size of one part of each kind, on one rank."""
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
                    is_root=not names_block(name),
                    expert_shards=shards.expert_shards,
                )
            )
        return units

    def _read_rank_size(
        self, variant: Variant, tp: int, shards: ParameterShards, counts: tuple[int, ...]
    ) -> RankSize:
        """What one rank holds of a stage that has so many of each part."""
        units = self._unit_sizes(variant, tp, shards)
        repeated = [unit for unit, count in zip(units, counts) for _ in range(count)]
        return rank_size(repeated, self.reader.size.buffer_bytes)

    def _cut_stages(self, work: Work, pp: int, schedule: str, chunks: int) -> Stages:
        """Stages of which the slowest is as fast as possible, or those that the user has cut."""
        model = self._model_costs(work.variant)
        if pp == 1:
            return single_stage(model)
        seconds = {part.name: part.seconds for part in self._part_costs(work)}
        sizes = self.options.stages
        if sizes is None or len(sizes) != pp * chunks:
            sizes = balanced_sizes(model, seconds, pp * chunks)
        return cut_into_stages(
            model,
            sizes,
            Placement.of(schedule, pp, chunks),
            seconds=seconds,
            watched_stage=self.watched_stage,
        )


def _attention_share(parts: list[PartCost]) -> float:
    """The share of the seconds of a model's kernels that attention takes."""
    attention = 0.0
    total = 0.0
    for part in parts:
        forward, backward = part.attention_seconds
        attention += (forward * part.attention_forwards + backward) * part.count
        total += part.seconds * part.count
    return attention / total if total else 0.0
