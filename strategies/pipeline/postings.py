"""When a stage posts its receives, so that stages never deadlock.

To *post* a receive is to ask for a message before it is needed, so that it travels while the stage
computes. On a GPU a posted receive occupies the device until the sender sends, and a send occupies
it until the receiver has posted its receive. Meanwhile almost any call may wait for everything that
was launched on the device before: the first launch of a kernel, because kernels are loaded when
they are first used; an allocation that gives memory back; whatever a library does. NCCL's user
guide warns of this under *Using multiple NCCL communicators concurrently*. So a stage that posts a
receive too early may wait for a message that depends on its own later instructions, and then the
stages wait for one another in a circle. It does not help if the message depends on none of these:
its sender may itself wait for a receive that it has posted.

So the instructions of all stages are put into one order: the order in which they end when the
schedule is simulated with equal parts and short transfers. **A stage posts the receive of a message
at the place in this order where the message is sent.** It is then possible to do all instructions
in this order, one after another, with no message under way when the next instruction begins. For
whatever a stage waits at any call, it has sent or posted it before, and both ends of that message
come earlier in the order. Hence no stage waits for anything that comes later, whichever of its
calls waits for the device, and whether or not a send waits for its receiver.
tests/strategies/pipeline/test_postings.py simulates this.

If the parts take equally long this costs no time: in the device's queue a receive stands behind
instructions that end before the sender's does. If instead every transfer could start at once, a
step whose parts differ by up to 30 % would be at most 2 % shorter (mean over 2 to 8 stages, with
transfers of a twentieth or a fifth of a forward). It costs little memory, too: at most 4 messages
have been posted and are not needed yet (interleaved_1f1b with 8 stages).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from strategies.pipeline.schedules import Placement, Schedule
from strategies.pipeline.simulate import Span, Times, simulate

TIMES = Times.equal(1.0, transfer=1 / 8)
"""Times of the simulation, of which only the order matters. Because a transfer takes some time, no
two neighbours end at once in the steady state."""


class Message(NamedTuple):
    """The tensors that cross from one stage to another for one micro-batch.

    Args:
        kind: F (activations) or B (their gradients).
        edge: Edge k lies between the parts k and k+1; F crosses it towards k+1, B towards k.
        micro_batch: Number of the micro-batch.
    """

    kind: str
    edge: int
    micro_batch: int


@dataclass(frozen=True, kw_only=True)
class PostedReceive:
    """A message that a stage receives.

    Args:
        message: The message.
        source: The stage that sends it.
        after_ops: How many of its instructions the stage has done when it posts the receive.
        delivered: Messages that this stage has sent to `source` and that have certainly been
            received once this message has come.
    """

    message: Message
    source: int
    after_ops: int
    delivered: tuple[Message, ...]


@dataclass(frozen=True)
class _Sending:
    """The moment at which a message is sent.

    Args:
        message: The message.
        target_ops: How many instructions its receiver has done by then.
        received: How many messages its sender has received by then.
    """

    message: Message
    target_ops: int
    received: int


def posted_receives(schedule: Schedule) -> tuple[tuple[PostedReceive, ...], ...]:
    """The messages that each stage receives, in the order in which it posts them.

    Raises:
        LayoutError: The schedule deadlocks by itself.
    """
    placement = schedule.placement
    done = [0] * placement.stages
    sendings: list[list[_Sending]] = [[] for _ in range(placement.stages)]  # by receiver
    received: list[list[Message]] = [[] for _ in range(placement.stages)]
    for span in sorted(simulate(schedule, TIMES), key=_order):
        done[span.stage] += 1
        if span.kind == "W":
            continue
        part = placement.part_at(span.stage, span.chunk)
        if span.kind == "F":
            edge_in = part - 1
            edge_out = part
        else:
            edge_in = part
            edge_out = part - 1
        if _is_between_stages(placement, edge_in):
            received[span.stage].append(Message(span.kind, edge_in, span.micro_batch))
        if _is_between_stages(placement, edge_out):
            message = Message(span.kind, edge_out, span.micro_batch)
            _, target = endpoints(placement, message)
            sendings[target].append(_Sending(message, done[target], len(received[span.stage])))
    return tuple(
        tuple(_receives_of_stage(placement, stage, sendings=sendings[stage], received=received))
        for stage in range(placement.stages)
    )


def _order(span: Span) -> tuple[float, int]:
    return span.end, "FBW".index(span.kind)


def _receives_of_stage(
    placement: Placement,
    stage: int,
    *,
    sendings: Sequence[_Sending],
    received: Sequence[Sequence[Message]],
) -> list[PostedReceive]:
    """The receives of one stage.

    Args:
        placement: Which stage holds which parts.
        stage: The stage.
        sendings: Of the messages to it.
        received: The messages that each stage receives, in order.
    """
    received_by_sender = {sending.message: sending.received for sending in sendings}
    # For each other stage: how many of the messages that it received are known to be delivered.
    known = [0] * placement.stages
    delivered: dict[Message, tuple[Message, ...]] = {}
    for message in received[stage]:
        source, _ = endpoints(placement, message)
        newly_known = received[source][known[source] : received_by_sender[message]]
        delivered[message] = tuple(
            other for other in newly_known if endpoints(placement, other)[0] == stage
        )
        known[source] = max(known[source], received_by_sender[message])
    return [
        PostedReceive(
            message=sending.message,
            source=endpoints(placement, sending.message)[0],
            after_ops=sending.target_ops,
            delivered=delivered[sending.message],
        )
        for sending in sendings
    ]


def _is_between_stages(placement: Placement, edge: int) -> bool:
    """Whether the edge exists and what crosses it is sent; the turn of a V is on one stage."""
    exists = 0 <= edge < placement.parts - 1
    return exists and placement.stage_of(edge) != placement.stage_of(edge + 1)


def endpoints(placement: Placement, message: Message) -> tuple[int, int]:
    """The stages that send and receive a message: (source, target)."""
    lower = placement.stage_of(message.edge)
    upper = placement.stage_of(message.edge + 1)
    return (lower, upper) if message.kind == "F" else (upper, lower)


class Connection(NamedTuple):
    """A direction in which one stage sends messages of one kind to another."""

    kind: str
    source: int
    target: int


def connections(placement: Placement) -> list[Connection]:
    """All connections, in an order in which the stages can open them.

    Every stage opens its connections in this order. Of those that are not open yet, both ends of
    the first are therefore free, so that the stages never wait for each other in a circle.
    Connections from even stages come first, so that half of them open at the same time.
    """
    edges = [edge for edge in range(placement.parts - 1) if _is_between_stages(placement, edge)]
    unordered = {
        Connection(kind, *endpoints(placement, Message(kind, edge, 0)))
        for kind in "FB"
        for edge in edges
    }

    def order(connection: Connection) -> tuple[str, int, Connection]:
        return connection.kind, connection.source % 2, connection

    return sorted(unordered, key=order)
