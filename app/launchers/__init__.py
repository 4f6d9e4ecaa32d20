"""Four ways to start one training loop: Ray Train, Ray actors, torchrun's processes, this process."""
