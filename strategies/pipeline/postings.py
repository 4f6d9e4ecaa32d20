"""When a stage asks for what other stages will send it, so that nothing it does meanwhile can wait for itself.

On a GPU a receive that has been asked for runs until its sender sends, and a send until its receiver has asked. Almost
any call may meanwhile wait for all that the device has been given: a kernel's first launch (kernels are loaded when
they are first used), an allocation that gives memory back, whatever a library does (NCCL's user guide warns of it:
*Using multiple NCCL communicators concurrently*). A stage that has asked too early then waits for a message that
depends on what it has not done yet, and every stage for another. It is not enough that the message depends on nothing
that the stage has still to do: its sender may be waiting too, for what it has asked for.

So all stages' instructions are put into one order: that in which they end when the schedule is played through with
equal parts and short ways. **A stage asks for a message at the place in this order where it is sent.** To do everything
in that order, one after another, is then a possible execution, and one in which nothing is under way when the next
thing begins: what a stage waits for at any call is what it has sent or asked for before, and both ends of that come
earlier in the order. Hence no stage waits for what comes after, in whichever of its calls the device is waited for, and
whether a send waits for its receiver or not. tests/strategies/pipeline/test_postings.py plays it through.

It costs no time where parts take equally long: in the device's queue a receive stands behind instructions that end
before the sender's does. Were a transfer always under way at once, a step whose parts differ by up to 30 % would be 2 %
shorter at the most (mean; 2 stages to 8, transfers of a twentieth or a fifth of a forward). And it holds little memory:
at most 4 messages that have been asked for and not been needed (interleaved_1f1b with 8 stages).
"""

from dataclasses import dataclass

from strategies.pipeline.schedules import Placement, Schedule
from strategies.pipeline.simulate import Times, simulate

Key = tuple[str, int, int]
"""A message: (F or B, the edge that it crosses, micro-batch). Edge k lies between the parts k and k+1."""


TIMES = Times(1, 1, 1, transfer=1 / 8)
"""Of which only the order matters. With a transfer's time no two neighbours end at once in the steady state."""


@dataclass(frozen=True)
class Arrival:
    """A message that a stage is sent. after: how many of its instructions the stage has done when it asks for it.
    frees: what it has sent to `source` that `source` has certainly taken once this has come."""

    key: Key
    source: int
    after: int
    frees: tuple[Key, ...]


def arrivals(schedule: Schedule) -> tuple[tuple[Arrival, ...], ...]:
    """Per stage what it is sent, in the order in which it asks.

    Raises:
        LayoutError: a schedule that deadlocks by itself.
    """
    place = schedule.placement
    done = [0] * place.stages
    coming: list[list[tuple[Key, int, int]]] = [[] for _ in done]  # message, done, and what its sender has taken so far
    taken: list[list[Key]] = [[] for _ in done]
    for span in sorted(simulate(schedule, TIMES), key=lambda span: (span.end, "FBW".index(span.kind))):
        part = place.part(span.stage, span.chunk)
        done[span.stage] += 1
        takes, gives = (part - 1, part) if span.kind == "F" else (part, part - 1)
        if span.kind != "W" and _crosses(place, takes):
            taken[span.stage].append((span.kind, takes, span.micro))
        if span.kind != "W" and _crosses(place, gives):
            key = (span.kind, gives, span.micro)
            target = ends(place, key)[1]
            coming[target].append((key, done[target], len(taken[span.stage])))
    return tuple(tuple(_arrivals(place, stage, coming[stage], taken)) for stage in range(place.stages))


def _arrivals(
    place: Placement, stage: int, coming: list[tuple[Key, int, int]], taken: list[list[Key]]
) -> list[Arrival]:
    """taken: by every stage, in order."""
    heard = {key: count for key, _, count in coming}
    told = [0] * place.stages  # of what each stage has taken, how much this one has heard of
    frees: dict[Key, tuple[Key, ...]] = {}
    for key in taken[stage]:
        source = ends(place, key)[0]
        news = taken[source][told[source] : heard[key]]
        frees[key] = tuple(one for one in news if ends(place, one)[0] == stage)
        told[source] = max(told[source], heard[key])
    return [Arrival(key, ends(place, key)[0], after, frees[key]) for key, after, _ in coming]


def _crosses(place: Placement, edge: int) -> bool:
    """Whether there is such an edge, between two stages. (A folded schedule turns on one stage.)"""
    return 0 <= edge < place.parts - 1 and place.stage(edge) != place.stage(edge + 1)


def ends(placement: Placement, key: Key) -> tuple[int, int]:
    """The stages from which and to which a message goes."""
    kind, edge, _ = key
    stages = placement.stage(edge), placement.stage(edge + 1)
    return stages if kind == "F" else (stages[1], stages[0])


def connections(placement: Placement) -> list[tuple[str, int, int]]:
    """(F or B, from, to) of everything that is ever sent, in an order in which stages can open their connections: every
    stage keeps to it, so of those not yet open the first has both its ends free. Those from even stages come first, so
    that half of them open at once."""
    edges = [edge for edge in range(placement.parts - 1) if _crosses(placement, edge)]
    found = {(kind, *ends(placement, (kind, edge, 0))) for kind in "FB" for edge in edges}
    return sorted(found, key=lambda one: (one[0], one[1] % 2, one))
