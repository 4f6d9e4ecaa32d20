"""What a trace has of each part of a model.

A *part* is what comes before the first block, each kind of block, and what comes after the last
one. The kinds of blocks are called block0, block1 and so on.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import NamedTuple

BEFORE, AFTER = "before", "after"


def names_block(part: str) -> bool:
    """Whether a part is a kind of block, by its name."""
    return part.startswith("block")


class Product(NamedTuple):
    """Matrix products of one operation: 2·m·n·k·batch FLOPs."""

    m: float
    n: float
    k: float
    batch: float


class Moment(NamedTuple):
    """What is alive when something has been allocated.

    Args:
        operation: The phase, and the operation that has allocated it.
        size: Bytes that are alive, without those of `chunk`.
        chunk: Bytes for each logit of a chunk whose rows do not grow with the batch.
    """

    operation: str
    size: float
    chunk: float

    @property
    def is_in_forward(self) -> bool:
        """Whether forward has allocated it."""
        return self.operation.startswith("forward")


@dataclass
class PartTrace:
    """The costs of one part for the batch that was traced.

    Args:
        values: By name, in bytes unless noted otherwise:

            moved_forward, moved_backward        read and written by what is not a product
            operations_forward, …_backward       how many operations are launched
            misaligned_forward, …_backward       FLOPs of batched products of misaligned rows
            aligned_2_forward, …_8_backward      FLOPs of other products whose rows begin at
                                                 multiples of 2, 4 or 8 bytes
            attention_forward, …_backward        FLOPs of fused attention
            weighted_attention_forward, …        the same, times how far the kernels are from their
                                                 best (fused.py)
            fused_moved_…, fused_operations_…    `moved` and `operations` if a compiler fuses them
            queries, keys                        numbers in queries, and in keys and values
            saved                                storages kept for backward, without parameters
            fusible                              of `saved`, what compiled kernels recompute
            copies                               of `saved`, parameters in the type of products
            kept                                 results that `selective` checkpointing keeps
            boundary                             the input of a block
            crossing                             the same, as a pipeline sends it
            chunked_rows, chunked_numbers        rows and logits of losses whose chunks are bounded
            sent, collectives                    by one tensor-parallel worker: bytes, and how many
                                                 collectives send them
            sent_forward, collectives_forward    of these, in forward
            sent_beside                          of `sent`, while backward multiplies for the
                                                 gradient of a weight
            rearranged_forward, …_backward       read and written to order the rows of several
                                                 samples for collectives
            regathered                           what a recomputed block has besides `saved`, as it
                                                 does not gather its input again
        products: The matrix products of forward and of backward.
        moments: What is alive after each allocation, beyond what is saved.
    """

    values: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    products: dict[str, list[Product]] = field(
        default_factory=lambda: {"forward": [], "backward": []}
    )
    moments: list[Moment] = field(default_factory=list)


@dataclass
class Trace:
    """What a model costs for one batch.

    Args:
        parts: The costs of each part, by its name.
        order: The part of each block, in the order of their calls.
    """

    parts: dict[str, PartTrace]
    order: list[str]
