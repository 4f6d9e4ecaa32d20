"""`trireme doctor`: facts of every node, and what they mean."""
