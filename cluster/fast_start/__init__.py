"""Warm processes and a lean private Ray. The folder can be deleted: everything works without it, slower."""
