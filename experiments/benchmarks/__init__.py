"""Trireme beside what a user would pick instead, in one interleaved run; see README.md."""
