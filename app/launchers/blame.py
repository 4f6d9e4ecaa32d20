"""Which rank holds up the others, according to torch's flight records of every rank.

A rank that waits for its GPU, for example in `.cpu()`, looks like one that computes, so heartbeats
cannot tell who waits for whom. Collectives can, because every rank of a group gives the same ones
the same numbers. The others wait for a rank that has enqueued fewer collectives than they have, or
else has started fewer, or else has completed fewer. A rank that receives waits for a peer that has
not sent yet. The rank to blame is waited for and waits for nobody: if a rank stands still, its
tensor-parallel peer is behind in some group too, but only the rank itself is in all of them.

Every rank makes a summary of its own record, a few hundred bytes, so that the driver reads what
grows with the number of ranks and not with its square. A record is the JSON that
`strategies.torch_internals.flight_recorder` gives (format 2.10, torch's FlightRecorder.hpp):

- `entries`, oldest first, each with `process_group` (name, description), `profiling_name`
  ("nccl:all_reduce", "nccl:recv 1<-0"), `collective_seq_id`, `is_p2p`, `state` (scheduled, started,
  completed) and `retired`
- `pg_config`, with each group's `ranks`

NCCL records "started" only with TORCH_NCCL_ENABLE_TIMING=1; gloo records "completed" as `retired`.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Group = tuple[str, str]
"""Backend and name of a process group."""
Entry = dict[str, Any]
"""An entry of a record, with the `ranks` of its group."""
Transfer = tuple[Group, int, int]
"""A group, the rank that receives and the one that sends."""
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


# --- on a rank ------------------------------------------------------------------------------------


def summary(rank: int, record: str) -> str:
    """What `rank_behind` has to know of a rank's record, as JSON; "" if there is no record.

    It has the rank's last collectives in each group, the transfers that have not ended, and the
    names of groups in which the rank has enqueued nothing.
    """
    try:
        fields = json.loads(record)
    except ValueError:
        return ""
    ranks_of_group: dict[str, list[int]] = {
        name: json.loads(config.get("ranks") or "[]")
        for name, config in fields.get("pg_config", {}).items()
    }
    entries = _entries(fields)
    groups = _last_collectives(entries)
    # If the record is full, what was enqueued in other groups may have been overwritten.
    is_complete = not entries or entries[0]["record_id"] == 0
    used_names = {name for _, name in groups}
    unused_names = [
        name
        for name, ranks in ranks_of_group.items()
        if is_complete and rank in ranks and name not in used_names
    ]
    receives, sends = _transfers(entries, ranks_of_group)
    return json.dumps(
        {
            "groups": [[*group, *last] for group, last in groups.items()],
            "unused": unused_names,
            "receives": [[*group, *ends] for group, *ends in sorted(receives)],
            "sends": [[*group, *ends] for group, *ends in sorted(sends)],
        }
    )


def _entries(record: Mapping[str, Any]) -> list[Entry]:
    """The entries of a record.

    If groups of one name followed each other, each counting anew, only the last one's entries are
    returned.
    """
    entries: Sequence[Entry] = record.get("entries", ())
    newest_pg_id = {_group(entry): entry["pg_id"] for entry in entries}
    return [entry for entry in entries if entry["pg_id"] == newest_pg_id[_group(entry)]]


def _last_collectives(entries: Iterable[Entry]) -> dict[Group, LastCollectives]:
    """The last collectives in each group."""
    groups: dict[Group, LastCollectives] = {}
    for entry in entries:
        if entry["is_p2p"]:
            continue
        number = entry["collective_seq_id"]
        is_completed = _is_completed(entry)
        is_started = is_completed or entry["state"] == "started"
        previous = groups.get(_group(entry), LastCollectives())
        groups[_group(entry)] = LastCollectives(
            enqueued=max(previous.enqueued, number),
            started=max(previous.started, number if is_started else 0),
            completed=max(previous.completed, number if is_completed else 0),
        )
    return groups


def _transfers(
    entries: Iterable[Entry], ranks_of_group: Mapping[str, Sequence[int]]
) -> tuple[set[Transfer], set[Transfer]]:
    """The receives and the sends that have not ended."""
    receives: set[Transfer] = set()
    sends: set[Transfer] = set()
    for entry in entries:
        transfer = P2P.search(entry["profiling_name"])
        if not transfer or _is_completed(entry):
            continue
        is_receive = transfer[0].startswith("recv")
        if is_receive:
            receiver, sender = int(transfer[1]), int(transfer[2])
        else:
            sender, receiver = int(transfer[3]), int(transfer[4])
        # The numbers in the name are ranks within the group.
        ranks = ranks_of_group.get(entry["process_group"][0]) or range(max(sender, receiver) + 1)
        transfers = receives if is_receive else sends
        transfers.add((_group(entry), ranks[receiver], ranks[sender]))
    return receives, sends


def _is_completed(entry: Entry) -> bool:
    return bool(entry["retired"] or entry["state"] == "completed")


def _group(entry: Entry) -> Group:
    backend = entry["profiling_name"].partition(":")[0]
    return backend, entry["process_group"][0]


# --- in the driver --------------------------------------------------------------------------------


def rank_behind(summaries: Mapping[int, str]) -> Behind | None:
    """The rank that the others wait for.

    Args:
        summaries: The summary of each rank that answers.

    Returns:
        None if the summaries do not tell.
    """
    groups: dict[Group, dict[int, LastCollectives]] = defaultdict(dict)
    unused: dict[str, list[int]] = defaultdict(list)
    receives: set[Transfer] = set()
    sends: set[Transfer] = set()
    for rank, text in summaries.items():
        fields = json.loads(text)
        for backend, name, *last in fields["groups"]:
            groups[backend, name][rank] = LastCollectives(*last)
        for name in fields["unused"]:
            unused[name].append(rank)
        for backend, name, receiver, sender in fields["receives"]:
            receives.add(((backend, name), receiver, sender))
        for backend, name, receiver, sender in fields["sends"]:
            sends.add(((backend, name), receiver, sender))
    waits: set[int] = set()
    """Ranks that wait for another one."""
    reasons: dict[int, str] = {}
    """Why others wait for a rank."""
    for (_, name), members in groups.items():
        for rank in unused[name]:
            members.setdefault(rank, LastCollectives())
        furthest = max(members.values())
        least = min(members.values())
        for rank, last in members.items():
            if last > least:
                waits.add(rank)
            if last < furthest:
                why = f"is behind in group {name}: {last}, others {furthest}"
                reasons.setdefault(rank, why)
    for _, receiver, sender in sorted(receives - sends):
        if sender in summaries:
            waits.add(receiver)
            why = f"has not sent what rank {receiver} waits to receive"
            reasons.setdefault(sender, why)
    blamed = min(reasons.keys() - waits, default=None)
    return None if blamed is None else Behind(blamed, reasons[blamed])
