"""Finds stuck ranks where torchrun started them: they answer over torch's own store, from a thread each.

Rank 0 asks (`watching.py`), keeps everybody's stack with the run, and has the culprit killed; torchrun then ends the
others, and with --max-restarts starts all again, which continue from the last checkpoint. Rank 1 watches rank 0: only
whether its threads still run at all, which those of a stopped process do not. Under Slurm the store is in rank 0's
process: there every rank sees that it does not answer, kills rank 0 where that is its neighbour, and ends with code 1.
"""

from __future__ import annotations

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from app.heartbeat import Beat
from app.job import Job
from app.launchers import answers, flight
from app.launchers.siblings import restarted
from app.launchers.watching import ANSWER_SECONDS, Stuck, Watching
from app.launchers.whereabouts import NO_NEWS, kill
from app.run.driver import Driver

POLL_SECONDS = 0.25
GRACE_SECONDS = 5.0


def meeting_place() -> Any:
    """torchrun's own store, which is in its agent's process; where there is none, the group's, which stands still when
    rank 0 is stopped."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    group_store: Any = dist.distributed_c10d._get_default_store()
    return group_store.clone()  # the group's own may be waiting


class StoreWatch:
    """One per rank; `close` before the process group goes. driver: rank 0's, None elsewhere.

    In the store are, overwritten again and again: `here/RANK`, the host and process id of a rank; `word`, a number and
    what rank 0 asks ("beat", "stack", "flight") or has ended ("end HOST:PID …"); `answer/RANK`, that number and the
    answer; `alive`, which changes while rank 0's threads run.
    """

    def __init__(self, job: Job, rank: int, world_size: int, driver: Driver | None) -> None:
        self.rank, self.world_size, self.driver = rank, world_size, driver
        self.pause = min(0.8 * ANSWER_SECONDS, POLL_SECONDS + world_size / 1000)  # rank 0's store serves all of them
        self.over = threading.Event()
        self.watching = Watching(job.config, self._ask)
        self.patience = self.watching.silence.dumb  # with rank 0
        self.threads: list[threading.Thread] = []
        self.store: Any = None
        self.read = 0  # the number of the last word
        self.answered = time.monotonic()  # when the store last did
        self.stderr = os.dup(2)  # before the worker's output goes to its log
        self.first = "worker 0"  # how rank 0 is called, once it is known
        self.first_pid = 0  # where it is on this host
        if job.config.fault.hang_seconds > 0 and world_size > 1:
            self.store = dist.PrefixStore(f"watch/{job.attempt}", meeting_place())
            self.host = socket.gethostname()
            self.store.set(f"here/{rank}", pickle.dumps((self.host, os.getpid())))
            self.threads = [threading.Thread(target=self._run, daemon=True, name="watch")]
            if rank and not restarted():
                self.threads.append(threading.Thread(target=self._see_store, daemon=True, name="store"))
            for thread in self.threads:
                thread.start()

    def close(self) -> None:
        self.over.set()
        for thread in self.threads:
            thread.join(2 * ANSWER_SECONDS)
        if not any(thread.is_alive() for thread in self.threads):
            os.close(self.stderr)

    def heard(self) -> None:
        """Rank 0 has got on."""
        self.watching.heard()

    def _run(self) -> None:
        since, alive = time.monotonic(), b""
        try:
            if self.rank:
                host, pid = self._where(0)
                self.first, self.first_pid = self._name(0), pid if host == self.host else 0
            while not self.over.wait(self.pause):
                self._obey()
                self.answered = time.monotonic()
                if self.rank == 0:
                    self.store.set("alive", str(time.monotonic()))
                    if found := self.watching.look():
                        self._end_stuck(found)
                elif self.rank == 1 and self.store.check(["alive"]):
                    now = self.store.get("alive")
                    since, alive = (since, alive) if now == alive else (time.monotonic(), now)
                    if time.monotonic() - since > self.patience:
                        self._replace_first()
        except RuntimeError:  # the store is gone, and with it torchrun: nothing is left to be watched
            return

    def _see_store(self) -> None:
        """Ends this process when the store, and rank 0 with it, has not answered for too long."""
        while self.threads[0].is_alive() and not self.over.wait(self.pause):
            if time.monotonic() - self.answered > self.patience:
                said = f"{self.first} is stopped or cannot be reached for {self.patience:.0f} s: ending"
                self._cry(f"trireme: {said}; run the same command again to continue")
                if self.first_pid:
                    kill(self.first_pid)
                os._exit(1)

    # --- asking and answering -----------------------------------------------------------------------------------

    def _say(self, word: str) -> int:
        number = int(self.store.add("count", 1))
        self.store.set("word", f"{number} {word}")
        return number

    def _obey(self) -> None:
        """Does what the newest word asks for, once."""
        if not self.store.check(["word"]):
            return
        number, what, *ends = self.store.get("word").decode().split()
        if int(number) <= self.read:
            return
        self.read = int(number)
        if what == "end":
            for host, pid in (end.rsplit(":", 1) for end in ends):
                if host == self.host:
                    kill(int(pid))
        else:
            said = {"beat": answers.beat, "stack": answers.stack, "flight": flight.record}[what]()
            self.store.set(f"answer/{self.rank}", pickle.dumps((self.read, said)))

    def _ask(self, what: str) -> dict[int, Any]:
        number = self._say(what)
        self._obey()
        found: dict[int, Any] = dict.fromkeys(range(self.world_size))
        until = time.monotonic() + ANSWER_SECONDS
        while time.monotonic() < until and (silent := [rank for rank, said in found.items() if said is None]):
            for rank in silent:
                if self.store.check([f"answer/{rank}"]):
                    at, said = pickle.loads(self.store.get(f"answer/{rank}"))
                    found[rank] = said if at == number else None
            time.sleep(0.02)
        return found

    # --- ending -------------------------------------------------------------------------------------------------

    def _where(self, rank: int) -> tuple[str, int]:
        return pickle.loads(self.store.get(f"here/{rank}"))

    def _name(self, rank: int) -> str:
        host, pid = self._where(rank)
        return f"worker {rank}, process {pid} on {host},"

    def _end_stuck(self, found: Stuck) -> None:
        driver = self.driver
        assert driver is not None
        self.watching.keep(driver, self._name)
        sentence = f"{self._name(found.rank)} {found.why}"
        driver.tracker.tags({"trireme.last_failure": sentence})
        driver.console.say(f"{sentence}; ending it (torchrun --max-restarts=N starts all ranks again)")
        culprits = {found.rank} | found.dumb
        self._end(culprits)
        if any(self._where(rank)[0] != self.host for rank in culprits):
            time.sleep(GRACE_SECONDS)  # that they, or their neighbours, get to end them
            os._exit(1)
        self.over.set()

    def _replace_first(self) -> None:
        self._cry(f"{self._name(0)} has not moved for {self.patience:.0f} s: ending it")
        self._end({0})
        if self._where(0)[0] != self.host:
            os._exit(1)  # so that torchrun starts all again, whether or not that host can still be reached

    def _cry(self, sentence: str) -> None:
        """Says it in this rank's log, and where the process began to write."""
        for stream in (self.stderr, 2):
            os.write(stream, f"{sentence}\n".encode())

    def _end(self, ranks: Iterable[int]) -> None:
        """Kills ranks of this host, itself last, and asks the others' to."""
        places = {rank: self._where(rank) for rank in sorted(ranks, key=lambda rank: rank == self.rank)}
        if elsewhere := [f"{host}:{pid}" for host, pid in places.values() if host != self.host]:
            self._say(" ".join(["end", *elsewhere]))
        for host, pid in places.values():
            if host == self.host:
                kill(pid)


class FirstRank:
    """Rank 0's Channel: the driver, and the watch that hears it get on."""

    def __init__(self, driver: Driver, watch: StoreWatch) -> None:
        self.driver, self.watch = driver, watch
        self.beat = Beat()

    def emit(self, event: dict[str, Any]) -> None:
        if event["type"] not in NO_NEWS:
            self.watch.heard()
        self.driver.emit(event)

    def stop_requested(self) -> bool:
        return self.driver.stop_requested()

    def follow(self, beat: Beat) -> None:
        self.beat = beat
