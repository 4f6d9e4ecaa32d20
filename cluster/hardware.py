"""The hardware catalogue: what GPUs can do and what they cost in clouds, read from hardware.yaml beside this file.

The figures are datasheets': peaks that nothing reaches. The planner multiplies them by an efficiency that was
fitted or measured (app/planner). Units here are plain: bytes, bytes/s, FLOP/s, USD per hour, watts.

A GPU that is not in it can be put in a file of one's own, with the same `gpus:` (TRIREME_HARDWARE, else
~/.config/trireme/hardware.yaml); `trireme calibrate` writes the one that it has measured there.
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

VARIANT = {"memory": "GiB", "hbm": "TB/s", "link": "GB/s", "power": "W"}
"""What may be written after a GPU's name, and its unit."""
_SCALES = {"GiB": 2**30, "GB": 1e9, "TB/s": 1e12, "GB/s": 1e9, "W": 1.0, "kW": 1e3}
_NOISE = re.compile(r"nvidia|tesla|geforce|quadro|amd|instinct|radeon|[^a-z0-9]")


class HardwareError(ClusterError):
    """A GPU or an instance type that the catalogue does not have: one sentence."""


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU; "cpu" is one core."""

    name: str
    memory_bytes: int
    memory_bandwidth: float
    """Bytes/s of the GPU's own memory."""
    peak: dict[str, float] = field(hash=False)
    """FLOP/s of dense matrix products by precision: fp32 (vector units), tf32, bf16, fp16, fp8; those it has."""
    link_within: float
    """Bytes/s from one GPU to another of the same node, one direction."""
    watts: float = 0.0
    clock: float = 1.0
    """Share of the clock behind `peak` that a power limit leaves."""

    @property
    def base(self) -> str:
        """The catalogue's name of what this may be a variant of."""
        return self.name.partition(":")[0]

    def rate(self, precision: str) -> float:
        """Peak FLOP/s at a precision; one that it lacks runs at fp32's."""
        return self.peak.get(precision, self.peak["fp32"])


@dataclass(frozen=True)
class Instance:
    """A cloud's machine with GPUs, at its list price."""

    name: str
    provider: str
    gpu: str
    gpus: int
    cpus: int
    memory_bytes: int
    link_across: float
    """Bytes/s of the node to other nodes, one direction."""
    price_per_hour: float
    cards: int
    """Network cards, where the catalogue says; else 0."""
    date: str
    """The month the price was listed."""

    @property
    def price_per_gpu_hour(self) -> float:
        return self.price_per_hour / self.gpus


def gpu(name: str) -> Gpu:
    """The GPU of that name, in the catalogue's words or a driver's, Ray's or a cloud's ("NVIDIA A100-SXM4-80GB").

    After a colon what is different from it: "h100-80gb:hbm=2.4TB/s,power=500W" (`VARIANT`).
    Raises:
        HardwareError: not in the catalogue; names the nearest, and how to add one.
    """
    name, _, variant = name.partition(":")
    if variant:
        return _variant(gpu(name), variant)
    names = _catalogue()[2]
    found = names.get(_plain(name))
    if found is None:
        near = difflib.get_close_matches(_plain(name), names, n=3, cutoff=0.3)
        hint = f", did you mean {' or '.join(dict.fromkeys(names[each].name for each in near))}?" if near else ""
        raise HardwareError(
            f"the GPU {name!r} is not in the catalogue {CATALOGUE}{hint} (to add one, run `trireme calibrate` on it or "
            "write an entry there)"
        )
    return found


def _variant(known: Gpu, written: str) -> Gpu:
    """Power grows with clock × voltage², and voltage with the clock: a limit leaves the cube root of its share."""
    values = dict[str, float]()
    for part in written.split(","):
        key, _, value = part.strip().partition("=")
        match = re.fullmatch(r"([0-9.]+) *([A-Za-z/]+)", value.strip())
        if key not in VARIANT or not match or match[2] not in _SCALES or match[2][-1] != VARIANT[key][-1]:
            every = ", ".join(f"{name}=…{unit}" for name, unit in VARIANT.items())
            raise HardwareError(f"the GPU {known.name}:{written} has {part!r}, which cannot be read: write {every}")
        values[key] = float(match[1]) * _SCALES[match[2]]
    watts = values.get("power", known.watts)
    return replace(
        known,
        name=f"{known.name}:{written.replace(' ', '')}",
        memory_bytes=int(values.get("memory", known.memory_bytes)),
        memory_bandwidth=values.get("hbm", known.memory_bandwidth),
        link_within=values.get("link", known.link_within),
        watts=watts,
        clock=min(1.0, (watts / known.watts) ** (1 / 3)) if known.watts else 1.0,
    )


def all_instances() -> dict[str, Instance]:
    """Every cloud machine with GPUs by name."""
    return _catalogue()[1]


def cheapest(name: str) -> Instance | None:
    """The machine with this GPU whose list price per GPU and hour is lowest; None if no cloud here has it."""
    wanted = gpu(name).base
    offers = [offer for offer in all_instances().values() if offer.gpu == wanted]
    return min(offers, key=lambda offer: offer.price_per_gpu_hour, default=None)


def own_catalogue() -> Path:
    """The file of one's own beside the catalogue; it need not exist."""
    if written := os.environ.get("TRIREME_HARDWARE"):
        return Path(written).expanduser()
    return below_home("XDG_CONFIG_HOME", ".config") / "trireme" / "hardware.yaml"


def add_gpu(name: str, entry: dict[str, Any]) -> Path:
    """Writes a GPU into the file of one's own, in hardware.yaml's words and units; the file."""
    path = own_catalogue()
    _read_gpu(name, entry, path)
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_suffix(".new")
    written.write_text(yaml.safe_dump({"gpus": _own_gpus() | {name: entry}}, sort_keys=False))
    written.replace(path)
    _catalogue.cache_clear()
    return path


def _own_gpus() -> dict[str, Any]:
    path = own_catalogue()
    try:
        found = load_yaml(path.read_text())["gpus"] if path.exists() else {}
        return {name: dict(entry) for name, entry in found.items()}
    except (OSError, yaml.YAMLError, LookupError, TypeError, ValueError, AttributeError) as error:
        problem = f"{path} is not a catalogue of GPUs"
        raise HardwareError(f"{problem}: write `gpus:` and under it entries as in {CATALOGUE}") from error


@functools.cache
def _catalogue() -> tuple[dict[str, Gpu], dict[str, Instance], dict[str, Gpu]]:
    """GPUs and instances by name, and GPUs by each of their names in plain letters."""
    tree, own = yaml.safe_load(CATALOGUE.read_text()), _own_gpus()
    gpus = {name: _read_gpu(name, entry, CATALOGUE) for name, entry in tree["gpus"].items()}
    gpus |= {name: _read_gpu(name, entry, own_catalogue()) for name, entry in own.items()}
    instances = {
        name: _read_instance(name, provider, entry, offers)
        for provider, offers in tree["prices"].items()
        for name, entry in offers["instances"].items()
    }
    entries = tree["gpus"] | own
    names = {_plain(alias): gpus[name] for name in gpus for alias in (name, *entries[name].get("aka", ()))}
    return gpus, instances, names


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
            watts=float(entry.get("watts", 0)),
        )
    except (TypeError, ValueError) as error:
        raise HardwareError(f"{file}: the GPU {name} has something that is not a number: {error}") from error


def _read_instance(name: str, provider: str, entry: dict[str, Any], offers: dict[str, Any]) -> Instance:
    return Instance(
        name=name,
        provider=provider,
        gpu=entry["gpu"],
        gpus=int(entry["gpus"]),
        cpus=int(entry["cpus"]),
        memory_bytes=int(entry["memory"]) * 2**30,
        link_across=float(entry["network"]) * 1e9 / 8,
        price_per_hour=float(entry["price"]),
        cards=int(entry.get("cards", 0)),
        date=str(offers["date"]),
    )


def _plain(name: str) -> str:
    return _NOISE.sub("", name.lower())
