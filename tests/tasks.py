"""Tasks that tests train: small, slow or faulty on purpose; named as in `tests.tasks:Points`."""

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from app.tasks.base import Task, Update


class Points(Task):
    """Classifies points of the plane by quadrant, with dropout, so that a resume needs its state.

    Args:
        samples: The number of training samples.
        width: The width of the hidden layer.
        step_seconds: How long a step sleeps.
        slow_while: Steps sleep only while this file exists.
    """

    def __init__(
        self, *, samples: int = 256, width: int = 16, step_seconds: float = 0, slow_while: str = "/"
    ) -> None:
        self.samples = samples
        self.width = width
        self.step_seconds = step_seconds
        self.slow_while = slow_while

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(2, self.width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(self.width, 4)
        )

    def train_data(self) -> TensorDataset:
        return self._points(self.samples, seed=0)

    def eval_data(self) -> TensorDataset:
        return self._points(100, seed=1)

    @staticmethod
    def _points(count: int, seed: int) -> TensorDataset:
        x = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed))
        return TensorDataset(x, (x[:, 0] > 0).long() + 2 * (x[:, 1] > 0).long())

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if self.step_seconds and model.training and os.path.exists(self.slow_while):
            time.sleep(self.step_seconds)
        inputs, targets = batch
        return F.cross_entropy(model(inputs), targets)

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        inputs, targets = batch
        logits = model(inputs)
        return {
            "loss": F.cross_entropy(logits, targets),
            "accuracy": (logits.argmax(1) == targets).float().mean(),
        }


class Plain(Points):
    """Points without dropout, so that one worker and several compute the same."""

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(2, self.width), nn.Tanh(), nn.Linear(self.width, 4))


class Held(Points):
    """Its evaluation waits, or fails as by a bug of a user's.

    Args:
        hold: Evaluations wait while this file exists.
        fails: Whether evaluations raise an exception.
        step_seconds: See `Points`.
        slow_while: See `Points`.
    """

    def __init__(
        self,
        *,
        hold: str = "/nowhere",
        fails: bool = False,
        step_seconds: float = 0,
        slow_while: str = "/",
    ) -> None:
        super().__init__(step_seconds=step_seconds, slow_while=slow_while)
        self.hold = Path(hold)
        self.fails = fails

    def metrics(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        is_rehearsed = batch[0].is_meta  # before the start, without numbers
        while self.hold.exists() and not is_rehearsed:
            time.sleep(0.05)
        if self.fails and not is_rehearsed:
            raise KeyError("a bug of the user's")
        return super().metrics(model, batch)


class Infinite(Points):
    """Its loss is NaN after `good_steps` steps, on rank 1 or the only rank."""

    def __init__(self, *, good_steps: int = 5, samples: int = 256) -> None:
        super().__init__(samples=samples)
        self.good_steps = good_steps
        self.seen = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = super().loss(model, batch)
        self.seen += model.training
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 1
        return loss * float("nan") if self.seen > self.good_steps and rank == 1 else loss


class Raises(Points):
    """Raises an exception, as a user's bug would, after `good_steps` steps."""

    def __init__(self, *, good_steps: int = 0) -> None:
        super().__init__()
        self.good_steps = good_steps
        self.seen = 0

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.seen += 1
        if self.seen > self.good_steps:
            raise KeyError("a bug of the user's")
        return super().loss(model, batch)


class Hungry(Plain):
    """Once the file `hungry` exists, rank 1 deletes it and fills 512 MiB of memory."""

    def __init__(self, *, hungry: str, step_seconds: float = 0.0) -> None:
        super().__init__(step_seconds=step_seconds)
        self.hungry = Path(hungry)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        if rank == 1 and self.hungry.exists():
            self.hungry.unlink()
            torch.ones(128 << 20)
        return super().loss(model, batch)


class Stream(IterableDataset[Any]):
    """A stream without samples."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())


RAGGED = [(torch.zeros(2 + index), 0) for index in range(8)]


class WithoutLoss(Task):
    """A task that lacks a method."""

    def build_model(self) -> nn.Module:
        return nn.Linear(2, 4)

    def train_data(self) -> Any:
        return RAGGED


class Odd(Points):
    """A task with a mistake.

    Args:
        what: The mistake: vector, ragged, stream or unevaluated.
    """

    def __init__(self, *, what: str) -> None:
        super().__init__()
        self.what = what

    def train_data(self) -> Any:
        return {"ragged": RAGGED, "stream": Stream()}.get(self.what, super().train_data())

    def eval_data(self) -> Any:
        return None if self.what == "unevaluated" else super().eval_data()

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]) if self.what == "vector" else super().loss(model, batch)


class Gan(Task):
    """Generates digits: a generator and a discriminator have optimizers that take turns.

    The generator's input is a function of an image, so that every layout trains the same.

    Args:
        step_seconds: How long a step sleeps.
        ends_at: The number of evaluations after which training ends early.
    """

    def __init__(self, *, step_seconds: float = 0.0, ends_at: int | None = None) -> None:
        from app.data.images import read_images

        images = torch.from_numpy(read_images("digits")[0].images).flatten(1).float() / 16
        self.images = images
        self.step_seconds = step_seconds
        self.ends_at = ends_at

    def build_model(self) -> nn.Module:
        def parts(*sizes: int) -> nn.Module:
            return nn.Sequential(nn.Linear(*sizes[:2]), nn.LeakyReLU(0.2), nn.Linear(*sizes[1:]))

        return nn.ModuleDict({"generator": parts(16, 48, 64), "discriminator": parts(64, 48, 1)})

    def train_data(self) -> TensorDataset:
        return TensorDataset(self.images[200:])

    def eval_data(self) -> TensorDataset:
        return TensorDataset(self.images[:200])

    def draw(self, model: Any, images: Tensor) -> Tensor:
        return model["generator"](torch.sin(99 * images[:, 20:36])).sigmoid()

    def judge(self, model: Any, batch: tuple[Tensor]) -> Tensor:
        with torch.no_grad():
            drawn = self.draw(model, batch[0])
        real = F.softplus(-model["discriminator"](batch[0]))
        false = F.softplus(model["discriminator"](drawn))
        self.log("real", real.mean())
        self.log("false", false.mean())
        return real.mean() + false.mean()

    def deceive(self, model: Any, batch: tuple[Tensor]) -> Tensor:
        return F.softplus(-model["discriminator"](self.draw(model, batch[0]))).mean()

    loss = judge

    def optimizer(
        self, parameters: list[tuple[str, nn.Parameter]]
    ) -> dict[str, torch.optim.Optimizer]:
        rates = {"generator": 2e-3, "discriminator": 1e-3}
        optimizers: dict[str, torch.optim.Optimizer] = {}
        for part, rate in rates.items():
            own_parameters = [value for name, value in parameters if name.startswith(part)]
            optimizers[part] = torch.optim.Adam(own_parameters, rate)
        return optimizers

    def schedule(self, step: int, steps: int) -> float:
        return 1 - step / (2 * steps)

    def training_step(self, update: Any) -> None:
        time.sleep(self.step_seconds)
        update(self.judge, "discriminator")
        update(self.deceive, "generator")

    def on_evaluation(self, model: Any, log: Any) -> None:
        drawn = self.draw(model, self.images[:16].to(next(model.parameters()).device))
        log("digits", drawn.view(4, 4, 8, 8).transpose(1, 2).reshape(32, 32))
        log("ink", drawn.mean().item())
        log("words", "sixteen digits")

    def stop_early(self, evaluations: Any) -> bool:
        return self.ends_at is not None and len(evaluations) >= self.ends_at


class Crashes(Points):
    """Its process dies by a signal each time it gets to a step, on rank 1 or the only rank.

    Losses are taken in the driver too, before a run starts; only a worker takes steps.

    Args:
        at: The number of steps after which it dies.
        by: The signal's name; for SIGSEGV, memory is really misused.
    """

    def __init__(self, *, at: int = 5, by: str = "SIGSEGV") -> None:
        super().__init__()
        self.at = at
        self.by = by
        self.steps = 0

    def training_step(self, update: Update) -> None:
        self.steps += 1
        super().training_step(update)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 1
        if self.steps > self.at and rank == 1:
            if self.by == "SIGSEGV":
                ctypes.string_at(0)
            os.kill(os.getpid(), signal.Signals[self.by])
        return super().loss(model, batch)
