"""Four ways to start the training loop: Ray Train, Ray actors, torchrun, and this very process."""
