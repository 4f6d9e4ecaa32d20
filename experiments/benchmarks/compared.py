"""A published run beside the plan of the same model in the same layout."""

from dataclasses import dataclass, replace

from app.planner.estimate import Estimate, Estimator
from app.planner.layouts import Candidate
from app.planner.machine import of_shape
from app.planner.plan import GIB
from cluster.shape import of_gpus
from experiments.benchmarks import fit
from experiments.benchmarks.published_runs import Run, reader_of
from strategies import registry
from strategies.dims import Layout, ParallelDims
from strategies.options import Options


@dataclass(frozen=True)
class Compared:
    """A run and what the plan says of it."""

    run: Run
    plan: Estimate

    @property
    def error(self) -> float:
        """Of tokens/s: 0.1 is a tenth too fast."""
        return self.run.step_seconds / self.plan.step_seconds - 1

    @property
    def memory_error(self) -> float:
        """Of what was measured, be it what torch has reserved or the whole card; of a run that tells it."""
        return (self.plan.memory_bytes / GIB + self.run.beside_gib) / self.run.memory_gib - 1


def layouts_of(run: Run) -> list[Candidate]:
    """The layout that a run had; several where it does not tell all of it."""
    copies = run.gpus // (run.tp * run.pp * run.cp)
    shard = {"hsdp": min(copies, run.per_node), "ddp": 1}.get(run.data, copies)
    dims = ParallelDims(dp_replicate=copies // shard, dp_shard=shard, tp=run.tp, pp=run.pp)
    data = "fsdp" if run.pp > 1 and run.data == "zero1" else run.data  # in a pipeline they are the same
    split = [registry.by_degrees(name).name for name in ("tp", "pp") if getattr(run, name) > 1]
    layout = Layout("+".join([*([data] if copies > 1 else []), *split] or ["single"]), dims)
    share, found = run.global_batch // copies, []
    for size in [run.micro_batch] if run.micro_batch else [size for size in (1, 2, 4) if share % size == 0]:
        for chunks in [run.chunks] if run.chunks else [c for c in (1, 2, 4, 6, 7) if run.n_layers >= run.pp * c]:
            chunks = chunks if run.pp > 1 else 1
            schedule = "" if run.pp == 1 else "interleaved_1f1b" if chunks > 1 else "1f1b"
            found.append(Candidate(layout, size, share // size, run.recompute, run.precision, schedule, chunks))
    return found


_CUTS: dict[tuple[Run, Candidate], tuple[int, ...] | None] = {}


def estimator_of(run: Run, values: fit.Values | None = None, overlap: bool = False) -> Estimator:
    """values: what is tried instead of the GPU's constants. overlap: as if the run had it."""
    shape = of_gpus(run.gpus, run.gpu, min(run.per_node, run.gpus), run.network_gbit * 1e9 / 8)
    machine = of_shape(shape, run.gpus)
    device = fit.changed(values)(machine.device) if values else machine.device
    device = replace(device, attention=device.attention * run.flash, again=run.again)
    if run.fragments:
        device = replace(device, fragmentation=run.fragments / (1 - run.fragments))
    options = Options(
        compile=run.kernels == "fused",
        sequence_parallel=bool(run.sequence_parallel),
        async_tp=bool(run.overlap or overlap),
        reduce_dtype=run.reduce,
    )
    return Estimator(reader_of(run), replace(machine, device=device), options, clips=True)


def compare(run: Run, values: fit.Values | None = None) -> Compared:
    """A run beside its plan. values: what is tried instead of the GPU's constants."""
    plans, estimator = [], estimator_of(run, values)
    for candidate in layouts_of(run):  # the cut of a pipeline hardly depends on the constants, and takes time to find
        asked = replace(estimator.options, stages=_CUTS.get((run, candidate)))
        plans.append(replace(estimator, options=asked).estimate(candidate))
        _CUTS[run, candidate] = plans[-1].stages
    return Compared(run, min(plans, key=lambda plan: (not plan.fits, plan.step_seconds)))
