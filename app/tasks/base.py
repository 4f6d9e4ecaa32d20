"""What a task is: a model, data, a loss and metrics. Nothing else.

A task is plain single-device PyTorch: it knows nothing of ranks, devices, precision or strategies. Write your
own by subclassing Task with explicit keyword arguments, and name it in an experiment as
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

A batch is tensors in tuples, lists and dicts, conventionally (inputs, targets). What a data set may offer beyond
`__len__` and `__getitem__` to be faster is told in app/data/loader.py; what a tensor plan is, in
strategies/tensor/plan.py.

A model in which two modules share a parameter has a method `tie_weights()` (Hugging Face's name for it),
called without arguments to share again after parameters were replaced (from meta, or by distributed ones).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from app.data.loader import Batch, rows
from app.errors import UserError
from app.models.prediction import Preprocessor
from strategies.blocks import CONTAINERS
from strategies.context.apply import ContextPlan


class Task:
    """Base of all tasks; see the module's documentation. Only build_model, train_data and loss are required."""

    unit: str = "samples"
    """What `items` counts; names the throughput (train/samples_per_second): samples or tokens."""

    float_output: bool = True
    """Whether the model's output must be float32 where it computes in 16 bits. False: loss and metrics take it as it
    comes, which spares a float32 copy of a large output."""
    compiles_loss: bool = False
    """Whether on a GPU the loss is compiled whatever train.compile says (app/models/cross_entropy.py)."""

    def build_model(self) -> nn.Module:
        """A new model. Draws only from torch's global generator, which the caller has seeded; works on meta."""
        raise UserError(f"{type(self).__name__} has no build_model: app/tasks/base.py shows what a task has")

    def build_trained(self) -> nn.Module:
        """The model that people get, with the parameters of `build_model`'s, unless that one suits training alone."""
        return self.build_model()

    def train_data(self) -> Dataset[Any]:
        """The data to train on. Map-style (`__len__`, `__getitem__`) in any fixed order, since it is shuffled by the
        seed; or a stream (`__iter__`; app/data/stream.py), in its own; or a Mixture (app/data/mixture.py)."""
        raise UserError(f"{type(self).__name__} has no train_data: app/tasks/base.py shows what a task has")

    def eval_data(self) -> Dataset[Any] | None:
        """The held-out data, or None if there is none."""
        return None

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch's items, 0-dimensional."""
        raise UserError(f"{type(self).__name__} has no loss: app/tasks/base.py shows what a task has")

    # --- in a step --------------------------------------------------------------------------------------------------

    gathering: Callable[[Tensor], Tensor] | None = None
    """What `gather` calls; the training loop's."""

    def gather(self, x: Tensor) -> Tensor:
        """In `loss`: the rows of `x` of the whole global batch, for a loss in which the samples of a batch meet.

        On one device with one micro-batch that is `x` itself. Elsewhere the rows of all micro-batches of all workers,
        in the order in which one device would have them, and gradients find their way back: so the loss is the same
        on every number of workers and micro-batches. The labels that go with the rows are gathered likewise:

            z, t = self.gather(model(batch[0])), self.gather(batch[1])
            return info_nce(z, t)

        In `metrics` and `on_evaluation` it is `x` itself: figures are of one evaluation batch at a time, of
        train.eval_batch_size samples.

        Args:
            x: one row for each sample of the batch that `loss` was given, (samples, …); several views of the samples
                are gathered one by one. Called equally often in every forward, with rows of one shape.

        Returns:
            (samples of the global batch, …).
        """
        return x if self.gathering is None else self.gathering(x)

    recorded: dict[str, list[Tensor]] | None = None
    """What `log` keeps; the training loop's."""

    def log(self, name: str, value: Tensor) -> None:
        """In `loss`, each time it is called: a part of it, a mean over the batch's items, is shown as train/NAME."""
        if self.recorded is not None:
            self.recorded.setdefault(name, []).append(value.detach())

    def optimizer(
        self, parameters: list[tuple[str, nn.Parameter]]
    ) -> torch.optim.Optimizer | dict[str, torch.optim.Optimizer] | None:
        """An optimizer over these (names are the model's; each worker has its own part of them), with its own learning
        rates; several by name, for a training_step that uses them. None: the configuration's."""
        return None

    def schedule(self, step: int, steps: int) -> float | None:
        """The learning rate at `step` (from 0) of `steps`, as a factor of the optimizer's. None: as configured."""
        return None

    def training_step(self, update: Any) -> None:
        """One step. `update(loss, optimizer)` takes a function (model, batch) → mean loss, and changes the weights by
        its gradient over the global batch: all of them, or those of the optimizer of that name (a GAN's in turn)."""
        update(self.loss)

    # --- at an evaluation -------------------------------------------------------------------------------------------

    def on_evaluation(self, model: nn.Module, log: Any) -> None:
        """After each evaluation and without gradients, on all workers, which must call the model equally often.
        `log(name, value)` takes text, a number, an image or a figure of matplotlib (app/training/hooks.py)."""

    def stop_early(self, evaluations: Sequence[Mapping[str, float]]) -> bool:
        """Whether training is to end, after these figures of every evaluation so far, the newest last."""
        return False

    def items(self, batch: Batch) -> int | Tensor:
        """How many items the mean of `loss` and `metrics` is over; rows of the batch's first tensor by default.

        A task that overrides this is weighted by it: each part of a global batch (a worker's, a micro-batch) counts as
        much as it has items, and one without any is left out. Where some targets are masked, return how many are not:
        `(targets != -100).sum()`. It is called with batches as the data gives them, before they go to a device.
        """
        return rows(batch)

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        """Evaluation figures by name, each a 0-dimensional mean over the batch's items; `loss` among them."""
        return {"loss": self.loss(model, batch)}

    def derived(self, means: dict[str, float]) -> dict[str, float]:
        """Further figures, computed from metrics already averaged over all the data: such as exp(loss)."""
        return {}

    def blocks(self, model: nn.Module) -> list[str] | None:
        """Names of the model's repeating blocks in order: the unit of sharding, checkpointing and stages.

        By default the children of the model's `blocks`, where it has them and they are no containers themselves, whose
        own forward need not be called. None: they are looked for (the longest run of children of the same class).
        """
        blocks = getattr(model, "blocks", None)
        if not isinstance(blocks, nn.Module) or any(isinstance(child, CONTAINERS) for child in blocks.children()):
            return None
        return [f"blocks.{name}" for name, _ in blocks.named_children()]

    def tensor_plan(self, model: nn.Module) -> dict[str, str] | None:
        """How tensor parallelism may split the model, by module name (strategies/tensor/plan.py). None: it cannot."""
        return None

    def context_plan(self, model: nn.Module) -> ContextPlan | None:
        """Where the model and its batches have their sequence, for context parallelism. None: along dimension 1, and
        the model takes the places of its tokens as `position_ids`."""
        return None

    def heads(self) -> int | None:
        """Attention heads: what the degree of tensor parallelism must divide. None: no such condition."""
        return None

    def on_gpu(self) -> Task | None:
        """The task as it computes on a GPU that has the whole model, where `loss` asks which device it is on; None: the
        same. For the planner, which watches the task without a GPU."""
        return None

    def preprocessor(self) -> Preprocessor | None:
        """What turns what a person has (rows, images, texts) into what the model is called with, and its answers into
        what they mean; kept with the model in MLflow. None: the model takes its tensors."""
        return None
