"""How samples become a batch: by the data set's own `collate_fn`, or as PyTorch does it."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import ConcatDataset, Subset, default_collate

from app.errors import UserError

Collate = Callable[[list[Any]], Any]


def collate_of(data: Any) -> Collate:
    """What makes a batch of a data set's samples.

    That is the attribute `collate_fn` of the data set, or of the one that a Subset (as random_split
    makes it), a ConcatDataset or a Mixture consists of.

    Args:
        data: A data set, or a stream.

    Raises:
        UserError: A ConcatDataset or a Mixture has parts that make batches differently.
    """
    of_data: Collate | None = getattr(data, "collate_fn", None)
    if of_data is not None:
        return of_data
    if isinstance(data, Subset):
        return collate_of(data.dataset)
    if isinstance(data, ConcatDataset):
        functions = [collate_of(part) for part in data.datasets]
        # Methods of two data sets of one class are different objects around one function.
        if len({getattr(function, "__func__", function) for function in functions}) > 1:
            raise UserError(
                f"the parts of a {type(data).__name__} make batches by different functions: "
                "give all of them the same collate_fn, or set the collate_fn of the whole"
            )
        return functions[0]
    return default_collate
