"""Every strategy beside one device: the parity matrix."""
