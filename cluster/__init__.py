"""Machines: what a Ray cluster has, and whether a job fits on it. Imports Ray and YAML only."""


class ClusterError(ValueError):
    """The cluster cannot be reached, can never give what is asked, or its file is wrong; one sentence."""


class ClusterUnavailable(RuntimeError):
    """A cluster, or Ray on this machine, did not answer in time though it was tried again; one sentence with the cause.

    Nothing that was written is wrong, so the command line ends with exit code 1 and not 2."""
