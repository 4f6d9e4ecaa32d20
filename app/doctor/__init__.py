"""`trireme doctor`: what every node and GPU is, whether it is usable, and what to do where it is not."""
