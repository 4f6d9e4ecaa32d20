"""What a task is: a model, data, a loss and metrics.

A task is plain single-device PyTorch: it knows nothing of ranks, devices, precision or strategies.
Write your own by subclassing Task with explicit keyword arguments, and name it in an experiment as
`task: my_package.my_module:MyTask`:

    from trireme import Task

    class Parity(Task):
        def __init__(self, *, bits: int = 8) -> None:
            self.bits = bits

        def build_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(self.bits, 32), nn.ReLU(), nn.Linear(32, 2))

        def train_data(self) -> Dataset:
            x = torch.randint(0, 2, (1000, self.bits), generator=torch.Generator().manual_seed(0))
            return TensorDataset(x.float(), x.sum(1) % 2)

        def loss(self, model: nn.Module, batch: Batch) -> Tensor:
            inputs, targets = batch
            return F.cross_entropy(model(inputs), targets)

A batch is tensors in tuples, lists and dicts; by convention (inputs, targets). `Batch` is any type,
so that a task may annotate its own batches with what they are. app/data/loader.py says what a data
set may have beyond `__len__` and `__getitem__` to be faster, and strategies/tensor/plan.py what a
tensor plan is.

A model in which two modules share a parameter has a method `tie_weights()` (Hugging Face's name).
It is called without arguments, to share the parameter again after parameters have been replaced (by
ones with values instead of meta tensors, or by distributed ones).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.loader import Batch, rows
from app.errors import UserError
from app.models.prediction import Preprocessor
from strategies.blocks import CONTAINERS
from strategies.context.apply import ContextPlan


class Update(Protocol):
    """What `Task.training_step` gets to change the weights with."""

    def __call__(self, loss: Callable[[nn.Module, Batch], Tensor], optimizer: str = "") -> Tensor:
        """Change the weights by the gradient of a loss over the global batch.

        Args:
            loss: (model, batch) → the mean loss over the batch's items.
            optimizer: Change only the weights of the optimizer with this name; "" means all.

        Returns:
            This worker's part of the mean loss over the global batch, detached.
        """
        ...


class EvaluationLog(Protocol):
    """What `Task.on_evaluation` gets to log with."""

    def __call__(self, name: str, value: Any) -> None:
        """Log a text, a number, an image or a figure of matplotlib (app/training/hooks.py)."""
        ...


class Task:
    """The base of all tasks; the module's documentation has an example.

    Only `build_model`, `train_data` and `loss` are required.
    """

    unit: str = "samples"
    """What `items` counts, samples or tokens; names the throughput (train/samples_per_second)."""

    float_output: bool = True
    """Whether the model's output must be float32 even if it computes in 16 bits. If False, loss and
    metrics take a 16-bit output, which saves a float32 copy of a large output."""
    compiles_loss: bool = False
    """Whether the loss is compiled on a GPU even without train.compile
    (app/models/cross_entropy.py)."""

    def build_model(self) -> nn.Module:
        """A new model.

        It must draw random numbers only from torch's global generator, which the caller has seeded,
        and must work on the meta device.
        """
        raise UserError(_missing(self, "build_model"))

    def build_trained(self) -> nn.Module:
        """The model that people get after training, with the same parameters as `build_model`'s.

        Override it if the model of `build_model` is suitable for training only.
        """
        return self.build_model()

    def train_data(self) -> Dataset[Any]:
        """The data to train on.

        Returns:
            A map-style data set (`__len__`, `__getitem__`) in any fixed order, since the seed
            shuffles it; a stream (`__iter__`; app/data/stream.py), which keeps its order; or a
            Mixture (app/data/mixture.py).
        """
        raise UserError(_missing(self, "train_data"))

    def eval_data(self) -> Dataset[Any] | None:
        """The held-out data, or None if there is none."""
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch's items, as a scalar tensor."""
        raise UserError(_missing(self, "loss"))

    # --- before the first step ---

    tokens_per_sample: float | None = None
    """The tokens of a sample, if it is not one sequence of `sequence_length` tokens."""

    def reference(self, model: nn.Module, batch: Batch) -> Tensor:
        """What `loss` needs to know of the model before its first step, about each row of a batch.

        It is called, in evaluation mode and without gradients, if the data sets have an attribute
        `reference`: a tensor with an entry for each sample. The entries are then set, and
        kept in checkpoints; the data set puts them into its batches (app/training/reference.py).
        An attribute `digest` of the data set tells its data from other data in a checkpoint.

        Returns:
            (rows, …), float32.
        """
        raise UserError(_missing(self, "reference"))

    # --- in a step ---

    gathers: bool | None = None
    """Whether `loss` calls `gather`; None: that is seen from the code of the task's own modules."""

    gathering: Callable[[Tensor], Tensor] | None = None
    """What `gather` calls. The training loop sets it."""

    def gather(self, x: Tensor) -> Tensor:
        """In `loss`: the rows of `x` for the whole global batch, for a loss that compares samples.

        On one device with one micro-batch that is `x` itself. Otherwise it is the rows of all
        micro-batches of all workers, in the order of one device, and gradients flow back to where
        the rows came from. So the loss is the same on every number of workers and micro-batches.
        The labels of the rows are gathered in the same way:

            z, t = self.gather(model(batch[0])), self.gather(batch[1])
            return info_nce(z, t)

        In `metrics` and `on_evaluation` it is `x` itself: metrics are of one evaluation batch at a
        time, of train.eval_batch_size samples.

        Args:
            x: One row for each sample of the batch that `loss` got, (samples, …). Gather several
                views of the samples one by one. Call it equally often in every forward, with rows
                of one shape.

        Returns:
            (samples of the global batch, …).
        """
        return x if self.gathering is None else self.gathering(x)

    recorded: dict[str, list[Tensor]] | None = None
    """What `log` was called with, by name; None if nothing is to be recorded. The training loop
    sets it."""

    def log(self, name: str, value: Tensor) -> None:
        """In `loss`, each time it is called: show a part of the loss as train/NAME.

        Args:
            name: The name of the part.
            value: Its mean over the batch's items, a scalar tensor.

        Raises:
            UserError: It is something else.
        """
        if self.recorded is None:
            return
        if not isinstance(value, Tensor):
            raise UserError(
                f"the task logs {name!r} with a {type(value).__name__}: "
                "give the tensor itself, without .item() or float()"
            )
        if value.dim():
            raise UserError(
                f"the task logs {name!r} with a tensor of shape {tuple(value.shape)}, but it must "
                "be one number, such as its mean"
            )
        self.recorded.setdefault(name, []).append(value.detach())

    def optimizer(
        self, parameters: list[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer | dict[str, torch.optim.Optimizer] | None:
        """An optimizer for these parameters, with learning rates of its own.

        Args:
            parameters: The parameters with their names in the model; each worker has its own part
                of them. An optimizer of others, such as those of a model that the task keeps, is
                refused. It is also called once in the driver, with parameters on the meta device.

        Returns:
            The optimizer; or several by name, for a `training_step` that uses them; or None for the
            one that is configured.
        """
        return None

    def schedule(self, step: int, steps: int) -> float | None:
        """The learning rate of a step, as a factor of the optimizer's.

        Args:
            step: The number of the step, from 0.
            steps: The number of steps in all.

        Returns:
            The factor; None means the configured schedule.
        """
        return None

    def training_step(self, update: Update) -> None:
        """One step, which calls `update` once or, as for the networks of a GAN, several times."""
        update(self.loss)

    # --- at an evaluation ---

    def on_evaluation(self, model: nn.Module, log: EvaluationLog) -> None:
        """Called after each evaluation, without gradients, on all workers.

        All workers must call the model equally often.
        """

    def stop_early(self, evaluations: Sequence[Mapping[str, float]]) -> bool:
        """Whether to end training, given the metrics of every evaluation so far, newest last."""
        return False

    def items(self, batch: Batch) -> int | Tensor:
        """How many items the means of `loss` and `metrics` are over.

        By default that is the rows of the batch's first tensor. A task that overrides this is
        weighted by it: each part of a global batch (a worker's, a micro-batch) counts as much as it
        has items, and a part without items is left out. If some targets are masked, return how many
        are not: `(targets != -100).sum()`. It is called with the batches of the data set, before
        they are moved to a device.
        """
        return rows(batch)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Evaluation metrics by name, each a scalar mean over the batch's items; also `loss`.

        A metric whose name begins with _ is not shown, but `derived` can compute others from it.
        This serves figures that are not means over items, such as F1, which is a ratio of sums over
        all the held-out data: return the means of `_right`, `_found` and `_there` for each item,
        and derive 2·right / (found + there).
        """
        return {"loss": self.loss(model, batch)}

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Further metrics from the means over all the held-out data, such as exp(loss)."""
        return {}

    # --- for parallel layouts ---

    def blocks(self, model: nn.Module) -> list[str] | None:
        """Names of the model's repeating blocks, in order.

        They are the unit of sharding, activation checkpointing and pipeline stages. By default they
        are the children of the model's `blocks`, if it has that attribute. Children
        that are containers do not count, since a container's own forward need not be called.

        Returns:
            The names; None means that the longest run of children of the same class is taken.
        """
        blocks = getattr(model, "blocks", None)
        if not isinstance(blocks, nn.Module):
            return None
        if any(isinstance(child, CONTAINERS) for child in blocks.children()):
            return None
        return [f"blocks.{name}" for name, _ in blocks.named_children()]

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        """How tensor parallelism may split the model, by module name (strategies/tensor/plan.py).

        None means that it cannot split the model.
        """
        return None

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        """Where the model and its batches have their sequence, for context parallelism.

        None means along dimension 1, with a model that takes the positions of its tokens as
        `position_ids`.
        """
        return None

    def heads(self) -> int | None:
        """The number of attention heads, which the degree of tensor parallelism must divide.

        None means that there is no such condition.
        """
        return None

    def on_gpu(self) -> Task | None:
        """For the planner, which watches the task without a GPU: the task as it computes on one.

        Override it if `loss` does something else on a GPU. None means that it does the same.
        """
        return None

    def with_fused_attention(self) -> tuple[str, Task] | None:
        """For the planner: the setting for attention that does not store its scores in memory.

        Override it if the model can have such an attention and the task does not use it by default.
        None means that there is none, or that the task uses it already.

        Returns:
            (the key and its value, the task with that attention)
        """
        return None

    def preprocessor(self) -> Preprocessor | None:
        """What converts rows, images or texts to the model's arguments, and reads its output.

        It is kept with the model in MLflow. None means that the model is given tensors.
        """
        return None


def _missing(task: Task, method: str) -> str:
    return f"{type(task).__name__} has no {method}: app/tasks/base.py shows what a task has"
