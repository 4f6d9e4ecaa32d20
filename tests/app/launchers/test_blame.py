"""Which rank holds up the others, by records as torch's flight recorder writes them; no process is started."""

import json
from typing import Any
from unittest import mock

import pytest

from app.launchers.blame import rank_behind
from app.launchers.heartbeats import Hang
from app.launchers.supervisor import Supervisor

COMPLETED, STARTED, SCHEDULED = "completed", "started", "scheduled"
WORLD = {"0": [0, 1, 2, 3]}
GRID = {"0": [0, 1, 2, 3], "tp01": [0, 1], "tp23": [2, 3], "dp02": [0, 2], "dp13": [1, 3]}
Op = tuple[str, int, str]
"""Group, number of the collective, state."""


def entry(group: str, number: int, state: str, name: str = "nccl:all_reduce") -> dict[str, Any]:
    """One entry, by the names and types of FlightRecorderDetail.hpp's dump_json."""
    p2p, done = "recv" in name or "send" in name, state == COMPLETED
    return {
        "pg_id": 0, "process_group": [group, "default_pg"], "thread_name": "python", "thread_id": "1",
        "collective_seq_id": 0 if p2p else number, "p2p_seq_id": number if p2p else 0, "op_id": number,
        "profiling_name": name, "time_created_ns": 1, "input_sizes": [[1]], "input_dtypes": ["Float"],
        "output_sizes": [[1]], "output_dtypes": ["Float"], "state": state, "time_discovered_started_ns": 0,
        "time_discovered_completed_ns": 0, "retired": done, "timeout_ms": 600000, "is_p2p": p2p,
    }  # fmt: skip


def record(*entries: dict[str, Any], groups: dict[str, list[int]] = WORLD, first: int = 0) -> str:
    config = {name: {"name": name, "desc": "", "ranks": str(ranks)} for name, ranks in groups.items()}
    numbered = [one | {"record_id": first + i} for i, one in enumerate(entries)]
    return json.dumps({"version": "2.10", "pg_config": config, "entries": numbered})


def upto(asked: int, completed: int, started: int = 0, group: str = "0") -> list[dict[str, Any]]:
    def state(n: int) -> str:
        return COMPLETED if n <= completed else STARTED if n <= started else SCHEDULED

    return [entry(group, n, state(n)) for n in range(1, asked + 1)]


RECV, SEND = "nccl:recv 1<-0", "nccl:send 0->1"
AHEAD = record(*upto(9, 7))
CASES: dict[str, tuple[dict[int, str], int | None, str]] = {
    # the others have asked for two more, and wait in .cpu()
    "asked": ({0: AHEAD, 1: AHEAD, 2: record(*upto(7, 7)), 3: AHEAD}, 2, "collective 7 asked for"),
    "rank 0": ({0: record(*upto(7, 7)), 1: AHEAD, 2: AHEAD, 3: AHEAD}, 0, "others collective 9 asked for"),
    # all have asked; only one GPU has not begun: with TORCH_NCCL_ENABLE_TIMING=1
    "started": ({r: record(*upto(9, 7, 7 if r == 1 else 8)) for r in range(4)}, 1, "7 started"),
    "completed": ({r: record(*upto(9, 6 if r == 3 else 8, 9)) for r in range(4)}, 3, "6 completed"),
    "nothing asked yet": ({0: AHEAD, 1: AHEAD, 2: AHEAD, 3: record()}, 3, "collective 0 asked for"),
    "all alike": (dict.fromkeys(range(4), AHEAD), None, ""),
    "no record": ({0: "", 1: ""}, None, ""),
    "none": ({}, None, ""),
    # 3 stands still; 2 waits for it under tensor parallelism, and 0 and 1 for both under data parallelism
    "a chain": (
        {
            0: record(*upto(5, 5, group="tp01"), *upto(3, 2, group="dp02"), groups=GRID),
            1: record(*upto(5, 5, group="tp01"), *upto(3, 2, group="dp13"), groups=GRID),
            2: record(*upto(5, 4, group="tp23"), *upto(2, 2, group="dp02"), groups=GRID),
            3: record(*upto(4, 4, group="tp23"), *upto(2, 2, group="dp13"), groups=GRID),
        },
        3,
        "in group",
    ),
    # each waits for the other: the records do not tell who was wrong
    "a circle": (
        {
            0: record(*upto(3, 2, group="tp01"), *upto(2, 2), groups=GRID),
            1: record(*upto(2, 2, group="tp01"), *upto(3, 2), groups=GRID),
        },
        None,
        "",
    ),
    # the record is full, and what it had of a group that is seldom used has left it
    "full": (
        {0: record(*upto(9, 9), *upto(1, 1, group="tp01"), groups=GRID), 1: record(*upto(9, 9)[3:], first=500)},
        None,
        "",
    ),
    "gloo": (
        {r: record(*[entry("0", n, COMPLETED, "gloo:all_reduce") for n in range(1, 4 - r)], groups={}) for r in (0, 1)},
        1,
        "collective 2 asked for",
    ),
    # a group of the same name was there before, and had come further
    "a group before": (
        {r: record(*upto(9 - r, 9 - r), *[e | {"pg_id": 1} for e in upto(3 - r, 2)]) for r in (0, 1)},
        1,
        "collective 2 asked for",
    ),
    "not sent": ({0: record(), 1: record(entry("0", 1, SCHEDULED, RECV))}, 0, "what rank 1 waits to receive"),
    "sent": ({0: record(entry("0", 1, SCHEDULED, SEND)), 1: record(entry("0", 1, SCHEDULED, RECV))}, None, ""),
    "received": ({0: record(), 1: record(entry("0", 1, COMPLETED, RECV))}, None, ""),
    "a stage of a pipeline": (
        {2: record(groups={"pp": [2, 5]}), 5: record(entry("pp", 1, STARTED, RECV), groups={"pp": [2, 5]})},
        2,
        "what rank 5 waits",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_rank_that_the_others_wait_for(case: str) -> None:
    records, rank, why = CASES[case]
    found = rank_behind(records)
    assert (found.rank if found else None) == rank and (found is None or why in found.why)


@pytest.mark.parametrize(
    ("silent", "records", "ended", "said"),
    [
        (frozenset(), CASES["asked"][0], [2], "worker 2 is behind in group 0"),
        (frozenset(), CASES["all alike"][0], [0], "worker 0 has been training"),
        (frozenset({0}), CASES["asked"][0], [0], "worker 0 has been training"),  # it has no record
    ],
)
def test_a_hang_is_laid_to_that_rank_and_not_to_rank_0(
    silent: frozenset[int], records: dict[int, str], ended: list[int], said: str
) -> None:
    """All wait in `.cpu()`, where heartbeats name the first rank."""
    workers = mock.Mock(restartable=True, ask=lambda question: records if question == "flight_recorder" else {})
    driver = mock.Mock(step=9)
    supervisor = Supervisor(workers, driver)
    supervisor.infos = {rank: mock.Mock(rank=rank, __str__=lambda self: f"worker {self.rank}") for rank in range(4)}
    blamed = supervisor._end_hang(Hang(0, "has been training after step 9 for 20 s without progress", silent))
    assert list(blamed) == ended and str(blamed[ended[0]]).startswith(said)
    assert [info.rank for info in workers.kill.call_args[0][0]] == ended
