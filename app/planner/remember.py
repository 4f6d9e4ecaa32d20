"""What was read of a model, kept between commands in the cache (app/data/files.py).

The name of a file there is a hash of all that the reading depends on; its content begins with its own hash. What is
damaged, or cannot be kept, is read anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from app.data.files import cached
from app.tasks.by_value import KNOWN

KEPT = 100
"""Files, the newest."""
HASH = 32  # bytes
PARTS = ("app", "strategies")


def identity(name: str, task_args: Any) -> str:
    """Which task with which arguments, in which source and versions: of Trireme, of what is installed, and of the
    modules and files that are the person's own, by size and time. "" for a notebook's, which has no source."""
    if name in KNOWN:
        return ""
    files = [path for part in PARTS for path in sorted(Path(sys.modules[part].__path__[0]).rglob("*.py"))]
    files += sorted(_own_modules())
    for word in _words(task_args):
        path = Path(word).expanduser()
        with contextlib.suppress(OSError, ValueError):
            files += [path, *sorted(path.iterdir())] if path.is_dir() else [path] if path.exists() else []
    installed = [Path(sysconfig.get_path("purelib")), Path(sysconfig.get_path("platlib"))]
    stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in [*installed, *files]]
    return repr((torch.__version__, sys.version, name, task_args, stats))


def _own_modules() -> Iterator[Path]:
    """Files of loaded modules that are neither Trireme's nor installed."""
    others = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    others += [str(Path(sys.modules["app"].__path__[0]).parent), "/usr/lib"]
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and not file.startswith(tuple(others)) and os.path.exists(file):
            yield Path(file)


def _words(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    elif isinstance(tree, dict):
        for key, value in tree.items():
            yield from (*_words(key), *_words(value))
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from _words(value)


def remembered(key: str, read: Callable[[], Any]) -> Any:
    """What `read()`, data that JSON can hold, gave when it was asked for with this key, else gives now; always now with
    ""."""
    if not key:
        return read()
    name, made = f"reading-{hashlib.sha256(key.encode()).hexdigest()[:32]}.json", list[Any]()

    def make(path: Path) -> None:
        made.append(read())
        content = json.dumps(made[0]).encode()
        path.write_bytes(hashlib.sha256(content).digest() + content)

    with contextlib.suppress(OSError):
        path = cached(name, make)
        content = path.read_bytes()
        if not made and hashlib.sha256(content[HASH:]).digest() == content[:HASH]:
            return json.loads(content[HASH:])
        if not made:
            path.unlink()
            cached(name, make)
        for old in sorted(path.parent.glob("reading-*.json"), key=os.path.getmtime)[:-KEPT]:
            old.unlink()
    return made[0] if made else read()
