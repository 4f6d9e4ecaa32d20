"""The training by hand in plain Ray actors: `python -m … with_ray_actors gpt ddp`.

What Ray itself takes, with nothing else: Trireme cannot take less while Ray starts its workers.
"""

import os
import socket
import sys

import ray
from ray.util import get_node_ip_address

from experiments.benchmarks.peers.workload import WORKERS


@ray.remote(num_cpus=1)
class Worker:
    def address(self) -> tuple[str, int]:
        with socket.socket() as free:
            free.bind(("", 0))
            return get_node_ip_address(), free.getsockname()[1]

    def train(self, rank: int, address: tuple[str, int], name: str, strategy: str) -> None:
        os.environ["MASTER_ADDR"] = address[0]
        os.environ["MASTER_PORT"] = str(address[1])
        os.environ["RANK"] = str(rank)
        os.environ["WORLD_SIZE"] = str(WORKERS)
        from experiments.benchmarks.peers import by_hand

        by_hand.main(name, strategy)


def main(name: str, strategy: str) -> None:
    if "RAY_ADDRESS" in os.environ:
        ray.init()
    else:
        ray.init("local", num_cpus=WORKERS, include_dashboard=False)
    workers = [Worker.remote() for _ in range(WORKERS)]  # type: ignore[attr-defined]
    address = ray.get(workers[0].address.remote())
    calls = [
        worker.train.remote(rank, address, name, strategy) for rank, worker in enumerate(workers)
    ]
    ray.get(calls)


if __name__ == "__main__":
    main(*sys.argv[1:])
