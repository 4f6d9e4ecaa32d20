"""Measures what devices and links reach, in half a minute: `trireme calibrate`. That goes before the datasheet.

On one device: matrix products (large ones, or those of a model), copies through its memory, launches of an operation
that does nothing. Between the devices of a machine: all-reduces of a small and a large tensor, and products on several
at once (on CPUs workers share cores, so each is slower: `crowd`). gauge.py measures; calibrate_cluster.py does the same
on the nodes of a Ray cluster, and between them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from app.config import Config
from app.errors import RunFailed
from app.planner.measure import stop

TIMEOUT = 180.0
PRODUCTS = 8
"""Of a model's products, those that take most."""
MOST_NUMBERS = 2**28
"""Of a product's operands and result together: larger ones are left out."""
SAMPLES = 8
"""Of a micro-batch, where the experiment does not say."""


def calibrate(workers: int, shapes: list[list[float]] | None = None) -> dict[str, Any]:
    """The constants of this machine's devices, as rates.py names them, with `gpu` the catalogue's name.

    workers: processes that measure links together; 1: no links. shapes: a model's products (see `products_of`).
    A GPU that the catalogue lacks comes with `entry`, what it would say of it.
    Raises:
        RunFailed: the processes ended, or took too long.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    counts = [workers] if on_gpu else sorted({n for n in (2, 4, workers) if n <= workers})
    found = _run(workers, {"counts": counts, "shapes": shapes or []})
    alone, crowd = found.pop("alone"), [(1, 1.0)]
    for count in counts:
        together, link = found.pop(f"together{count}", None), found.pop(f"links{count}", None)
        if together is not None:
            crowd.append((count, max(1.0, together / alone)))
        if link is not None and "link_within" not in found:
            found |= {"link_within": link["bandwidth"], "latency_within": link["latency"], "within": 1.0}
            found |= {"shared": link["shared"]} if "shared" in link else {}
    if not on_gpu and len(crowd) > 1:
        found["crowd"] = crowd
    if "entry" in found and "link_within" in found:
        found["entry"]["link"] = found["link_within"] / 1e9
    return found | {"measured": True, "seconds_of_a_product": alone}


def keep(found: dict[str, Any]) -> tuple[str, Path]:
    """Remembers what was found; a GPU that the catalogue lacks goes into the file of one's own. Its name, the file."""
    from app.planner.calibration import remember
    from cluster.hardware import add_gpu

    values = dict(found)
    name, entry = values.pop("gpu"), values.pop("entry", None)
    if entry is not None:
        add_gpu(name, entry)
    return name, remember(name, values)


def products_of(config: Config) -> list[list[float]]:
    """m, n, k and number of those matrix products of an experiment's model that take most, for one micro-batch.

    Raises:
        UserError: the experiment has no such model.
    """
    from app.planner.evaluate import as_on
    from app.planner.fitted import basis
    from app.planner.read import Reader
    from app.planner.where import this_machine
    from app.planner.work import ways_of
    from app.tasks import load_task

    machine = this_machine(1)
    way = as_on(machine, ways_of(False, config.train.precision))
    costs = Reader(load_task(config.task, config.task_args)).read(way).costs[way]
    size = config.train.micro_batch_size or min(SAMPLES, config.train.global_batch_size)
    counted: dict[tuple[float, ...], float] = {}
    for name, part in costs.parts.items():
        times = max(1, costs.order.count(name))
        for shapes, counts in part.products.values():
            for (m, n, k, batch), count in zip(shapes @ basis(size, 1), counts):
                if min(m, n, k) >= 1 and m * k + k * n + m * n <= MOST_NUMBERS:
                    key = (round(m), round(n), round(k))
                    counted[key] = counted.get(key, 0.0) + float(max(1.0, batch) * count * times)
    heavy = sorted(counted, key=lambda key: -float(np.prod(key)) * counted[key])[:PRODUCTS]
    return [[*map(float, key), counted[key]] for key in heavy]


def _run(workers: int, asked: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        wanted, out = Path(folder) / "wanted.json", Path(folder) / "found.json"
        wanted.write_text(json.dumps(asked))
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        command += ["-m", "app.planner.gauge", str(wanted), str(out)]
        with open(Path(folder) / "log", "w+") as log:
            started = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log)
            try:
                started.wait(TIMEOUT)
            except subprocess.TimeoutExpired:
                raise RunFailed(f"calibration on {workers} processes took more than {TIMEOUT:.0f} s") from None
            finally:
                stop(started)
            log.seek(0)
            last = ([line for line in log.read().splitlines() if "Error" in line] or ["no word"])[0].strip()
        if started.returncode or not out.exists():
            raise RunFailed(f"calibration on {workers} processes failed: {last}")
        return dict(json.loads(out.read_text()))
