"""What makes gloo's CPUs faster. The folder can be deleted: everything works without it, slower."""
