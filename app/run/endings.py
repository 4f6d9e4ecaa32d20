"""The classes of errors that are for a person, from all four packages, by how a command ends.

app/errors.py does not name them itself, because it is among the sources that MLflow keeps with a
model, and those do without cluster/.
"""

from app.errors import UserError
from cluster import ClusterError, ClusterUnavailable
from strategies.dims import LayoutError

USER_ERRORS = (UserError, LayoutError, ClusterError)
"""Something written or provided is wrong: exit code 2."""
MACHINE_ERRORS = (ClusterUnavailable,)
"""A machine fails to do what it can do at other times, and the user has nothing to change: exit
code 1."""
