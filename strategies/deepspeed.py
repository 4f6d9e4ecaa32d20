"""DeepSpeed's ZeRO engine behind the interface of `Parallel` (`deepspeed`; an optional extra).

These are stages 1 to 3 of ZeRO, which fsdp.py describes, by the library that introduced them. The
engine flattens the parameters, hooks into backward, and owns the optimizer's step. Choose it if you
have a DeepSpeed configuration already, or for what only DeepSpeed has (offload to NVMe). Otherwise
`zero1`, `zero2` and `fsdp` do the same without another runtime, compose with tensor parallelism,
and write checkpoints that reshard without gathering. It costs what fsdp.py says, plus the engine's
buckets. https://www.deepspeed.ai/docs/config-json/; Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054.

Of the user's JSON, `zero_optimization` and everything about speed is used as it is. Batch sizes,
precision, optimizer, schedule and clipping belong to the experiment, because the training loop owns
them. (DeepSpeed clips at 1.0 by default, and divides by its own count of micro-batches: both are
turned off.) Checkpoints hold the state gathered from all ranks, under plain names, so any other
layout reads them.

The engine needs the optimizer before the first forward, so the loop hands it over in
`Parallel.prepare_optimizer`.
"""

import contextlib
import functools
import os
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from strategies import fsdp
from strategies.dims import Layout, LayoutError
from strategies.options import Options
from strategies.parallel import Parallel
from strategies.state import initialise_optimizer_state, load_model_state, require_same
from strategies.strategy import Applied, Setup, Strategy
from strategies.traits import Trait

PACKAGE = "deepspeed"

Configuration = dict[str, Any]
"""The contents of a DeepSpeed JSON."""

EXPERIMENT_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "fp16",
    "bf16",
)
"""Keys of a DeepSpeed JSON that the experiment decides."""


def engine_configuration(user_configuration: Configuration | None) -> Configuration:
    """The engine's configuration: the user's, with the experiment's keys as the loop needs them.

    Args:
        user_configuration: The contents of the user's JSON. None: ZeRO stage 2.

    Raises:
        LayoutError: It sets a key that the experiment decides, or a stage that cannot run here.
    """
    if user_configuration is None:
        user_configuration = {"zero_optimization": {"stage": 2}}
    configuration = dict(user_configuration)
    for key in EXPERIMENT_KEYS:
        if configuration.get(key) not in (None, "auto"):
            raise LayoutError(
                f"the DeepSpeed configuration sets {key}, which the experiment decides: leave it "
                "out there; train.* and optimizer.* are its place"
            )
        configuration.pop(key, None)
    stage = configuration.get("zero_optimization", {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise LayoutError(
            f"the DeepSpeed configuration has zero_optimization.stage {stage}: write 1, 2 or 3, "
            "or use ddp"
        )
    return configuration | {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        # With offload, DeepSpeed would insist on its own Adam instead of the experiment's
        # optimizer.
        "zero_force_ds_cpu_optimizer": False,
        "torch_autocast": {"enabled": False},
    }


def _check_options(options: Options) -> None:
    engine_configuration(options.deepspeed)
    if options.activation_offloading:
        # ZeRO-3 frees gathered weights by giving parameters other memory, which a saved tensor that
        # has passed a hook would not notice.
        raise LayoutError(
            "train.activation_offloading does not work with strategy deepspeed: write "
            "strategy=fsdp, or cpu_checkpointing in the DeepSpeed JSON"
        )


def apply(setup: Setup) -> Applied:
    """Loads the module; the engine wraps it once it has the optimizer (`prepare_optimizer`)."""
    configuration = engine_configuration(setup.options.deepspeed)
    setup.load()
    make_parallel = functools.partial(DeepSpeedParallel, configuration=configuration)
    return Applied(setup.module, make_parallel=make_parallel)


STRATEGY = Strategy(
    name=PACKAGE,
    summary="DeepSpeed's ZeRO engine",
    cost=fsdp.cost,
    collectives=fsdp.collectives,
    apply=apply,
    degrees=("dp_shard",),
    plannable=False,
    required_package=PACKAGE,
    check_options=_check_options,
    precisions=("fp32", "bf16"),
    reduce_dtype_refusal="is not for DeepSpeed: write communication_data_type in its JSON",
    # Its engine has parameters and hooks of its own in place of the model's, and may keep only
    # shards of them.
    cannot_keep=fsdp.STRATEGY.cannot_keep
    | {
        Trait.LOSS_READS_PARAMETERS,
        Trait.LISTS_PARAMETERS,
        Trait.PARAMETERS_VARY,
        Trait.VARIES_BY_CALL,
    },
)


class DeepSpeedParallel(Parallel):
    """A model under DeepSpeed's engine, which `prepare_optimizer` starts.

    Args:
        module: The model.
        layout: The layout that was applied.
        device: This worker's device.
        configuration: The engine's configuration.
        arguments: See Parallel.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: Layout,
        device: torch.device,
        *,
        configuration: Configuration,
        **arguments: Any,
    ) -> None:
        super().__init__(module, layout, device, **arguments)
        self.configuration = configuration
        self.engine: Any = None
        self.norm: Tensor | None = None
        """The gradient norm of a step that `grad_norm_` has taken."""

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        world_size = str(dist.get_world_size())
        os.environ.setdefault("LOCAL_SIZE", os.environ.get("LOCAL_WORLD_SIZE", world_size))
        try:
            import deepspeed
        except Exception as error:
            # The package imports, and builds, a great deal, so any error is possible.
            raise LayoutError(
                f"strategy deepspeed: the package does not import here ({error})"
            ) from error
        engine, *_ = deepspeed.initialize(
            model=self.inner,
            optimizer=optimizer,
            config=self.configuration,
            dist_init_required=False,
        )
        self.engine = engine
        self.module = engine
        return EngineOptimizer(self, optimizer)  # type: ignore[return-value]

    def micro_step(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        return contextlib.nullcontext()

    def grad_norm_(self, clip: float | None) -> Tensor:
        """Takes the step, in which the engine measures and clips.

        The optimizer's own step then does nothing.
        """
        self.engine.optimizer.clip_grad = clip or 0.0
        self.engine.step()
        engine_norm = self.engine.get_global_grad_norm()
        norm = float("nan") if engine_norm is None else engine_norm
        self.norm = torch.as_tensor(norm, device=self.device).float()
        return self.norm

    # --- the model's state ------------------------------------------------------------------------

    def model_state(self) -> dict[str, Any]:
        """Whole tensors, gathered from all ranks: collective."""
        from deepspeed.utils import safe_get_full_fp32_param

        if self.engine is None:
            return dict(self.inner.state_dict())
        first_names = self._first_names()
        state = self.inner.state_dict()
        buffers = {name: value for name, value in state.items() if name not in first_names}
        whole = {name: safe_get_full_fp32_param(parameter) for name, parameter in self._named}
        parameters = {
            name: whole[first_name].to(self.device) for name, first_name in first_names.items()
        }
        return parameters | buffers

    def _first_names(self) -> dict[str, str]:
        """Every name of every parameter → the parameter's first name."""
        named = self.inner.named_parameters(remove_duplicate=False)
        return {name: self._names[parameter] for name, parameter in named}

    @staticmethod
    def _whole_shape(parameter: nn.Parameter) -> torch.Size:
        """The shape of the whole parameter; in stage 3 a rank holds a flat part of it."""
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    def load_model_state(self, values: dict[str, Any]) -> None:
        if self.engine is None:
            load_model_state(self.inner, values)
            return
        import deepspeed

        parameters = self.inner.named_parameters(remove_duplicate=False)
        shapes = {name: self._whole_shape(parameter) for name, parameter in parameters}
        other_names = {name for name in self.inner.state_dict() if name not in shapes}
        for name, buffer in self.inner.named_buffers():
            if name in other_names:
                shapes[name] = buffer.shape
        require_same(shapes, values, names={*shapes, *other_names})
        for name, parameter in self._named:
            value = values[name].to(self.device)
            _set_float32_copy(parameter, value)
            is_partitioned = hasattr(parameter, "ds_id")
            gathered = deepspeed.zero.GatheredParameters(
                [parameter], modifier_rank=0, enabled=is_partitioned
            )
            with gathered, torch.no_grad():
                parameter.data.copy_(value)
        with torch.no_grad():
            for name, buffer in self.inner.named_buffers():
                if name in values:
                    buffer.copy_(values[name])

    # --- the optimizer's state --------------------------------------------------------------------

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        from deepspeed.utils import safe_get_full_optimizer_state

        keys, step_count = self._state_entries(optimizer)
        state = {}
        for name, parameter in self._named:
            if parameter.requires_grad:
                tensors = {
                    key: safe_get_full_optimizer_state(parameter, key).to(self.device)
                    for key in keys
                }
                state[name] = tensors | step_count
        return {"state": state, "groups": {}}

    def load_optimizer_state(self, optimizer: Any, values: dict[str, Any]) -> None:
        keys, _ = self._state_entries(optimizer)
        state = values["state"]
        for name, parameter in self._named:
            if parameter.requires_grad:
                for key in keys:
                    _set_optimizer_tensor(parameter, key, state[name][key].to(self.device))
        step = next(iter(state.values())).get("step")
        for entries in optimizer.base.state.values():
            if "step" not in entries:
                continue
            if isinstance(entries["step"], Tensor):
                entries["step"].copy_(torch.as_tensor(step))
            else:
                entries["step"] = int(step)

    def _state_entries(self, optimizer: Any) -> tuple[list[str], dict[str, Tensor]]:
        """What the optimizer keeps; its state is initialised if there is none.

        Returns:
            The names of the tensors that it keeps per parameter, and its step count as the entry
            "step", if it counts steps.
        """
        if not optimizer.base.state:
            self._initialise_state(optimizer.base)
        entries: dict[str, Any] = next(iter(optimizer.base.state.values()), {})
        keys = [key for key, value in entries.items() if isinstance(value, Tensor) and value.dim()]
        if "step" not in entries:
            return keys, {}
        return keys, {"step": torch.as_tensor(entries["step"]).clone().float()}

    def _initialise_state(self, base: torch.optim.Optimizer) -> None:
        """Creates the state before the first step, over the flat parts that the engine steps on."""
        zero_optimizer = self.engine.optimizer
        is_stage_3 = hasattr(zero_optimizer, "fp32_partitioned_groups_flat")
        if not is_stage_3:
            initialise_optimizer_state(base)
            zero_optimizer._lazy_init_hp_params_optimizer_state()
            return
        # Stage 3 hands its parts to the optimizer one by one, so outside of a step it has none.
        for number, flat in enumerate(zero_optimizer.fp32_partitioned_groups_flat):
            group = zero_optimizer.sub_group_to_group_id[number]
            base.param_groups[group]["params"].append(flat)
        initialise_optimizer_state(base)
        for param_group in base.param_groups:
            param_group["params"] = []


def _set_float32_copy(parameter: nn.Parameter, value: Tensor) -> None:
    """Writes the engine's own float32 copy of a parameter.

    Args:
        parameter: The model's parameter.
        value: The whole value.
    """
    from deepspeed import utils as fragments

    if hasattr(parameter, "ds_id"):
        fragments.safe_set_local_fp32_param(parameter, _local_part(parameter, value))
    else:
        fragments.safe_set_full_fp32_param(parameter, value.float())


def _set_optimizer_tensor(parameter: nn.Parameter, key: str, value: Tensor) -> None:
    """Writes one of the tensors that the optimizer keeps of a parameter.

    Args:
        parameter: The model's parameter.
        key: The tensor's name in the optimizer's state.
        value: The whole value.
    """
    from deepspeed import utils as fragments

    if hasattr(parameter, "ds_id"):
        fragments.safe_set_local_optimizer_state(parameter, _local_part(parameter, value), key)
    else:
        fragments.safe_set_full_optimizer_state(parameter, value.float(), key)


def _local_part(parameter: nn.Parameter, value: Tensor) -> Tensor:
    """This rank's flat part of a whole value, in stage 3.

    DeepSpeed's safe_set_full_… functions do not know that the last rank's part is padded.
    """
    numel = parameter.ds_tensor.numel()  # type: ignore[attr-defined]
    flat = value.float().flatten()
    padded = torch.nn.functional.pad(flat, (0, numel * dist.get_world_size() - flat.numel()))
    return padded.narrow(0, numel * dist.get_rank(), numel)


class EngineOptimizer:
    """What the loop uses as its optimizer.

    Its step is the engine's, unless `grad_norm_` has just taken it.

    Args:
        parallel: The model under the engine.
        base: The experiment's optimizer.
    """

    def __init__(self, parallel: DeepSpeedParallel, base: torch.optim.Optimizer) -> None:
        self.parallel = parallel
        self.base = base

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
        """Does nothing: the engine's step has done it."""
