"""What is wrong with GPUs: not visible, not believed, busy, broken, slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from app.console import size
from app.doctor.facts import ClusterFacts, Finding, GpuFacts, NodeFacts


def no_driver(facts: ClusterFacts) -> Iterator[Finding]:
    """The machine has GPUs, and nothing serves them: why, from what is there and what is not."""
    for node in facts.answered:
        if not node.pci_gpus or node.gpus:
            continue
        if node.driver_loaded and not node.device_files:
            why, mend = (
                "its container was not given them",
                "start the container with --gpus all and NVIDIA's container toolkit (Kubernetes: nvidia.com/gpu)",
            )
        elif node.driver_loaded:
            why, mend = f"nvidia-smi fails ({node.smi_error or 'no answer'})", "restart the machine or its driver"
        else:
            why, mend = "no NVIDIA driver is loaded", "install the driver, then start Ray again"
        yield Finding("no_driver", f"{node.who} has {node.pci_gpus} NVIDIA GPUs, but {why}", mend, (node.node_id,))


def hidden(facts: ClusterFacts) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES, mostly leaked from a shell or a launcher into `ray start`."""
    for node in facts.answered:
        if node.visible is None or not node.gpus or node.torch_gpus is None:
            continue
        if node.torch_gpus < len(node.gpus):
            yield Finding(
                "hidden_gpus",
                f"{node.who} has {len(node.gpus)} GPUs, but CUDA_VISIBLE_DEVICES={node.visible!r} shows only "
                f"{node.torch_gpus}",
                "unset it before `ray start` on that node; Ray sets it for each worker itself",
                (node.node_id,),
            )


def wrong_torch(facts: ClusterFacts) -> Iterator[Finding]:
    for node in facts.answered:
        if not node.gpus or node.torch_gpus or node.visible is not None:
            continue
        if node.torch_cuda is None:
            yield Finding(
                "cpu_torch",
                f"{node.who} has {len(node.gpus)} GPUs, but torch {node.packages.get('torch', '')} there is built for "
                "CPUs only",
                "install torch for CUDA: https://pytorch.org/get-started/locally",
                (node.node_id,),
            )
        elif _older(node.driver_cuda, node.torch_cuda):
            yield Finding(
                "old_driver",
                f"the driver {node.driver} of {node.who} serves CUDA up to {node.driver_cuda}, and torch there needs "
                f"{node.torch_cuda}",
                f"update the driver, or install torch for CUDA {node.driver_cuda}",
                (node.node_id,),
            )
        else:
            yield Finding(
                "torch_blind",
                f"{node.who} has {len(node.gpus)} GPUs and torch sees none ({node.torch_error or 'no reason given'})",
                'run `python -c "import torch; torch.cuda.init()"` there: it says why',
                (node.node_id,),
            )


def _older(driver: str, wanted: str) -> bool:
    """Whether the driver's newest CUDA is of an older major version than torch's: minor ones are compatible."""
    try:
        return int(driver.split(".")[0]) < int(wanted.split(".")[0])
    except ValueError:
        return False


def ray_count(facts: ClusterFacts) -> Iterator[Finding]:
    """What Ray hands out against what torch can use. A head may hide its GPUs from Ray on purpose."""
    for node in facts.answered:
        if node.torch_gpus is None and node.ray_gpus and not node.pci_gpus:
            yield Finding(
                "ray_gpus",
                f"Ray believes that {node.who} has {node.ray_gpus:g} GPUs, and there is none",
                "correct --num-gpus of its `ray start`",
                (node.node_id,),
            )
        if node.torch_gpus is None or node.torch_gpus < len(node.gpus):
            continue  # said by another check
        if node.ray_gpus > node.torch_gpus or (node.ray_gpus < node.torch_gpus and not node.head):
            yield Finding(
                "ray_gpus",
                f"Ray believes that {node.who} has {node.ray_gpus:g} GPUs, and torch sees {node.torch_gpus}",
                "leave --num-gpus out of its `ray start`, so that Ray counts them itself",
                (node.node_id,),
                grave=node.ray_gpus > node.torch_gpus,
            )


def _each(facts: ClusterFacts) -> Iterator[tuple[NodeFacts, GpuFacts, str]]:
    for node in facts.answered:
        for gpu in node.gpus:
            yield node, gpu, f"GPU {gpu.index} ({gpu.name}) of {node.who}"


def _per_gpu(
    code: str, wrong: Callable[[GpuFacts], bool], says: Callable[[GpuFacts, str], str], mend: str
) -> Callable[[ClusterFacts], Iterator[Finding]]:
    """A check that looks at each GPU by itself; says: from the GPU and its name for a person."""

    def check(facts: ClusterFacts) -> Iterator[Finding]:
        for node, gpu, name in _each(facts):
            if wrong(gpu):
                yield Finding(code, says(gpu, name), mend, (node.node_id,))

    return check


mig = _per_gpu(
    "mig",
    lambda gpu: gpu.mig,
    lambda _, name: f"{name} is split by MIG: a worker gets a slice, and NCCL does not work between slices",
    "for training over several GPUs turn it off: `nvidia-smi -mig 0` there",
)

ecc = _per_gpu(
    "ecc",
    lambda gpu: gpu.ecc_errors > 0,
    lambda gpu, name: f"{name} has {gpu.ecc_errors} memory errors that could not be corrected",
    "restart the machine; if they come again, have the GPU replaced",
)

xid = _per_gpu(
    "xid",
    lambda gpu: bool(gpu.xids),
    lambda gpu, name: f"the driver reported {gpu.xids[-1]} for {name}",
    "restart the machine, and look the number up in NVIDIA's list of Xid errors",
)

throttled = _per_gpu(
    "throttled",
    lambda gpu: bool(gpu.throttled),
    lambda gpu, name: f"{name} is slowed down ({', '.join(gpu.throttled)}) at {gpu.temperature:.0f} °C",
    "look at its cooling and its power supply",
)


def taken(facts: ClusterFacts) -> Iterator[Finding]:
    """Doctor looks before it uses any memory itself; the driver alone takes some hundred MB."""
    for node, gpu, name in _each(facts):
        if gpu.processes:
            yield Finding(
                "busy_gpu",
                f"{name} is in use by another process ({'; '.join(gpu.processes[:2])})",
                "wait for it or end it; a run beside it gets less memory and time",
                (node.node_id,),
            )
        elif gpu.memory_total and gpu.memory_used > max(1.5e9, 0.03 * gpu.memory_total):
            yield Finding(
                "memory_taken",
                f"{size(gpu.memory_used)} of {size(gpu.memory_total)} of {name} are taken by nobody who can be seen",
                "a process of another container or one that died: `nvidia-smi --gpu-reset`, or restart the machine",
                (node.node_id,),
            )


def slow_gpu(facts: ClusterFacts) -> Iterator[Finding]:
    """Against its peers of the same name: a gang waits for its slowest. 15 % is beyond what binning gives."""
    by_name: dict[str, list[float]] = {}
    for _, gpu, _name in _each(facts):
        if gpu.flops:
            by_name.setdefault(gpu.name, []).append(gpu.flops)
    for node, gpu, name in _each(facts):
        rates = sorted(by_name.get(gpu.name, ()))
        usual = rates[len(rates) // 2] if len(rates) > 2 else (rates or [0.0])[-1]
        if gpu.flops and gpu.flops < 0.85 * usual:
            yield Finding(
                "slow_gpu",
                f"{name} multiplies matrices at {gpu.flops / 1e12:.0f} TFLOP/s, its peers at {usual / 1e12:.0f}",
                "look at its clocks and power limit (`nvidia-smi -q -d PERFORMANCE,POWER`), or leave the node out",
                (node.node_id,),
            )


def mixed(facts: ClusterFacts) -> Iterator[Finding]:
    names = sorted({gpu.name for _, gpu, _ in _each(facts)})
    if len(names) > 1:
        yield Finding(
            "mixed_gpus",
            f"the cluster has unlike GPUs ({', '.join(names)}): a strategy that gives all the same share runs at the "
            "slowest one's speed",
            "use nodes of one kind, or a pipeline with stages of unlike size",
            grave=False,
        )


TABLE = (no_driver, hidden, wrong_torch, ray_count, mig, ecc, xid, throttled, taken, slow_gpu, mixed)
