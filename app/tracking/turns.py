"""What can come between a writer and the end of its spool."""

from __future__ import annotations


class Turn(Exception):
    """Delivery does not simply go on."""


class Rewind(Turn):
    """The MLflow run is no longer there: make another, and fill it from the beginning of the spool."""


class Superseded(Turn):
    """The events that follow belong to a newer start of this run, which has a writer of its own."""


class Leave(Turn):
    """There is no use in waiting; what is left is for the next writer."""
