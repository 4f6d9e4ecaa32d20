"""What the runtime and the training loop need of a stage, and no more.

`Stage` (stage.py) is the stage that runs a model. Tests put others in its place, which compute
nothing.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import Tensor, nn

T = TypeVar("T")
Signature = tuple[object, ...]
"""Names a kind of batch: for all batches with one signature, everything in the model has the same
shapes."""
Placeholders = Mapping[str, object]
"""The output of every call of a module, by the call's name: tensors have shapes, but no data."""
TimedBlock = Callable[[str], AbstractContextManager[None]]
"""The name of a block's call → the context in which its forward runs."""


class PipelineStage(Protocol):
    """One or several consecutive parts of a model, and the running of them."""

    @property
    def module(self) -> nn.Module:
        """The model, in which only this stage's parameters have memory."""

    @property
    def parts(self) -> frozenset[int]:
        """The parts of the model that this stage holds."""

    @property
    def state_names(self) -> frozenset[str]:
        """The names in the whole model's state_dict."""

    def last_block(self, part: int) -> str:
        """The name of the part's last block."""

    def signature(self, batch: object) -> Signature:
        """The kind of batch that this one is."""

    def placeholders(
        self, signature: Signature, function: Callable[[nn.Module, Any], object], batch: Any
    ) -> Placeholders:
        """The placeholders for batches of that signature.

        Args:
            signature: The batch's.
            function: The loss, or in evaluation another function of the model and the batch.
            batch: A batch.

        Raises:
            LayoutError: The model calls other modules than it did for the first batch.
        """

    def run(
        self,
        part: int,
        function: Callable[[nn.Module, Any], T],
        batch: Any,
        *,
        placeholders: Placeholders,
        inputs: list[Tensor],
        timed_block: TimedBlock,
    ) -> tuple[T | None, list[Tensor]]:
        """Forward of one part.

        Args:
            part: The part.
            function: The loss, or in evaluation another function of the model and the batch.
            batch: The micro-batch.
            placeholders: For its signature.
            inputs: The tensors that the part before has sent, in order.
            timed_block: Times each of the part's blocks.

        Returns:
            What the function returned, or None for a part that is not the last one; and the tensors
            to send on, in order.

        Raises:
            LayoutError: The model did not do what it did for the first batch.
        """
