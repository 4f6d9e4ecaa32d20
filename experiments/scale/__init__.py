"""Scaling studies: one experiment over numbers of workers, and what more of them would bring."""
