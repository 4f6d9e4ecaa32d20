"""Which rank holds up the others, by what torch's flight recorder says of every rank's last collectives.

A rank that waits for its GPU, in `.cpu()`, say, looks like one that computes, so heartbeats cannot tell who waits for
whom. Collectives can: in a group every rank gives the same ones the same numbers. Whoever has asked for fewer than
another, or else has started fewer, or else completed fewer, is waited for. So is the peer that has not yet sent what a
rank has asked to receive. The rank to name is waited for and waits for nobody: of a tensor-parallel peer of the rank
that stands still, both are behind in some group, and only one of them in all of them.

A record is the JSON that `strategies.torch_internals.flight_recorder` gives (format 2.10, torch's FlightRecorder.hpp):
`entries`, oldest first, each with `process_group` (name, description), `profiling_name` ("nccl:all_reduce", "nccl:recv
1<-0"), `collective_seq_id`, `is_p2p`, `state` (scheduled, started, completed) and `retired`; `pg_config` with each
group's `ranks`. NCCL tells "started" only with TORCH_NCCL_ENABLE_TIMING=1; gloo "completed" as `retired`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Group = tuple[str, str]
"""Backend and name."""
P2P = re.compile(r"(?:recv (\d+)<-(\d+)|send (\d+)->(\d+))$")


class Reached(NamedTuple):
    """How far a rank is in a group: the numbers of its last collective asked for, started and completed; 0: none."""

    asked: int = 0
    started: int = 0
    completed: int = 0


@dataclass(frozen=True)
class Behind:
    """A rank, and why it is the one; the sentence goes on after the rank's name."""

    rank: int
    why: str


def rank_behind(records: Mapping[int, str]) -> Behind | None:
    """The rank that the others wait for; None where their records do not tell. records: of each rank that answers."""
    entries = {rank: _entries(text) for rank, text in records.items()}
    waits: dict[int, dict[int, str]] = defaultdict(dict)  # rank → those it waits for, and in what
    for group, reached in _reached(entries).items():
        most = max(reached.values())
        for rank, own in reached.items():
            if own < most:
                why = f"is behind in group {group[1]}: {_told(own)}, others {_told(most)}"
                for other in (other for other, far in reached.items() if far > own):
                    waits[other].setdefault(rank, why)
    for rank, peer in _unanswered(entries):
        waits[rank].setdefault(peer, f"has not sent what rank {rank} waits to receive")
    named = {rank: why for found in waits.values() for rank, why in found.items() if rank not in waits}
    return Behind(*min(named.items())) if named else None


def _told(far: Reached) -> str:
    return f"collective {far.asked} asked for, {far.started} started, {far.completed} completed"


def _entries(text: str) -> list[dict[str, Any]]:
    """With `ranks` of each one's group, where the record has them. Of groups of one name that followed each other, and
    began to count anew, the last one's."""
    try:
        record = json.loads(text)
    except ValueError:
        return []
    ranks = {name: json.loads(about.get("ranks") or "[]") for name, about in record.get("pg_config", {}).items()}
    found = [entry | {"ranks": ranks.get(entry["process_group"][0]) or []} for entry in record.get("entries", ())]
    newest = {_group(entry): entry["pg_id"] for entry in found}
    return [entry for entry in found if entry["pg_id"] == newest[_group(entry)]]


def _reached(entries: Mapping[int, list[dict[str, Any]]]) -> dict[Group, dict[int, Reached]]:
    """How far every rank is in each group that it is known to be of. One that has asked for nothing is at 0, unless its
    record is full and what it asked for may have left it."""
    found: dict[Group, dict[int, Reached]] = defaultdict(dict)
    whole = {rank for rank, own in entries.items() if not own or own[0]["record_id"] == 0}
    for rank, own in entries.items():
        for entry in own:
            if entry["is_p2p"]:
                continue
            group = _group(entry)
            for member in entry["ranks"]:
                if member in whole:
                    found[group].setdefault(member, Reached())
            before, number = found[group].get(rank, Reached()), entry["collective_seq_id"]
            done = entry["retired"] or entry["state"] == "completed"
            begun = done or entry["state"] == "started"
            now = Reached(number, number if begun else 0, number if done else 0)
            found[group][rank] = Reached(*map(max, before, now))
    return found


def _unanswered(entries: Mapping[int, list[dict[str, Any]]]) -> Iterable[tuple[int, int]]:
    """A rank that has asked to receive, and its peer, which has asked for no send to it that is not completed."""
    wanted, sending = set[tuple[Group, int, int]](), set[tuple[Group, int, int]]()
    for own in entries.values():
        for entry in own:
            found = P2P.search(entry["profiling_name"])
            if not found or entry["retired"] or entry["state"] == "completed":
                continue
            at = [int(number) for number in found.groups() if number]
            to, source = at if "recv" in found[0] else at[::-1]
            ranks = entry["ranks"] or range(max(to, source) + 1)  # the names' numbers are those in the group
            pair = _group(entry), ranks[to], ranks[source]
            (wanted if "recv" in found[0] else sending).add(pair)
    return ((to, source) for _, to, source in sorted(wanted - sending) if source in entries)


def _group(entry: Mapping[str, Any]) -> Group:
    return entry["profiling_name"].partition(":")[0], entry["process_group"][0]
