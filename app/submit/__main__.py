"""Runs on the cluster as a submitted job: reads its secrets, and trains.

python -m app.submit train experiments/gpt.yaml …
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    if importlib.util.find_spec("ray") is None:
        sys.exit(
            f"trireme: the cluster's `python` ({sys.executable}) has no Ray: put the Python that "
            "Ray runs in first on the PATH before `ray start` on the head"
        )
    secrets_file = os.environ.pop("TRIREME_SECRETS", "")
    if secrets_file:
        os.environ.update(json.loads(Path(secrets_file).read_text()))
        Path(secrets_file).unlink()
    runpy.run_module("app", run_name="__main__", alter_sys=True)  # the rest is `python -m app`
