"""The processes of an `ActorGroup`: where they sit, who is ready, who takes a dead one's place.

Places are bundles of one Ray placement group. A process started in a bundle holds the place's resources; a spare holds
none, but sits in a bundle of its node all the same, so that it can take over a place there whose process has died: the
resources stay the placement group's, so nobody else gets them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from app.errors import RunFailed
from app.launchers.member import Hello, Member, kill_at
from app.launchers.room import look, selector
from app.launchers.unheard import Unheard
from app.launchers.watching import ANSWER_SECONDS, gather

STARTS = 5  # of one place in a row, before it is given up
SAY_AFTER_SECONDS = 15.0


@dataclass
class Process:
    """An actor, as the driver knows it."""

    actor: Any
    asked: Any  # the answer to hello, to come
    hello: Hello | None = None


@dataclass
class Place:
    """What a rank needs, and the process that has it now."""

    bundle: int
    needs: dict[str, float]
    label: str = ""  # for messages: "stage 2 of 4"
    process: Process | None = None
    gpus: tuple[str, ...] = ()  # ids, from the process that Ray gave them to
    node: str = ""  # where those are
    starts: int = 0


class Crew:
    """bundles, strategy: of the placement group. spares: idle processes kept on each node. avoid: ids of nodes that no
    bundle may be on. grows: whether an autoscaler may add nodes."""

    def __init__(
        self,
        places: list[Place],
        bundles: list[dict[str, float]],
        strategy: str,
        spares: int,
        avoid: list[str],
        grows: bool = False,
    ) -> None:
        self.places, self.bundles, self.spares, self.avoid, self.grows = places, bundles, spares, avoid, grows
        only = selector(self.avoid)
        self.group = placement_group(
            bundles, strategy=strategy, bundle_label_selector=[only] * len(bundles) if only else None
        )
        self.idle: list[Process] = []
        for place in places:
            self._employ(place)

    def close(self) -> None:
        """Ends every process and gives the places back."""
        for process in [*(place.process for place in self.places), *self.idle]:
            if process is not None:
                self.end(process)
        self.idle = []
        remove_placement_group(self.group)

    def of(self, rank: int) -> Process:
        process = self.places[rank].process
        assert process is not None, f"rank {rank} has no process"
        return process

    def name(self, rank: int) -> str:
        """The rank for messages: which, what, and where."""
        place, hello = self.places[rank], self.of(rank).hello
        label = f"worker {rank}" + (f" ({place.label})" if place.label else "")
        return f"{label}, process {hello.pid} on {hello.ip}," if hello else label

    def ask(self, method: str) -> dict[int, Any]:
        """What every rank answers; None for those that do not within `ANSWER_SECONDS`."""
        return gather({rank: getattr(self.of(rank).actor, method).remote() for rank in range(len(self.places))})

    # --- filling places -----------------------------------------------------------------------------------------

    def fill(self, stop: Callable[[], bool], say: Callable[[str], None], unheard: Unheard) -> bool:
        """Gives every place a process that has said hello, from the spares where they have one; False if `stop` said so
        before.

        Raises:
            RunFailed: a process does not start.
        """
        began, told = time.monotonic(), ""
        self._forget_dead()
        for place in self.places:
            if place.process is None and not self._take_spare(place):
                self._employ(place)
        while waiting := [place for place in self.places if place.process is None or place.process.hello is None]:
            if stop():
                return False
            for place in waiting:
                self._welcome(place)
            for sentence in unheard.look(self._heard()):
                say(f"{sentence}; ending it")
            if time.monotonic() - began > SAY_AFTER_SECONDS:
                began, reason = time.monotonic(), self._obstacle()
                if reason != told:
                    told = reason
                    say(f"waiting for {len(waiting)} of {len(self.places)} workers: {reason}")
        return True

    def _heard(self) -> set[tuple[str, int]]:
        """The processes that have said hello."""
        hellos = [place.process.hello for place in self.places if place.process]
        return {(hello.node_id, hello.pid) for hello in hellos if hello}

    def _obstacle(self) -> str:
        """What the processes wait for."""
        nodes = self._nodes()
        moving = [bundle for bundle in range(len(self.bundles)) if not nodes.get(bundle)]
        found = look([self.bundles[i] for i in moving], None, self.avoid, growing=self.grows) if moving else None
        return found.sentence if found else "their processes are starting"

    def _forget_dead(self) -> None:
        """Empties the places whose process has died since it was last heard of."""
        calls = {p.process.actor.beat.remote(): p for p in self.places if p.process and p.process.hello}
        ray.wait(list(calls), num_returns=len(calls), timeout=ANSWER_SECONDS) if calls else None
        for call, place in calls.items():
            try:
                ray.get(call, timeout=0)
            except ray.exceptions.RayError:
                if place.process is not None:
                    self.end(place.process)
                place.process = None

    def have_spares(self) -> None:
        """Starts what is missing of the idle processes."""
        if not self.spares:
            return
        by_node = {node: bundle for bundle, node in self._nodes().items()}
        for node, bundle in by_node.items():
            have = sum(1 for process in self.idle if process.hello is None or process.hello.node_id == node)
            for _ in range(self.spares - have):
                self.idle.append(self._spawn(bundle, {"num_cpus": 0}))

    def _nodes(self) -> dict[int, str]:
        """Which node each bundle is on; "" while it is being moved."""
        return placement_group_table(self.group)["bundles_to_node_id"]

    def _employ(self, place: Place) -> None:
        needs = dict(place.needs)
        options = {"num_cpus": needs.pop("CPU", 0), "num_gpus": needs.pop("GPU", 0), "resources": needs}
        place.process, place.starts = self._spawn(place.bundle, options), place.starts + 1

    def _spawn(self, bundle: int, options: dict[str, Any]) -> Process:
        inside = PlacementGroupSchedulingStrategy(self.group, bundle)
        actor = Member.options(scheduling_strategy=inside, **options).remote()  # type: ignore[attr-defined]
        return Process(actor, actor.hello.remote())

    def _welcome(self, place: Place) -> None:
        """Waits a little for a process to say hello; one that died is started again. A spare that is ready by then is
        taken instead: of a lost node's bundles Ray may say only later where they are now."""
        if place.process is None:
            self._employ(place)
        process = place.process
        assert process is not None
        if not ray.wait([process.asked], timeout=0.1)[0]:
            if self.idle and self._take_spare(place):
                self.end(process)
            return
        try:
            hello: Hello = ray.get(process.asked)
        except ray.exceptions.RayError as error:
            if place.starts >= STARTS or "creation task" in str(error):
                raise RunFailed(f"a worker process does not start: {_last_line(error)}") from error
            place.process = None
            time.sleep(0.5)
            return
        process.hello, place.starts = hello, 0
        if hello.gpus:
            place.gpus, place.node = hello.gpus, hello.node_id

    def _take_spare(self, place: Place) -> bool:
        """Puts an idle process of the place's node into it; where the place has moved to, only Ray knows which GPUs."""
        node = self._nodes().get(place.bundle) if self.idle else None
        if place.needs.get("GPU") and place.node != node:
            return False
        for process in list(self.idle):
            if self._is_ready(process) and process.hello is not None and process.hello.node_id == node:
                self.idle.remove(process)
                if place.gpus:
                    process.actor.adopt.remote(place.gpus)
                    process.hello = replace(process.hello, gpus=place.gpus)
                place.process = process
                return True
        return False

    def _is_ready(self, process: Process) -> bool:
        """Whether an idle process has said hello; one that died is forgotten."""
        try:
            if process.hello is None and ray.wait([process.asked], timeout=0)[0]:
                process.hello = ray.get(process.asked)
            if process.hello is not None:
                ray.get(process.actor.beat.remote(), timeout=ANSWER_SECONDS)
        except ray.exceptions.RayError:
            self.idle.remove(process)
            self.end(process)
            return False
        return process.hello is not None

    # --- ending -------------------------------------------------------------------------------------------------

    def end(self, process: Process) -> None:
        """Ends a process, also one that is stopped or deep in a kernel: Ray's own way would wait for it."""
        ray.kill(process.actor)
        hello = process.hello
        if hello is not None:
            kill_at(hello.node_id, hello.pid)


def _last_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
