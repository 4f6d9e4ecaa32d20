"""What a worker of any launcher in Ray needs, imported by a fork server (cluster/fast_start) before anyone asks."""
