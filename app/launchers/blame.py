"""Which rank holds up the others, according to torch's flight records of every rank.

A rank that waits for its GPU, for example in `.cpu()`, looks like one that computes, so heartbeats
cannot tell who waits for whom. Collectives can, because every rank of a group gives the same ones
the same numbers. The others wait for a rank that has enqueued fewer collectives than they have, or
else has started fewer, or else has completed fewer. A rank that receives waits for a peer that has
not sent yet. The rank to blame is waited for and waits for nobody: if a rank stands still, its
tensor-parallel peer is behind in some group too, but only the rank itself is in all of them.

A record is the JSON that `strategies.torch_internals.flight_recorder` gives (format 2.10, torch's
FlightRecorder.hpp):

- `entries`, oldest first, each with `process_group` (name, description), `profiling_name`
  ("nccl:all_reduce", "nccl:recv 1<-0"), `collective_seq_id`, `is_p2p`, `state` (scheduled, started,
  completed) and `retired`
- `pg_config`, with each group's `ranks`

NCCL records "started" only with TORCH_NCCL_ENABLE_TIMING=1; gloo records "completed" as `retired`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

Group = tuple[str, str]
"""Backend and name of a process group."""
Entry = dict[str, Any]
"""An entry of a record, with the `ranks` of its group."""
P2P = re.compile(r"(?:recv (\d+)<-(\d+)|send (\d+)->(\d+))$")


class LastCollectives(NamedTuple):
    """A rank's last collectives in a group, by number; 0 means none."""

    enqueued: int = 0
    started: int = 0
    completed: int = 0

    def __str__(self) -> str:
        return (
            f"collective {self.enqueued} asked for, {self.started} started, {self.completed} "
            "completed"
        )


@dataclass(frozen=True)
class Behind:
    """The rank that the others wait for.

    Args:
        rank: The rank.
        why: Continues a sentence that begins with the rank's name.
    """

    rank: int
    why: str


def rank_behind(records: Mapping[int, str]) -> Behind | None:
    """The rank that the others wait for.

    Args:
        records: The record of each rank that answers.

    Returns:
        None if the records do not tell.
    """
    entries = {rank: _entries(record) for rank, record in records.items()}
    waits_for: dict[int, dict[int, str]] = defaultdict(dict)
    """For each rank that waits, the ranks that it waits for, each with a reason."""
    for (_, group_name), members in _last_collectives(entries).items():
        furthest = max(members.values())
        for rank, last in members.items():
            if last == furthest:
                continue
            why = f"is behind in group {group_name}: {last}, others {furthest}"
            for other_rank, other_last in members.items():
                if other_last > last:
                    waits_for[other_rank].setdefault(rank, why)
    for receiver, sender in _unanswered_receives(entries):
        why = f"has not sent what rank {receiver} waits to receive"
        waits_for[receiver].setdefault(sender, why)
    blamed: dict[int, str] = {}
    for reasons in waits_for.values():
        for rank, why in reasons.items():
            if rank not in waits_for:
                blamed[rank] = why
    if not blamed:
        return None
    rank, why = min(blamed.items())
    return Behind(rank, why)


def _entries(record: str) -> list[Entry]:
    """The entries of a record, with the `ranks` of each one's group if the record has them.

    If groups of one name followed each other, each counting anew, only the last one's entries are
    returned.
    """
    try:
        fields = json.loads(record)
    except ValueError:
        return []
    ranks_of_group = {
        name: json.loads(config.get("ranks") or "[]")
        for name, config in fields.get("pg_config", {}).items()
    }
    entries: list[Entry] = []
    newest_pg_id: dict[Group, int] = {}
    for entry in fields.get("entries", ()):
        ranks = ranks_of_group.get(entry["process_group"][0]) or []
        entries.append({**entry, "ranks": ranks})
        newest_pg_id[_group(entry)] = entry["pg_id"]
    return [entry for entry in entries if entry["pg_id"] == newest_pg_id[_group(entry)]]


def _last_collectives(
    entries: Mapping[int, list[Entry]],
) -> dict[Group, dict[int, LastCollectives]]:
    """The last collectives of every rank in each group that it is known to be in.

    A rank that has enqueued nothing in a group is at 0, unless its record is full, so that what it
    enqueued may have been overwritten.
    """
    groups: dict[Group, dict[int, LastCollectives]] = defaultdict(dict)
    complete_ranks = {
        rank
        for rank, own_entries in entries.items()
        if not own_entries or own_entries[0]["record_id"] == 0
    }
    for rank, own_entries in entries.items():
        for entry in own_entries:
            if entry["is_p2p"]:
                continue
            members = groups[_group(entry)]
            for member in entry["ranks"]:
                if member in complete_ranks:
                    members.setdefault(member, LastCollectives())
            number = entry["collective_seq_id"]
            is_completed = _is_completed(entry)
            is_started = is_completed or entry["state"] == "started"
            previous = members.get(rank, LastCollectives())
            members[rank] = LastCollectives(
                enqueued=max(previous.enqueued, number),
                started=max(previous.started, number if is_started else 0),
                completed=max(previous.completed, number if is_completed else 0),
            )
    return groups


def _unanswered_receives(entries: Mapping[int, list[Entry]]) -> Iterable[tuple[int, int]]:
    """Ranks that wait to receive, each with the sender that has enqueued no send to it."""
    receives: set[tuple[Group, int, int]] = set()
    sends: set[tuple[Group, int, int]] = set()
    for own_entries in entries.values():
        for entry in own_entries:
            transfer = P2P.search(entry["profiling_name"])
            if not transfer or _is_completed(entry):
                continue
            is_receive = transfer[0].startswith("recv")
            if is_receive:
                receiver, sender = int(transfer[1]), int(transfer[2])
            else:
                sender, receiver = int(transfer[3]), int(transfer[4])
            # The numbers in the name are ranks within the group.
            ranks = entry["ranks"] or range(max(sender, receiver) + 1)
            pair = (_group(entry), ranks[receiver], ranks[sender])
            if is_receive:
                receives.add(pair)
            else:
                sends.add(pair)
    for _, receiver, sender in sorted(receives - sends):
        if sender in entries:
            yield receiver, sender


def _is_completed(entry: Entry) -> bool:
    return bool(entry["retired"] or entry["state"] == "completed")


def _group(entry: Entry) -> Group:
    backend = entry["profiling_name"].partition(":")[0]
    return backend, entry["process_group"][0]
