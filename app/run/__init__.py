"""A run's life: its manifest and lease, what is checked before it starts, its driver, its end."""
