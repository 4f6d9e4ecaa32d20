"""What a sweep and a scaling study share: a folder of their own and an MLflow run."""

import contextlib
import json
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypedDict, cast

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
from app.tracking.trackers import require_trackers


class StudyManifest(TypedDict):
    """What KIND.json in the folder of a sweep or a scaling study holds.

    Attributes:
        name: The name of the folder and of the MLflow run.
        uid: Identifies the MLflow run.
        created: The Unix time of the first start.
        about: What makes it this sweep or study; with another value it is another one.
    """

    name: str
    uid: str
    created: float
    about: dict[str, Any]


@contextlib.contextmanager
def locked_folder(
    config: Config,
    name: str,
    *,
    kind: str,
    console: Console,
    verbose: bool,
) -> Iterator[Path]:
    """The folder of a sweep or a scaling study, locked by this process.

    Args:
        config: The experiment, whose run.storage has the folder.
        name: The folder's name.
        kind: "sweep" or "study".
        console: Writes to the terminal, while all other output goes into a log in the folder.
        verbose: Whether the other output goes to the terminal too.

    Yields:
        The folder.

    Raises:
        UserError: It cannot be written, or another process works in it.
    """
    storage = run_folder(config, name)
    if not storage.is_local:
        problem = f"run.storage is {config.run.storage}, but a {kind} needs a folder"
        raise UserError(f"{problem}: write a local path or NFS")
    storage.check_writable()
    folder = storage.local_path
    if (folder / "run.json").exists():
        raise UserError(f"{folder} holds a run, not a {kind}: use another name")
    storage.make()
    lock = take_lock(folder, kind)
    if lock is None:
        problem = f"the {kind} in {folder} is in use by another process"
        raise UserError(f"{problem}: wait for it, or use another name")
    output: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if not verbose:
        output = console.capture(folder / "logs" / f"{kind}.log")
    try:
        with output:
            yield folder
    finally:
        os.close(lock)


def load_manifest(folder: Path, *, kind: str, name: str, about: Mapping[str, Any]) -> StudyManifest:
    """The manifest in a folder, or a new one, which is not written yet.

    Args:
        folder: The folder of the sweep or study.
        kind: "sweep" or "study".
        name: Its name.
        about: What makes it this sweep or study, as `StudyManifest.about`.

    Returns:
        All that the file holds, which may be more than a StudyManifest.

    Raises:
        UserError: The file is damaged, or that of another sweep or study.
    """
    current = json.loads(json.dumps(about, default=str))
    try:
        manifest = json.loads((folder / f"{kind}.json").read_text())
        stored = manifest["about"]
    except FileNotFoundError:
        return {"name": name, "uid": uuid.uuid4().hex, "created": time.time(), "about": current}
    except (ValueError, KeyError) as error:
        problem = f"{folder}/{kind}.json is damaged ({error})"
        raise UserError(f"{problem}: use another name") from error
    stored_values = flatten(stored)
    current_values = flatten(current)
    for key in {**stored_values, **current_values}:
        before = stored_values.get(key)
        now = current_values.get(key)
        if before != now:
            raise UserError(
                f"the {kind} {name!r} in {folder} was begun with another "
                f"{key.removeprefix('experiment.')} ({before!r}, and now {now!r}): run it as it "
                "was, or use another name"
            )
    return cast(StudyManifest, manifest)


def save_manifest(folder: Path, kind: str, manifest: StudyManifest) -> None:
    """Writes KIND.json in one step.

    Args:
        folder: The folder of the sweep or study.
        kind: "sweep" or "study".
        manifest: What it holds.
    """
    Storage(folder).write_bytes(f"{kind}.json", json.dumps(manifest, indent=1).encode())


@contextlib.contextmanager
def tracked_study(
    config: Config,
    folder: Path,
    manifest: StudyManifest,
    *,
    kind: str,
    console: Console,
) -> Iterator[Tracker]:
    """The MLflow run of a sweep or a scaling study, which ends as the block does.

    At the end the console says where a person finds everything.

    Args:
        config: The experiment.
        folder: The folder of the sweep or study.
        manifest: Has the name and the uid of the MLflow run.
        kind: "sweep" or "study".
        console: Writes to the terminal.

    Raises:
        Interrupted: The block was interrupted; says how to continue.
    """
    require_trackers(config.tracking.also)
    settings = resolve_tracking(config.tracking, str(folder.parent))
    tracker = Tracker(
        folder / "tracking",
        settings,
        run_name=manifest["name"],
        run_uid=manifest["uid"],
        enabled=config.tracking.enabled,
        tags={"trireme.kind": kind, **config.tracking.tags},
        warn=console.say,
    )
    tracker.start()
    tracker.text(to_yaml(mask_tree(to_dict(config))), "config.yaml")
    status = "FAILED"
    message = ""
    try:
        yield tracker
        status = "FINISHED"
    except (Interrupted, KeyboardInterrupt) as error:
        status = "KILLED"
        message = str(error) or "stopped at once"
        raise Interrupted(f"{message}: run the same command again to continue") from None
    except BaseException as error:
        message = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise
    finally:
        console.status("sending the last metrics to MLflow")
        timeout = config.tracking.flush_timeout
        delivery = tracker.finish(status, message=message, timeout=timeout)
        if not delivery.complete:
            problem = f"some metrics have not reached MLflow yet ({delivery.problem})"
            console.say(f"note: {problem}: run the same command again to deliver them")
    console.say(f"  stored    {folder}")
    console.say(f"  page      {folder / 'report.html'}")
    if config.tracking.enabled:
        console.say(f"  MLflow    {ui_command(settings)}")
