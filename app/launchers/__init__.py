"""Four ways to start the same training loop: Ray Train, Ray actors, torchrun's processes, and this very process."""
