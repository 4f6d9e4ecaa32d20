"""Three ways to start the same training loop: Ray Train, the processes torchrun made, and this very process."""
