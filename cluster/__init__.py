"""Machines: what a Ray cluster has, and whether a job fits on it. Imports Ray and YAML only."""


class ClusterError(ValueError):
    """The cluster cannot be reached, can never give what is asked, or its file is wrong; one sentence."""
