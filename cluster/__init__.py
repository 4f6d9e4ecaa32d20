"""Machines: what a Ray cluster has, and whether a job fits on it. Imports Ray and YAML only."""
