"""Which errors of all four packages are for a person, by class, and how a command ends with them.

app/errors.py does not name them itself: it is among the sources that MLflow keeps with a model, and
those do without cluster/.
"""

from app.errors import UserError
from cluster import ClusterError, ClusterUnavailable
from strategies.dims import LayoutError

USER_ERRORS = (UserError, LayoutError, ClusterError)
"""What was written or provided is wrong: exit code 2."""
MACHINE_ERRORS = (ClusterUnavailable,)
"""A machine did not do what it can do at other times, and nothing is to be written differently:
exit code 1."""
