"""The optimizer, its learning rate at each step, and the loss scale of fp16."""

import fnmatch
import inspect
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from app.config import OptimizerConfig, ScheduleConfig
from app.config.arguments import no_such_argument
from app.config.check import unknown_optimizer
from app.errors import NonFiniteError, UserError, nearest
from app.tasks.user_code import user_module
from app.training.eight_bit import AdamW8bit
from app.training.narrow_adamw import NarrowAdamW
from app.training.task_optimizer import closure_mistake, needs_closure
from app.training.whole_matrix import Adafactor, Muon, Rprop
from app.training.width_transfer import Widths, decays_with_rate, rate_factor
from strategies.options import Options
from strategies.precision import DTYPES

BUILT_IN: dict[str, type[torch.optim.Optimizer]] = {
    "adadelta": torch.optim.Adadelta,
    "adafactor": Adafactor,
    "adagrad": torch.optim.Adagrad,
    "adam": torch.optim.Adam,
    "adamax": torch.optim.Adamax,
    "adamw": torch.optim.AdamW,
    "adamw8bit": AdamW8bit,
    "asgd": torch.optim.ASGD,
    "muon": Muon,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "rprop": Rprop,
    "sgd": torch.optim.SGD,
}
"""AdamW in 8 bits, and torch's optimizers that need neither sparse gradients nor a closure."""
TAKES_BETAS = ("adam", "adamw", "adamw8bit", "nadam", "radam", "adamax")
OPTIONS_OF = {
    "betas": (*TAKES_BETAS, "muon"),
    "eps": (*TAKES_BETAS, "muon"),
    "momentum": ("sgd",),
}
"""Options of `optimizer`, and the optimizers that read them. Others may use `optimizer.args`."""
FUSED = ("adam", "adamw", "sgd")
Named = Mapping[Tensor, str]
SMALLEST_SCALE = 2.0**-10  # of the loss
LARGEST_SCALE = 2.0**24
ONE_CYCLE_RISE = 0.3
"""Share of the steps in which one_cycle rises, if schedule.warmup_steps is 0."""
ONE_CYCLE_START = 1 / 25
"""Share of the peak rate at which one_cycle begins."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class that `optimizer.name` names.

    Args:
        name: A built-in one such as `adamw`, or `module:Class`.

    Raises:
        UserError: There is no such optimizer, or it needs a closure.
    """
    if name in BUILT_IN:
        return BUILT_IN[name]
    module, colon, attribute = name.partition(":")
    if not colon:
        raise UserError(unknown_optimizer(name))
    try:
        chosen = getattr(user_module(module, attribute), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"optimizer.name is {name!r}, which does not import: {error}") from error
    if not (inspect.isclass(chosen) and issubclass(chosen, torch.optim.Optimizer)):
        raise UserError(f"optimizer.name is {name!r}, which is not a torch.optim.Optimizer class")
    if needs_closure(chosen):
        raise UserError(f"optimizer.name is {name!r}: {closure_mistake(chosen)}")
    return chosen


def check_optimizer(config: OptimizerConfig, weight_dtype: str = Options.weight_dtype) -> None:
    """Check the optimizer's arguments, also those of optimizer.groups, without a model.

    Args:
        config: The optimizer's name and arguments.
        weight_dtype: `train.weight_dtype`.

    Raises:
        UserError: There is no such optimizer, or it does not take the arguments.
    """
    _check_args(config, weight_dtype)
    if config.name not in BUILT_IN:
        return
    shapes = ((2, 2), (2,))
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = build_optimizer(config, parameters, weight_dtype=weight_dtype)
    known = {key for group in optimizer.param_groups for key in group} - {"params"}
    for pattern, arguments in config.groups.items():
        for key in arguments:
            if key not in known:
                raise UserError(
                    f"optimizer.groups[{pattern!r}].{key}: {config.name} has no such argument"
                    f"{nearest(key, known)}; it has {', '.join(sorted(known))}"
                )


def _has_narrow_class(config: OptimizerConfig, weight_dtype: str) -> bool:
    """Whether AdamW keeps its moments or its weights in 16 bits."""
    is_narrow = config.state_dtype != "fp32" or weight_dtype != "fp32"
    return config.name == "adamw" and is_narrow


def _check_args(config: OptimizerConfig, weight_dtype: str) -> None:
    """Check the names of optimizer.args.

    Raises:
        UserError: The optimizer's class takes no such argument, or gets it from another key.
    """
    takers = {
        "lr": (config.name,),
        "weight_decay": (config.name,),
        "betas": TAKES_BETAS,
        "eps": TAKES_BETAS,
        "momentum": OPTIONS_OF["momentum"],
    }
    for name in config.args:
        if config.name in takers.get(name, ()):
            raise UserError(
                f"optimizer.args.{name}: {config.name} gets it from optimizer.{name}: "
                f"write optimizer.{name}={config.args[name]}"
            )
    chosen = optimizer_class(config.name)
    if _has_narrow_class(config, weight_dtype):
        chosen = NarrowAdamW
    parameters = inspect.signature(chosen).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    from_elsewhere = {"params", *(name for name in takers if config.name in takers[name])}
    if issubclass(chosen, NarrowAdamW):
        from_elsewhere |= {"state_dtype", "names", "seed"}
    known = [name for name in parameters if name not in from_elsewhere]
    for name in config.args:
        if name not in known:
            owner = f"optimizer {config.name!r}"
            raise UserError(no_such_argument(name, known, key="optimizer.args", owner=owner))


def build_optimizer(
    config: OptimizerConfig,
    parameters: Iterable[nn.Parameter],
    *,
    names: Named | None = None,
    hidden: Collection[str] | None = None,
    widths: Widths | None = None,
    weight_dtype: str = Options.weight_dtype,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """The configured optimizer over the parameters that are trained.

    Biases and norms, which have fewer than two dimensions, get no weight decay. adam, adamw and
    sgd update all parameters in one fused kernel, on GPUs and CPUs alike. Muon updates the matrices
    of hidden layers, and AdamW everything else.

    Args:
        config: The optimizer's name and arguments.
        parameters: Those of the model.
        names: Their names, for optimizer.groups, widths and rounding; None: there are none of them.
        hidden: The names of the matrices that Muon is for; None: all that have two dimensions.
        widths: The parameters beside those of a base model, for optimizer.width_transfer.
        weight_dtype: `train.weight_dtype`.
        seed: Of rounding at random.

    Raises:
        UserError: The optimizer does not take the arguments.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    try:
        if config.name != "muon":
            return _optimizer(
                config,
                trainable,
                names=names,
                widths=widths,
                is_narrow=_has_narrow_class(config, weight_dtype),
                seed=seed,
            )
        name_of = names or {}
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for parameter in trainable:
            is_hidden = hidden is None or name_of.get(parameter) in hidden
            (matrices if is_hidden and parameter.dim() == 2 else others).append(parameter)
        return Optimizers(
            {
                "muon": _optimizer(config, matrices, names=names, widths=widths),
                "adamw": _optimizer(
                    config, others, names=names, widths=widths, adamw_for_the_rest=True
                ),
            }
        )
    except (TypeError, ValueError) as error:
        raise UserError(
            f"optimizer {config.name} does not take these arguments: {error}"
        ) from error


def unused_options(config: OptimizerConfig) -> Iterator[str]:
    """A sentence for each option that differs from its default and does not reach the optimizer."""
    defaults = OptimizerConfig()
    for option, names in OPTIONS_OF.items():
        value = getattr(config, option)
        if config.name not in names and value != getattr(defaults, option):
            yield (
                f"optimizer.{option} is {value}, but it is for {', '.join(names)} and does not "
                f"reach {config.name}: if that takes it, write optimizer.args={{{option}: {value}}}"
            )


def _optimizer(
    config: OptimizerConfig,
    trainable: list[nn.Parameter],
    *,
    names: Named | None,
    widths: Widths | None,
    adamw_for_the_rest: bool = False,
    is_narrow: bool = False,
    seed: int = 0,
) -> torch.optim.Optimizer:
    """One optimizer; the arguments in optimizer.args are not for the AdamW beside Muon."""
    name = "adamw" if adamw_for_the_rest else config.name
    options: dict[str, Any] = {"lr": config.lr}
    if name == "muon":
        options["adjust_lr_fn"] = "match_rms_adamw"  # so that one rate fits AdamW too
    if not adamw_for_the_rest:
        options |= config.args
    if name in TAKES_BETAS:
        options["betas"] = (config.betas[0], config.betas[1])
        options["eps"] = config.eps
    elif name == "sgd":
        options["momentum"] = config.momentum
    name_of = names or {}
    chosen = NarrowAdamW if is_narrow else optimizer_class(name)
    if is_narrow:
        options["state_dtype"] = DTYPES[config.state_dtype]
    elif name in FUSED:
        options["fused"] = True
    if issubclass(chosen, NarrowAdamW):
        options |= {"names": name_of, "seed": seed}
    factors: dict[Tensor, float] = {}
    for parameter in trainable:
        width = (widths or {}).get(name_of.get(parameter, ""))
        factors[parameter] = 1.0 if width is None else rate_factor(name, width, options)
    groups = _parameter_groups(
        config,
        name,
        trainable,
        names=name_of,
        rate_factors=factors,
        divides_decay=decays_with_rate(name, options),
    )
    return chosen(groups, **options)


def _parameter_groups(
    config: OptimizerConfig,
    name: str,
    trainable: list[nn.Parameter],
    *,
    names: Named,
    rate_factors: Mapping[Tensor, float],
    divides_decay: bool,
) -> list[dict[str, Any]]:
    """The parameters in groups of one kind, one set of optimizer.groups and one factor.

    A kernel takes only one kind.

    Args:
        config: The configuration of the optimizer.
        name: The optimizer that the groups are for.
        trainable: The parameters.
        names: Their names; {}: there are no optimizer.groups.
        rate_factors: What the rate of each parameter is multiplied by.
        divides_decay: Whether the weight decay is divided by it.
    """
    # Scalars are never sharded, so they have groups of their own; under ddp a mixture of experts
    # has both distributed and plain parameters.
    kinds = itertools.product((2, 1, 0), (False, True), (False, True))
    settings = {p: (matching_patterns(config, names.get(p)), rate_factors[p]) for p in trainable}
    # In an order that no layout changes; the configured rate comes first, which is logged as lr.
    distinct = sorted(set(settings.values()), key=lambda pair: (pair[0], abs(math.log(pair[1]))))
    groups: list[dict[str, Any]] = []
    for (dim, is_distributed, is_complex), setting in itertools.product(kinds, distinct):
        kind = (dim, is_distributed, is_complex)
        members = [
            parameter
            for parameter in trainable
            if _kind(parameter) == kind and settings[parameter] == setting
        ]
        if not members:
            continue
        group: dict[str, Any] = {"params": members}
        group["weight_decay"] = config.weight_decay if dim == 2 else 0.0
        group |= _kernels(name, is_distributed=is_distributed, is_complex=is_complex)
        matched, factor = setting
        for pattern in matched:
            group |= config.groups[pattern]
        if factor != 1:
            group["lr"] = group.get("lr", config.lr) * factor
            if divides_decay:
                group["weight_decay"] /= factor
        if "lr" in group:
            group["initial_lr"] = group["lr"]  # the schedule multiplies this rate
        groups.append(group)
    return groups or [{"params": []}]  # a stage of a pipeline may have nothing to train


def matching_patterns(config: OptimizerConfig, name: str | None) -> tuple[str, ...]:
    """The patterns of optimizer.groups that a parameter's name matches, as they are written."""
    if name is None:
        return ()
    return tuple(pattern for pattern in config.groups if fnmatch.fnmatchcase(name, pattern))


def require_matches(config: OptimizerConfig, names: Iterable[str]) -> None:
    """Check that every pattern of optimizer.groups matches a trained parameter.

    Raises:
        UserError: One matches none.
    """
    names = list(names)
    for pattern in config.groups:
        if not fnmatch.filter(names, pattern):
            raise UserError(
                f"optimizer.groups has the pattern {pattern!r}, which matches no trained "
                f"parameter; the first one's name is {next(iter(names), '(none)')}"
            )


def hidden_matrices(model: nn.Module, blocks: Collection[str]) -> set[str]:
    """The names of the matrices that Muon is for: those of layers inside the repeating blocks.

    Without blocks they are all but those of embeddings and of the last linear layer.
    """
    tables = {
        layer.weight
        for layer in model.modules()
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag))
    }
    linear = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    if not blocks and len(linear) > 1:
        tables.add(linear[-1].weight)
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 2
        and parameter not in tables
        and (not blocks or any(name.startswith(f"{block}.") for block in blocks))
    }


class Optimizers(torch.optim.Optimizer):
    """Several optimizers, each of its own parameters, as one.

    Args:
        named: The optimizers by name.
    """

    def __init__(self, named: Mapping[str, torch.optim.Optimizer]) -> None:
        groups = [group for optimizer in named.values() for group in optimizer.param_groups]
        super().__init__(groups, {})
        self.named = dict(named)
        # The optimizers' groups themselves, not copies: a rate that is set here is set there.
        self.param_groups = groups

    @property
    def state(self) -> Any:
        merged: dict[Tensor, Any] = {}
        for optimizer in self.named.values():
            merged |= optimizer.state
        return merged

    @state.setter
    def state(self, value: Any) -> None:
        """Ignores the empty state that torch's constructor sets."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for optimizer in self.named.values():
            optimizer.step()


def _kind(parameter: nn.Parameter) -> tuple[int, bool, bool]:
    """(dimensions, at most 2; whether it is distributed; whether it is complex)"""
    return min(parameter.dim(), 2), isinstance(parameter, DTensor), parameter.is_complex()


def _kernels(name: str, *, is_distributed: bool, is_complex: bool) -> dict[str, bool]:
    """Arguments of a parameter group that a built-in optimizer's fused kernel does not take.

    No fused kernel takes complex parameters, and torch 2.13 has no rule for SGD's with distributed
    ones.
    """
    if name in FUSED and is_complex:
        return {"fused": False}  # NarrowAdamW, which has no such kernels, ignores it
    if name == "sgd" and is_distributed:
        return {"fused": False, "foreach": True}
    return {}


# --- the learning rate ----------------------------------------------------------------------------


def learning_rate(
    optimizer: OptimizerConfig,
    schedule: ScheduleConfig,
    step: float,
    *,
    steps: int,
    batch_size: int | None = None,
) -> float:
    """The learning rate of a step: linear warm-up, then the schedule's curve.

    A peak rate that optimizer.lr_scaling has raised is warmed up from optimizer.lr (Goyal et al.
    2017, section 2.2), any other from 0.

    Args:
        optimizer: Has the base rate, and how it scales with the batch.
        schedule: Has the warm-up and the curve.
        step: The step, counted from 0; between two steps where batches differ.
        steps: Steps of the whole run.
        batch_size: The global batch size in samples; None means that the rate is not scaled.
    """
    peak = peak_rate(optimizer, batch_size)
    warmup = schedule.warmup_steps
    if schedule.name == "one_cycle":
        return peak * _one_cycle(schedule, step, steps)
    if step < warmup:
        start = optimizer.lr if peak > optimizer.lr else 0.0
        return start + (peak - start) * (step + 1) / warmup
    return peak * _curve(schedule, step, steps)


def _curve(schedule: ScheduleConfig, step: float, steps: int) -> float:
    """What the schedule multiplies the peak rate by after warm-up."""
    warmup = schedule.warmup_steps
    match schedule.name:
        case "constant":
            return 1.0
        case "inverse_sqrt":
            return math.sqrt(max(1, warmup) / max(1, warmup, step + 1))
        case "step":
            every = schedule.decay_steps or max(1, -(-(steps - warmup) // 3))
            return schedule.decay_factor ** ((step - warmup) // every)
        case "wsd":
            decay = schedule.decay_steps or max(1, (steps - warmup) // 5)
            done = (step - (steps - 1 - decay)) / decay
            return _between(1.0, schedule.final_fraction, done)
    done = (step - warmup) / max(1, steps - 1 - warmup)
    if schedule.name == "cosine":
        done = _along_cosine(done)
    return _between(1.0, schedule.final_fraction, done)


def _one_cycle(schedule: ScheduleConfig, step: float, steps: int) -> float:
    """Up from a 25th of the peak and down again, each along half a cosine.

    Smith and Topin 2018, arXiv 1708.07120, with the phases of torch.optim.lr_scheduler.OneCycleLR.
    """
    top = schedule.warmup_steps or max(1, round(ONE_CYCLE_RISE * steps))
    if step < top:
        return _between(ONE_CYCLE_START, 1.0, _along_cosine(step / top))
    done = _along_cosine((step - top) / max(1, steps - 1 - top))
    return _between(1.0, schedule.final_fraction, done)


def _along_cosine(done: float) -> float:
    """A share of the way, with a slow start and a slow end."""
    return (1 - math.cos(math.pi * min(1.0, max(0.0, done)))) / 2


def _between(start: float, end: float, done: float) -> float:
    return start + (end - start) * min(1.0, max(0.0, done))


def peak_rate(optimizer: OptimizerConfig, batch_size: int | None) -> float:
    """optimizer.lr, scaled from optimizer.lr_batch_size to another batch size.

    The rate grows in proportion to the batch (Goyal et al. 2017, for SGD) or to its square root
    (Krizhevsky 2014; Malladi et al. 2022, for Adam).

    Args:
        optimizer: Has the rate, the batch size that it is meant for, and how it scales.
        batch_size: The global batch size in samples; None means that the rate is not scaled.
    """
    if optimizer.lr_scaling == "none" or batch_size is None or optimizer.lr_batch_size is None:
        return optimizer.lr
    exponent = 1.0 if optimizer.lr_scaling == "linear" else 0.5
    return optimizer.lr * (batch_size / optimizer.lr_batch_size) ** exponent


# --- fp16 -----------------------------------------------------------------------------------------


class LossScale:
    """Dynamic loss scaling for fp16 (Micikevicius et al. 2018).

    The loss is multiplied by the scale, and the gradients are divided by it. The scale halves after
    an overflow, and doubles after `growth_interval` steps without one.

    The usual scaler checks each rank's gradients for an overflow. This one checks the total norm of
    the gradient, which is the same number on every rank in every layout, so that all ranks skip the
    same steps without another collective. Reading the norm makes the host wait for the device once
    per step, in fp16 only.

    Args:
        enabled: Whether the precision is fp16; if not, the scale is 1 and every step is accepted.
        growth_interval: Steps without an overflow after which the scale doubles.
    """

    def __init__(self, enabled: bool, growth_interval: int = 2000) -> None:
        self.enabled = enabled
        self.scale = 2.0**16 if enabled else 1.0
        self.growth_interval = growth_interval
        self.good_steps = 0

    @property
    def factor(self) -> float:
        """What the loss is multiplied by before backward."""
        return self.scale if self.enabled else 1.0

    @torch.no_grad()
    def unscale_(self, parameters: Iterable[torch.Tensor]) -> None:
        """Divide the gradients by the scale, which is exact because the scale is a power of two."""
        if not self.enabled:
            return
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 / self.scale)

    def accepts(self, grad_norm: torch.Tensor | None, step: int) -> bool:
        """Whether the optimizer may take this step; the scale adapts to the answer.

        Args:
            grad_norm: The norm of the whole gradient; None accepts the step.
            step: The step, for the error.

        Raises:
            NonFiniteError: The gradient overflows at every scale: the loss itself is not finite.
        """
        if not self.enabled or grad_norm is None:
            return True
        if bool(torch.isfinite(grad_norm)):
            self.good_steps += 1
            if self.good_steps % self.growth_interval == 0:
                self.scale = min(LARGEST_SCALE, self.scale * 2)
            return True
        self.good_steps = 0
        self.scale /= 2
        if self.scale < SMALLEST_SCALE:
            raise NonFiniteError(
                f"at step {step} the fp16 gradient overflows at every loss scale, on all ranks; "
                "the last good checkpoint is intact: try train.precision=bf16, a lower "
                "optimizer.lr or train.clip_norm=1.0"
            )
        return False

    def state(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state(self, state: dict[str, float]) -> None:
        """Continue from what `state` has returned."""
        if self.enabled and state:
            self.scale = float(state["scale"])
            self.good_steps = int(state["good_steps"])
