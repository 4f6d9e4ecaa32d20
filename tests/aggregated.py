"""`trireme` whose ranks report through an aggregator of their node, however few they are."""

import runpy

from app.launchers import ray_workers

if __name__ == "__main__":
    ray_workers.DIRECT_RANKS = 0
    runpy.run_module("app", run_name="__main__", alter_sys=True)
