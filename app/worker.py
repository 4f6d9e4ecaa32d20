"""The training loop. The same one runs in a TorchTrainer worker, under torchrun, and in a plain process.

It imports neither Ray nor MLflow: what it has to say goes to the `Channel` it is handed, which on all ranks but the
first says nothing. One optimizer step is `Training.step`; everything around it happens at a `Pulse`.
"""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from app import checkpoint
from app.checkpoint import Checkpointer
from app.data.loader import fetch, rows, train_batches
from app.errors import NonFiniteError, UserError
from app.evaluate import evaluate, whole
from app.job import Channel, Job, Place, memory_bytes, options
from app.loss_scale import LossScale
from app.optim import build_optimizer, learning_rate, set_learning_rate
from app.pulse import Agreement, Pulse
from app.randomness import random_state, seed_everything, seed_step, set_random_state
from app.run import is_current
from app.storage import Storage
from app.tasks import load_task
from strategies.compose import parallelize

REMEMBERED = 2000  # metric events kept with a checkpoint, so that a killed driver loses none


def train(job: Job, place: Place, channel: Channel) -> dict[str, Any]:
    """Trains until `job.steps` or until asked to stop; returns rank 0's summary.

    Raises:
        NonFiniteError: the loss or gradient stopped being finite.
        UserError: the checkpoint to resume from, or the data, is not usable.
    """
    training = Training(job, place, channel)
    try:
        return training.run()
    finally:
        training.close()


class Training:
    def __init__(self, job: Job, place: Place, channel: Channel) -> None:
        config = self.config = job.config
        self.job, self.place, self.channel = job, place, channel
        if config.train.deterministic:
            torch.use_deterministic_algorithms(True)
        self.task = load_task(config.task, config.task_args)
        self.data = self.task.train_data()

        def build() -> torch.nn.Module:
            seed_everything(config.train.seed)
            return self.task.build_model()

        self.parallel = parallelize(
            build,
            job.layout,
            options(config),
            device=place.device,
            blocks=self.task.blocks,
            tensor_plan=self.task.tensor_plan,
        )
        self.optimizer = self.parallel.adopt(build_optimizer(config.optimizer, self.parallel.parameters()))
        self.scale = LossScale(config.train.precision == "fp16")
        self.dims = job.layout.dims
        self.data_rank = self.dims.data_rank(place.rank)
        self.checkpointer = Checkpointer(
            job.checkpoints,
            keep_last=config.checkpoint.keep_last,
            keep_best=config.checkpoint.keep_best,
            mode="max" if config.checkpoint.mode == "max" else "min",
            attempt=job.attempt,
            fence=lambda: is_current(job.folder, job.attempt),
        )
        self.done, self.samples_seen = 0, 0  # optimizer steps taken; position in the stream of samples
        self.saved, self.saved_at = -1, time.monotonic()
        self.remembered: list[dict[str, Any]] = []
        self.latest: dict[str, float] = {}
        self.items_per_sample = self._count_items()
        self.resumed_from = self._resume()
        self.pulse = Pulse(place.rank, place.world_size, self.dims.tp, self.done + 1)

    # --- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        began = time.monotonic()
        self._announce()
        stopped = False
        batches = self.batches()
        try:
            while self.done < self.job.steps and not stopped:
                stopped = self.advance(batches)
        finally:
            getattr(batches, "close", lambda: None)()
        if not stopped:
            self._keep_weights()
        self.checkpointer.wait()
        return self._summary(stopped, time.monotonic() - began)

    def advance(self, batches: Iterator[list[Any]]) -> bool:
        """One step, and what is due after it; true when the run is to stop."""
        self.step(next(batches))
        return self._is_boundary() and self._boundary()

    def step(self, micro_batches: list[Any]) -> None:
        """One optimizer step: the gradient's exact mean over the global batch, from micro-batches; the update."""
        config, parallel, task = self.config, self.parallel, self.task
        step = self.done + 1
        seed_step(config.train.seed, step, self.data_rank, self.place.device)
        rate = learning_rate(config.optimizer, config.schedule, self.done, self.job.steps)
        set_learning_rate(self.optimizer, rate)
        shares = self._shares(micro_batches)
        total: torch.Tensor | None = None
        for i, (batch, share) in enumerate(zip(micro_batches, shares)):
            with parallel.micro_step(last=i == len(micro_batches) - 1):
                with parallel.autocast():
                    loss = task.loss(parallel.module, batch)
                # Data-parallel averaging divides by dp; `share` is this micro-batch's part of all items.
                part = loss * (share * self.dims.dp)
                (part * self.scale.scale if self.scale.enabled else part).backward()
            value = whole(loss.detach()) * share
            total = value if total is None else total + value
        logged = self._is_logged(step)
        self.scale.unscale_(parallel.parameters())
        norm = None
        if logged or config.train.clip_norm is not None or self.scale.enabled:
            norm = parallel.grad_norm_(config.train.clip_norm)
        if self.scale.accepts(norm, step):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done = step
        self.samples_seen += config.train.global_batch_size
        assert total is not None
        self.pulse.add(total)
        if logged:
            self.pulse.log(step, rate, norm)

    def _shares(self, micro_batches: list[Any]) -> list[Any]:
        """Each micro-batch's part of the global batch's items; they sum to 1 over micro-batches and data ranks."""
        if self.task.items_vary:
            items = [self.task.items(batch) for batch in micro_batches]
            total = self.parallel.total(torch.as_tensor(sum(items), dtype=torch.float64, device=self.place.device))
            return [(torch.as_tensor(n, device=total.device) / total).float() for n in items]
        return [rows(batch) / self.config.train.global_batch_size for batch in micro_batches]

    def batches(self) -> Iterator[list[Any]]:
        config = self.config.train
        return train_batches(
            self.data,
            seed=config.seed,
            global_batch_size=config.global_batch_size,
            micro_batch_size=config.micro_batch_size,
            dp_rank=self.data_rank,
            dp_size=self.dims.dp,
            samples_seen=self.samples_seen,
            steps=self.job.steps - self.done,
            device=self.place.device,
            data_workers=config.data_workers,
        )

    # --- between steps ------------------------------------------------------------------------------------------

    def _is_logged(self, step: int) -> bool:
        return step == 1 or step % self.config.train.log_every == 0 or step == self.job.steps

    def _is_boundary(self) -> bool:
        save, check = self.config.checkpoint.every_steps, self.config.train.eval_every
        scheduled = (save and self.done % save == 0) or (check and self.done % check == 0)
        return bool(scheduled) or self.done == self.job.steps or self.pulse.due(self.done)

    def _boundary(self) -> bool:
        """Agrees with the other ranks on what happened and what to do now; true when the run is to stop."""
        config, step = self.config, self.done
        seconds = config.checkpoint.every_seconds
        overdue = seconds is not None and time.monotonic() - self.saved_at >= seconds
        agreed = self.pulse.agree(
            step, stop=self.channel.stop_requested(), save=overdue, may_be_infinite=self.scale.enabled
        )
        self._report(agreed)
        last = step == self.job.steps
        if last or (config.train.eval_every and step % config.train.eval_every == 0):
            self._evaluate()
        every = config.checkpoint.every_steps
        if last or agreed.save or agreed.stop or (every and step % every == 0):
            self._save()
        self.checkpointer.check()
        return agreed.stop and not last

    def _report(self, agreed: Agreement) -> None:
        batch = self.config.train.global_batch_size
        rate = batch / agreed.seconds_per_step
        per_sample = self.items_per_sample
        for entry in agreed.logged:
            values = {"train/loss": entry.loss, "train/lr": entry.learning_rate, "train/samples_per_second": rate}
            if entry.grad_norm is not None:
                values["train/grad_norm"] = entry.grad_norm
            if self.task.unit != "samples":
                values[f"train/{self.task.unit}_per_second"] = rate * per_sample
            if self.scale.enabled:
                values["train/loss_scale"] = self.scale.scale
            self._metrics(entry.step, values, entry.time)
        self.channel.emit(
            {
                "type": "progress",
                "step": agreed.step,
                "steps": self.job.steps,
                "loss": self.latest.get("train/loss"),
                "rate": rate * per_sample,
                "unit": self.task.unit,
                "seconds_left": (self.job.steps - agreed.step) * agreed.seconds_per_step,
                "seconds_per_step": agreed.seconds_per_step,
                "memory_bytes": memory_bytes(self.place.device),
            }
        )

    def _metrics(self, step: int, values: dict[str, float], when: float | None = None) -> None:
        event = {"type": "metrics", "step": step, "time": when or time.time(), "values": values}
        self.latest |= values
        self.remembered = [*self.remembered[-REMEMBERED:], event] if self.place.rank == 0 else []
        self.channel.emit(event)

    def _evaluate(self) -> None:
        data = self.task.eval_data()
        if data is None:
            return
        train = self.config.train
        size = train.eval_batch_size or train.micro_batch_size or max(1, train.global_batch_size // self.dims.dp)
        values = evaluate(self.task, self.parallel, data, size, self.data_rank, self.dims.dp, self.place.device)
        self._metrics(self.done, {f"eval/{name}": value for name, value in values.items()})

    # --- checkpoints --------------------------------------------------------------------------------------------

    def _state(self) -> dict[str, Any]:
        return {"model": self.parallel.model_state(), "optimizer": self.parallel.optimizer_state(self.optimizer)}

    def _save(self) -> None:
        """Begins a checkpoint of the step just taken; training goes on while it is written."""
        if self.saved == self.done:
            return
        if not self._weights_are_finite():
            raise NonFiniteError(
                f"a weight was not finite after step {self.done}; the last good checkpoint is intact: try a lower "
                "optimizer.lr, a longer schedule.warmup_steps or train.clip_norm=1.0"
            )
        meta = {
            "step": self.done,
            "samples_seen": self.samples_seen,
            "run_uid": self.job.run_uid,
            "loss_scale": self.scale.state(),
            "layout": str(self.job.layout),
            "latest": self.latest,
            "remembered": self.remembered,
        }
        self.checkpointer.save(
            self._state(),
            meta=meta,
            per_rank={"world_size": self.place.world_size, "random": random_state()},
            metric=self.latest.get(f"eval/{self.config.checkpoint.metric}"),
        )
        self.saved, self.saved_at = self.done, time.monotonic()
        self.channel.emit({"type": "checkpoint", "step": self.done, "stall": self.checkpointer.last_stall_seconds})

    def _weights_are_finite(self) -> bool:
        local = [getattr(p, "_local_tensor", p).detach() for p in self.parallel.parameters()]
        local = [p for p in local if p.numel()]
        norms = torch.stack(torch._foreach_norm(local)) if local else torch.zeros(1)
        bad = (~torch.isfinite(norms)).any().double().cpu().reshape(1)
        if self.place.world_size > 1:
            dist.all_reduce(bad)
        return bool(bad.item() == 0)

    def _resume(self) -> int | None:
        """Continues from the newest good checkpoint of this run, if there is one; the step it continues after."""
        commit, damaged = checkpoint.latest_good_together(self.job.checkpoints)
        if self.place.rank == 0:
            checkpoint.sweep(self.job.checkpoints)  # what a killed start left half written
        for sentence in damaged:
            self._first_rank_warns(sentence)
        if commit is None:
            if damaged:
                raise UserError(
                    f"{damaged[0]}; no other checkpoint is whole: remove {self.job.checkpoints} to start anew"
                )
            if self.config.checkpoint.load:
                state = {"model": self.parallel.model_state()}
                checkpoint.load(checkpoint.find(self.config.checkpoint.load), state)
                self.parallel.load_model_state(state["model"])
            return None
        state = self._state()
        checkpoint.load(commit, state)
        self.parallel.load_model_state(state["model"])
        self.parallel.load_optimizer_state(self.optimizer, state["optimizer"])
        meta = commit.meta
        self.done, self.samples_seen = meta["step"], meta["samples_seen"]
        self.saved = self.done
        self.scale.load_state(meta["loss_scale"])
        self.latest = dict(meta["latest"])
        own = checkpoint.load_per_rank(commit, self.place.rank)
        if isinstance(own, dict) and own["world_size"] == self.place.world_size:
            set_random_state(own["random"])
        for event in meta["remembered"]:  # the tracker drops those it has; a killed driver may not have sent them
            self.channel.emit(event)
        self.remembered = list(meta["remembered"]) if self.place.rank == 0 else []
        return self.done

    def _keep_weights(self) -> None:
        """Writes the trained weights whole, under plain names, as one file; MLflow's model is made from it."""
        if not self.config.checkpoint.weights:
            return
        state = self.parallel.full_model_state()
        if self.place.rank == 0:
            buffer = io.BytesIO()
            torch.save(state, buffer)
            Storage(self.job.folder).write_bytes("model/weights.pt", buffer.getvalue())

    def _first_rank_warns(self, text: str) -> None:
        if self.place.rank == 0:
            self.channel.emit({"type": "warning", "text": text})

    # --- beginning and end --------------------------------------------------------------------------------------

    def _count_items(self) -> float:
        """Items (tokens, say) in one sample."""
        if self.task.unit == "samples":
            return 1.0
        return float(self.task.items(fetch(self.data, [(0, 0)])))

    def _announce(self) -> None:
        for note in self.parallel.notes:
            self._first_rank_warns(note)
        self.channel.emit(
            {
                "type": "start",
                "resumed_from": self.resumed_from,
                "step": self.done,
                "steps": self.job.steps,
                "device": str(self.place.device),
                "parameters": sum(p.numel() for p in self.parallel.parameters()),
            }
        )

    def _summary(self, stopped: bool, seconds: float) -> dict[str, Any]:
        return {
            "stopped": stopped,
            "step": self.done,
            "steps": self.job.steps,
            "seconds": seconds,
            "metrics": self.latest,
            "resumed_from": self.resumed_from,
            "parameters": sum(p.numel() for p in self.parallel.parameters()),
            "memory_bytes": memory_bytes(self.place.device),
        }

    def close(self) -> None:
        self.checkpointer.close()
