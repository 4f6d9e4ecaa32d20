"""Machines: what a Ray cluster has, and whether a job fits on it. Imports Ray and YAML only."""


class ClusterError(ValueError):
    """The cluster cannot be reached, can never give what is asked, or its file is wrong.

    The message is one sentence.
    """


class ClusterUnavailable(RuntimeError):
    """A cluster, or Ray on this machine, did not answer in time after several tries.

    The message is one sentence with the cause. The user's input is not wrong, so the command line
    ends with exit code 1 and not 2.
    """
