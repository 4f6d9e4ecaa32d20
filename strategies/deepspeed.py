"""DeepSpeed's ZeRO engine behind our face, for those who have its JSON (`deepspeed`; an optional extra).

Stages 1 to 3 of ZeRO as fsdp.py describes them, by the library that brought them: the engine flattens the parameters,
hooks into backward, and owns the optimizer's step. Choose it for a DeepSpeed configuration that is there
already, or for what only DeepSpeed has (offload to NVMe); otherwise `zero1`, `zero2` and `fsdp` do the same without
another runtime, compose with tensor parallelism, and write checkpoints that reshard without gathering.
https://www.deepspeed.ai/docs/config-json/; Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054. It costs what
fsdp.py says, plus the engine's buckets.

What is taken from a person's JSON and what is not: `zero_optimization` and everything about speed is theirs; batch
sizes, precision, optimizer, schedule and clipping are the experiment's, because the loop owns them. (DeepSpeed clips at
1.0 unless told otherwise, and divides by its own count of micro-batches: both are set here.) Its checkpoint state is
gathered whole on every rank, under plain names, so any other layout reads it.

The engine needs the optimizer before the first forward, so the loop hands it over
(`Parallel.prepare_optimizer`).
"""

import contextlib
import functools
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from strategies import fsdp
from strategies.dims import Layout, LayoutError
from strategies.parallel import Parallel
from strategies.state import initialise, load_model_state, require_same
from strategies.strategy import Applied, Setup, Strategy
from strategies.traits import Trait

PACKAGE = "deepspeed"
_BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
OURS = (*_BATCH, "optimizer", "scheduler", "fp16", "bf16")
"""Keys of a DeepSpeed JSON that the experiment decides."""


def configuration(given: dict[str, Any] | None) -> dict[str, Any]:
    """The engine's configuration: the person's, with the keys that are ours as the loop needs them.

    Raises:
        LayoutError: a key of ours, or a stage that the engine cannot run here.
    """
    given = dict({"zero_optimization": {"stage": 2}} if given is None else given)
    for key in OURS:
        if given.get(key) not in (None, "auto"):
            raise LayoutError(
                f"the DeepSpeed configuration sets {key}, which the experiment decides: leave it out there; train.* "
                "and optimizer.* are its place"
            )
        given.pop(key, None)
    stage = given.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise LayoutError(
            f"the DeepSpeed configuration has zero_optimization.stage {stage}: write 1, 2 or 3, or use ddp"
        )
    fixed: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # with offload it would insist on its own Adam; the experiment's steps
        "torch_autocast": {"enabled": False},
    }
    return given | fixed


def apply(setup: Setup) -> Applied:
    """The module as it is: the engine takes it over once it has the optimizer (`prepare_optimizer`)."""
    config = configuration(setup.options.deepspeed)
    setup.load()
    parallel = functools.partial(DeepSpeedParallel, config=config)
    return Applied(setup.module, parallel=parallel)


STRATEGY = Strategy(
    PACKAGE,
    "DeepSpeed's ZeRO engine",
    fsdp.cost,
    fsdp.collectives,
    apply,
    degrees=("dp_shard",),
    plannable=False,
    requires=PACKAGE,
    check=lambda options: configuration(options.deepspeed),
    precisions=("fp32", "bf16"),
    reduce_dtype="is not for DeepSpeed: write communication_data_type in its JSON",
    # Its engine has parameters and hooks of its own in place of the model's, and may keep only shards of them.
    cannot_keep=fsdp.STRATEGY.cannot_keep
    | {Trait.LOSS_READS_PARAMETERS, Trait.LISTS_PARAMETERS, Trait.PARAMETERS_VARY, Trait.VARIES_BY_CALL},
)


class DeepSpeedParallel(Parallel):
    """A model under DeepSpeed's engine, once `prepare_optimizer` has given it the optimizer."""

    def __init__(self, module: nn.Module, layout: Layout, device: torch.device, *, config: dict[str, Any], **rest: Any):
        super().__init__(module, layout, device, **rest)
        self.config = config
        self.engine: Any = None
        self.norm: torch.Tensor | None = None  # of the step that grad_norm_ has taken

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", str(dist.get_world_size())))
        try:
            import deepspeed
        except Exception as error:  # it imports, and builds, a great deal
            raise LayoutError(f"strategy deepspeed: the package does not import here ({error})") from error
        self.engine = deepspeed.initialize(
            model=self.inner, optimizer=optimizer, config=self.config, dist_init_required=False
        )[0]
        self.module = self.engine
        return EngineOptimizer(self, optimizer)  # type: ignore[return-value]

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def grad_norm_(self, clip: float | None) -> torch.Tensor:
        """The engine measures and clips inside its step, so this takes the step; the optimizer's then does nothing."""
        self.engine.optimizer.clip_grad = clip or 0.0
        self.engine.step()
        norm = self.engine.get_global_grad_norm()
        self.norm = torch.as_tensor(float("nan") if norm is None else norm, device=self.device).float()
        return self.norm

    def model_state(self) -> dict[str, Any]:
        """Whole tensors, gathered: collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        buffers = {k: v for k, v in self.inner.state_dict().items() if k not in self._aliases()}
        if self.engine is None:
            return dict(self.inner.state_dict())
        whole = {name: safe_get_full_fp32_param(parameter) for name, parameter in self._named}
        return {alias: whole[name].to(self.device) for alias, name in self._aliases().items()} | buffers

    def _aliases(self) -> dict[str, str]:
        """Every name of every parameter → its first."""
        return {alias: self._names[p] for alias, p in self.inner.named_parameters(remove_duplicate=False)}

    @staticmethod
    def _shape(parameter: nn.Parameter) -> torch.Size:
        """Of the whole parameter; in stage 3 a rank holds a flat part."""
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def load_model_state(self, values: dict[str, Any]) -> None:
        if self.engine is None:
            return load_model_state(self.inner, values)
        import deepspeed

        shapes = {alias: self._shape(p) for alias, p in self.inner.named_parameters(remove_duplicate=False)}
        kept = {name for name in self.inner.state_dict() if name not in shapes}
        shapes |= {name: buffer.shape for name, buffer in self.inner.named_buffers() if name in kept}
        require_same(shapes, values, {*shapes, *kept})
        for name, parameter in self._named:
            value = values[name].to(self.device)
            _set(parameter, value)
            gathered = deepspeed.zero.GatheredParameters(
                [parameter], modifier_rank=0, enabled=hasattr(parameter, "ds_id")
            )
            with gathered, torch.no_grad():
                parameter.data.copy_(value)
        with torch.no_grad():
            for name, buffer in self.inner.named_buffers():
                if name in values:
                    buffer.copy_(values[name])
        return None

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        keys, steps = self._kept(optimizer)
        state = {
            name: {key: safe_get_full_optimizer_state(p, key).to(self.device) for key in keys} | steps
            for name, p in self._named
            if p.requires_grad
        }
        return {"state": state, "groups": {}}

    def load_optimizer_state(self, optimizer: Any, values: dict[str, Any]) -> None:
        keys, _ = self._kept(optimizer)
        state = values["state"]
        for name, parameter in self._named:
            for key in keys if parameter.requires_grad else ():
                _set(parameter, state[name][key].to(self.device), key)
        steps = next(iter(state.values())).get("step")
        for own in optimizer.base.state.values():
            if "step" in own and isinstance(own["step"], torch.Tensor):
                own["step"].copy_(torch.as_tensor(steps))
            elif "step" in own:
                own["step"] = int(steps)

    def _kept(self, optimizer: Any) -> tuple[list[str], dict[str, Any]]:
        """Names of the tensors that the optimizer keeps per parameter (made if there are none), and its step count."""
        if not optimizer.base.state:
            self._begin_state(optimizer.base)
        own: dict[str, Any] = next(iter(optimizer.base.state.values()), {})
        keys = [key for key, value in own.items() if isinstance(value, torch.Tensor) and value.dim() > 0]
        steps = {"step": torch.as_tensor(own["step"]).clone().float()} if "step" in own else {}
        return keys, steps

    def _begin_state(self, base: torch.optim.Optimizer) -> None:
        """The state of no step yet, over the flat parts that the engine steps on."""
        zero = self.engine.optimizer
        if hasattr(zero, "fp32_partitioned_groups_flat"):  # stage 3 hands its parts to the optimizer one by one
            for i, flat in enumerate(zero.fp32_partitioned_groups_flat):
                base.param_groups[zero.sub_group_to_group_id[i]]["params"].append(flat)
            initialise(base)
            for group in base.param_groups:
                group["params"] = []
        else:
            initialise(base)
            zero._lazy_init_hp_params_optimizer_state()


def _set(parameter: nn.Parameter, value: torch.Tensor, key: str | None = None) -> None:
    """Writes the engine's own float32 copy of a parameter, or of one of its optimizer's tensors."""
    from deepspeed import utils as fragments

    value = value.float()
    if hasattr(parameter, "ds_id"):  # the last part is padded, which safe_set_full_… does not know
        part = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
        flat = torch.nn.functional.pad(value.flatten(), (0, part * dist.get_world_size() - value.numel()))
        own = flat.narrow(0, part * dist.get_rank(), part)
        if key is None:
            fragments.safe_set_local_fp32_param(parameter, own)
        else:
            fragments.safe_set_local_optimizer_state(parameter, own, key)
    elif key is None:
        fragments.safe_set_full_fp32_param(parameter, value)
    else:
        fragments.safe_set_full_optimizer_state(parameter, value, key)


class EngineOptimizer:
    """What the loop calls as its optimizer: the engine's step, unless `grad_norm_` has just taken it."""

    def __init__(self, parallel: DeepSpeedParallel, base: torch.optim.Optimizer) -> None:
        self.parallel, self.base = parallel, base

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.base.param_groups

    @property
    def state(self) -> Any:
        return self.base.state

    def step(self) -> None:
        if self.parallel.norm is None:
            self.parallel.grad_norm_(None)
        self.parallel.norm = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The engine's step has done it."""
