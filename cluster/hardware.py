"""The hardware catalogue: GPUs and cloud machines with their prices, read from hardware.yaml.

The figures are those of datasheets: peaks that nothing reaches. The planner multiplies them by an
efficiency that was fitted or measured (app/planner). Units are bytes, bytes/s, FLOP/s, US dollars
per hour and watts.

A GPU that is not in the catalogue can be put into a file of the user's own, with the same `gpus:`
(TRIREME_HARDWARE, else ~/.config/trireme/hardware.yaml). `trireme calibrate` writes the GPU that it
has measured there.
"""

import difflib
import functools
import os
import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from cluster import ClusterError
from cluster.document import load_yaml
from cluster.environment import below_home

CATALOGUE = Path(__file__).with_name("hardware.yaml")

PCIE_4 = 25e9
"""Bytes/s to or from host memory that PCIe 4 ×16 reaches of its 31.5e9."""
VARIANT = {"memory": "GiB", "hbm": "TB/s", "link": "GB/s", "power": "W"}
"""What may be written after a GPU's name, and its unit."""
_UNITS = {"GiB": 2**30, "GB": 1e9, "TB/s": 1e12, "GB/s": 1e9, "W": 1.0, "kW": 1e3}
_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|radeon|[^a-z0-9]")


class HardwareError(ClusterError):
    """A GPU is not in the catalogue, or its entry is wrong. The message is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU; "cpu" is one core.

    Attributes:
        name: Its name in the catalogue.
        memory_bytes: The size of its memory.
        memory_bandwidth: Bytes/s of its memory.
        peak: FLOP/s of dense matrix products by precision: fp32 (vector units), tf32, bf16, fp16
            and fp8, without those that it does not have.
        link_within: Bytes/s from one GPU to another of the same node, one direction.
        link_host: Bytes/s that copies to or from host memory reach, one direction.
        link_across: Bytes/s to other nodes for each GPU of its maker's own systems, one direction;
            None if there are none.
        watts: Its power limit; 0 if it is not known.
        clock: Which share of the clock behind `peak` a lower power limit leaves.
    """

    name: str
    memory_bytes: int
    memory_bandwidth: float
    peak: dict[str, float] = field(hash=False)
    link_within: float
    link_host: float = PCIE_4
    link_across: float | None = None
    watts: float = 0.0
    clock: float = 1.0

    @property
    def base(self) -> str:
        """The catalogue's name of the GPU of which this may be a variant."""
        return self.name.partition(":")[0]

    def rate(self, precision: str) -> float:
        """Peak FLOP/s at a precision; at one that the GPU does not have, that of fp32."""
        return self.peak.get(precision, self.peak["fp32"])


@dataclass(frozen=True, kw_only=True)
class Instance:
    """A cloud's machine with GPUs, at its list price.

    Attributes:
        name: The cloud's name of the machine.
        provider: The cloud.
        gpu: The catalogue's name of its GPUs.
        gpus: The number of GPUs.
        cpus: The number of virtual CPUs.
        memory_bytes: Its host memory.
        link_across: Bytes/s of the node to other nodes, one direction.
        price_per_hour: US dollars.
        cards: The number of its network cards; 0 if the catalogue does not have it.
        date: The month in which the price was listed.
    """

    name: str
    provider: str
    gpu: str
    gpus: int
    cpus: int
    memory_bytes: int
    link_across: float
    price_per_hour: float
    cards: int
    date: str

    @property
    def price_per_gpu_hour(self) -> float:
        return self.price_per_hour / self.gpus


@dataclass(frozen=True)
class Catalogue:
    """hardware.yaml together with the user's own file.

    Attributes:
        instances: Cloud machines by name.
        gpus_by_alias: GPUs by each of their names, reduced by `_plain`.
        names: All names of each GPU, by its own.
    """

    instances: dict[str, Instance]
    gpus_by_alias: dict[str, Gpu]
    names: dict[str, tuple[str, ...]]


def find_gpu(name: str) -> Gpu:
    """Looks up a GPU in the catalogue.

    Args:
        name: The name that the catalogue, a driver, Ray or a cloud has for it, such as "NVIDIA
            A100-SXM4-80GB". After a colon, what is different from the catalogue's entry:
            "h100-80gb:hbm=2.4TB/s,power=500W" (see `VARIANT`).

    Raises:
        HardwareError: It is not in the catalogue; names the nearest, and how to add one.
    """
    base, _, variant = name.partition(":")
    if variant:
        return _variant(find_gpu(base), variant)
    gpus = _catalogue().gpus_by_alias
    plain = _plain(base)
    if plain in gpus:
        return gpus[plain]
    hint = ""
    matches = difflib.get_close_matches(plain, gpus, n=3, cutoff=0.3)
    if matches:
        names = dict.fromkeys(gpus[match].name for match in matches)
        hint = f", did you mean {' or '.join(names)}?"
    raise HardwareError(
        f"the GPU {base!r} is not in the catalogue {CATALOGUE}{hint} (to add one, run `trireme "
        "calibrate` on it or write an entry there)"
    )


def other_meanings(name: str) -> list[str]:
    """The other GPUs that a name could mean, such as a100-80gb for A100, which is a100-40gb here.

    These are the GPUs with a name that begins with the same words and says more.

    Args:
        name: The name, as for `find_gpu`.

    Returns:
        Names of the catalogue; [] for a name that means one GPU only.

    Raises:
        HardwareError: The GPU is not in the catalogue.
    """
    base = name.partition(":")[0]
    taken = find_gpu(base)
    if _plain(base) == _plain(taken.name):
        return []
    words = _words(base)
    others = []
    for other, names in _catalogue().names.items():
        begins_alike = any(_words(alias)[: len(words)] == words for alias in names)
        if other != taken.name and begins_alike:
            others.append(other)
    return others


def _variant(base: Gpu, text: str) -> Gpu:
    """A GPU with some figures changed, such as a lower power limit.

    Power grows with clock x voltage², and voltage with the clock, so that a power limit leaves the
    cube root of its share of the clock.
    """
    values: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = part.strip().partition("=")
        match = re.fullmatch(r"([0-9.]+) *([A-Za-z/]+)", value.strip())
        unit = match[2] if match else ""
        # GB and GiB are units of memory, TB/s and GB/s of a bandwidth, W and kW of power.
        has_right_unit = key in VARIANT and unit in _UNITS and unit[-1] == VARIANT[key][-1]
        if not match or not has_right_unit:
            forms = ", ".join(f"{name}=…{unit}" for name, unit in VARIANT.items())
            raise HardwareError(
                f"the GPU {base.name}:{text} has {part!r}, which cannot be read: write {forms}"
            )
        values[key] = float(match[1]) * _UNITS[unit]
    watts = values.get("power", base.watts)
    clock = 1.0
    if base.watts:
        clock = min(1.0, (watts / base.watts) ** (1 / 3))
    return replace(
        base,
        name=f"{base.name}:{text.replace(' ', '')}",
        memory_bytes=int(values.get("memory", base.memory_bytes)),
        memory_bandwidth=values.get("hbm", base.memory_bandwidth),
        link_within=values.get("link", base.link_within),
        watts=watts,
        clock=clock,
    )


def all_instances() -> dict[str, Instance]:
    """Every cloud machine with GPUs, by name."""
    return _catalogue().instances


def cheapest(name: str) -> Instance | None:
    """The machine with the lowest list price per hour and GPU.

    Args:
        name: The GPU.

    Returns:
        None if no cloud of the catalogue has the GPU.

    Raises:
        HardwareError: The GPU is not in the catalogue.
    """
    wanted = find_gpu(name).base
    offers = [instance for instance in all_instances().values() if instance.gpu == wanted]
    return min(offers, key=lambda instance: instance.price_per_gpu_hour, default=None)


def own_catalogue() -> Path:
    """The user's own file beside the catalogue; it need not exist."""
    path = os.environ.get("TRIREME_HARDWARE")
    if path:
        return Path(path).expanduser()
    return below_home("XDG_CONFIG_HOME", ".config") / "trireme" / "hardware.yaml"


def add_gpu(name: str, entry: dict[str, Any]) -> Path:
    """Writes a GPU into the user's own file.

    Args:
        name: The GPU.
        entry: Its figures, with the keys and units of hardware.yaml.

    Returns:
        The file.

    Raises:
        HardwareError: The entry lacks a figure, or the user's file is not a catalogue.
    """
    path = own_catalogue()
    _read_gpu(name, entry, path)
    entries = _own_gpus() | {name: entry}
    path.parent.mkdir(parents=True, exist_ok=True)
    new_file = path.with_suffix(".new")
    new_file.write_text(yaml.safe_dump({"gpus": entries}, sort_keys=False))
    new_file.replace(path)
    _catalogue.cache_clear()
    return path


def _own_gpus() -> dict[str, Any]:
    """The entries of the user's own file by name.

    Raises:
        HardwareError: It is not a catalogue.
    """
    path = own_catalogue()
    try:
        if not path.exists():
            return {}
        entries = load_yaml(path.read_text())["gpus"]
        return {name: dict(entry) for name, entry in entries.items()}
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise HardwareError(
            f"{path} is not a catalogue of GPUs: write `gpus:` and under it entries as in "
            f"{CATALOGUE}"
        ) from error


@functools.cache
def _catalogue() -> Catalogue:
    tree = yaml.load(CATALOGUE.read_text(), Loader=yaml.CSafeLoader)
    own_gpus = _own_gpus()
    entries = tree["gpus"] | own_gpus
    gpus_by_alias = {}
    names: dict[str, tuple[str, ...]] = {}
    for name, entry in entries.items():
        gpu = _read_gpu(name, entry, own_catalogue() if name in own_gpus else CATALOGUE)
        names[name] = (name, *entry.get("aka", ()))
        for alias in names[name]:
            gpus_by_alias[_plain(alias)] = gpu
    instances = {}
    for provider, offers in tree["prices"].items():
        for name, entry in offers["instances"].items():
            instances[name] = _read_instance(name, provider, entry, date=str(offers["date"]))
    return Catalogue(instances, gpus_by_alias, names)


def _read_gpu(name: str, entry: dict[str, Any], file: Path) -> Gpu:
    missing = [key for key in ("memory", "bandwidth", "link", "peak") if key not in entry]
    if missing or "fp32" not in entry.get("peak", {}):
        raise HardwareError(f"{file}: the GPU {name} lacks {', '.join(missing) or 'peak.fp32'}")
    try:
        return Gpu(
            name=name,
            memory_bytes=int(entry["memory"]) * 2**20,
            memory_bandwidth=float(entry["bandwidth"]) * 1e9,
            peak={precision: float(rate) * 1e12 for precision, rate in entry["peak"].items()},
            link_within=float(entry["link"]) * 1e9,
            link_host=float(entry["host"]) * 1e9 if "host" in entry else PCIE_4,
            link_across=float(entry["network"]) * 1e9 / 8 if "network" in entry else None,
            watts=float(entry.get("watts", 0)),
        )
    except (TypeError, ValueError) as error:
        problem = "has something that is not a number"
        raise HardwareError(f"{file}: the GPU {name} {problem}: {error}") from error


def _read_instance(name: str, provider: str, entry: dict[str, Any], *, date: str) -> Instance:
    return Instance(
        name=name,
        provider=provider,
        gpu=entry["gpu"],
        gpus=int(entry["gpus"]),
        cpus=int(entry["cpus"]),
        memory_bytes=int(entry["memory"]) * 2**30,
        link_across=float(entry["network"]) * 1e9 / 8,  # the catalogue has gigabits per second
        price_per_hour=float(entry["price"]),
        cards=int(entry.get("cards", 0)),
        date=date,
    )


def _words(name: str) -> list[str]:
    """The words of a GPU's name, each as `_plain` has it."""
    words = [_plain(word) for word in re.split(r"[^A-Za-z0-9]+", name)]
    return [word for word in words if word]


def _plain(name: str) -> str:
    """A GPU's name in small letters and digits, without its maker and product line."""
    return _NOISE.sub("", name.lower())
