"""What a sweep and a scaling study have in common: a folder of their own, and an MLflow run that ends as they do."""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from app.config import Config
from app.config.io import flatten, to_dict, to_yaml
from app.console.masking import mask_tree
from app.console.terminal import Console
from app.errors import Interrupted, UserError
from app.run.manifest import run_folder
from app.storage.storage import Storage
from app.tracking.settings import resolve_tracking, ui_command
from app.tracking.spool import take_lock
from app.tracking.tracker import Tracker


@contextlib.contextmanager
def own_folder(config: Config, name: str, kind: str, console: Console, *, verbose: bool) -> Iterator[Path]:
    """The folder `name` in run.storage, held by this process; other output goes into a log there, unless verbose.

    Raises:
        UserError: it cannot be written, or another process works in it.
    """
    storage = run_folder(config, name)
    if not storage.is_local:
        raise UserError(f"run.storage is {config.run.storage}, but a {kind} needs a folder: write a local path or NFS")
    storage.check_writable()
    folder = storage.local_path
    if (folder / "run.json").exists():
        raise UserError(f"{folder} holds a run, not a {kind}: use another name")
    storage.make()
    lock = take_lock(folder, kind)
    if lock is None:
        raise UserError(f"the {kind} in {folder} is in use by another process: wait for it, or use another name")
    try:
        with contextlib.nullcontext() if verbose else console.capture(folder / "logs" / f"{kind}.log"):
            yield folder
    finally:
        os.close(lock)


def open_head(folder: Path, kind: str, name: str, about: Mapping[str, Any]) -> dict[str, Any]:
    """What FOLDER/KIND.json holds: "name", "uid" (of its MLflow run), "created", "about", and what was found so far; a
    new one, not yet written, where there is none.

    about: what makes it itself; another value of any of it is another sweep or study.
    Raises:
        UserError: the file is damaged, or of another one.
    """
    now = json.loads(json.dumps(about, default=str))
    try:
        head = json.loads((folder / f"{kind}.json").read_text())
        before = head["about"]
    except FileNotFoundError:
        return {"name": name, "uid": uuid.uuid4().hex, "created": time.time(), "about": now}
    except (ValueError, KeyError) as error:
        raise UserError(f"{folder}/{kind}.json is damaged ({error}): use another name") from error
    old, new = flatten(before), flatten(now)
    for key in {**old, **new}:
        if old.get(key) != new.get(key):
            raise UserError(
                f"the {kind} {name!r} in {folder} was begun with another {key.removeprefix('experiment.')} "
                f"({old.get(key)!r}, and now {new.get(key)!r}): run it as it was, or use another name"
            )
    return head


def save_head(folder: Path, kind: str, head: Mapping[str, Any]) -> None:
    Storage(folder).write_bytes(f"{kind}.json", json.dumps(head, indent=1).encode())


@contextlib.contextmanager
def tracked(config: Config, folder: Path, head: Mapping[str, Any], kind: str, console: Console) -> Iterator[Tracker]:
    """The MLflow run of what is in `folder`, and at its end the places where a person finds everything.

    head: "name", and "uid", which identifies the MLflow run.
    """
    settings = resolve_tracking(config.tracking, str(folder.parent))
    tracker = Tracker(
        folder / "tracking",
        settings,
        run_name=head["name"],
        run_uid=head["uid"],
        enabled=config.tracking.enabled,
        tags={"trireme.kind": kind, **config.tracking.tags},
        warn=console.say,
    )
    tracker.start()
    tracker.text(to_yaml(mask_tree(to_dict(config))), "config.yaml")
    status, message = "FAILED", ""
    try:
        yield tracker
        status = "FINISHED"
    except (Interrupted, KeyboardInterrupt) as error:
        status, message = "KILLED", str(error) or "stopped at once"
        raise Interrupted(f"{message}: run the same command again to go on") from None
    except BaseException as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        console.status("sending the last metrics to MLflow")
        delivery = tracker.finish(status, message=message, timeout=config.tracking.flush_timeout)
        if not delivery.complete:
            how = f"({delivery.problem}): run the same command again to deliver them"
            console.say(f"note: some metrics have not reached MLflow yet {how}")
    console.say(f"  stored    {folder}")
    console.say(f"  page      {folder / 'report.html'}")
    if config.tracking.enabled:
        console.say(f"  MLflow    {ui_command(settings)}")
