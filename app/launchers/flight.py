"""torch's flight recorder: the last collectives of a process, with their sizes and where they were called from.

When a run hangs, what each rank did last tells which of them took another turn. torch keeps it in a ring of memory;
NCCL and gloo both write to it (seen with gloo in torch 2.13).
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os

ENTRIES = 500
SIZE = "TORCH_FR_BUFFER_SIZE"
DUMPS = ("_dump_nccl_trace_json", "_dump_fr_trace_json")  # the first is there where torch was built with NCCL


def switch_on() -> None:
    """Records from the first process group on; to be called before it is made. Whoever has set a size keeps it."""
    os.environ.setdefault(SIZE, str(ENTRIES))


def record() -> str:
    """This process's record as JSON, in torch's own words; "" where there is none."""
    found: dict[str, object] = {}
    with contextlib.suppress(ImportError):
        torch_c10d = importlib.import_module("torch._C._distributed_c10d")
        for name in DUMPS:
            dump = getattr(torch_c10d, name, None)
            with contextlib.suppress(RuntimeError, ValueError):
                if dump is not None and (said := json.loads(dump())).get("entries"):
                    found |= said
    return json.dumps(found, indent=1) if found else ""
