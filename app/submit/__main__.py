"""What a submitted job runs on the cluster: looks at the versions, takes its secrets, and trains.

python -m app.submit train experiments/gpt.yaml …
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from app.submit.secrets import take
from app.submit.versions import differences, here, told


def main() -> None:
    mine = here()
    if "ray" not in mine:
        print(
            f"trireme: the cluster's `python` ({sys.executable}) has no Ray: put the Python that Ray runs in first "
            "on the PATH before `ray start` on the head",
            flush=True,
        )
        sys.exit(2)
    for sentence in differences(told(), mine):
        print(f"note: {sentence}", flush=True)
    take(Path(os.environ.get("TRIREME_SECRETS", "")))
    from app.cli import main as cli

    sys.argv = ["trireme", *sys.argv[1:]]
    cli()


if __name__ == "__main__":
    main()
