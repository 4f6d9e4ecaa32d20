"""Data order and loading: which samples make up a step, and how they get to the device."""
