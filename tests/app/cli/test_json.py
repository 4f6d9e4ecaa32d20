"""With --json stdout is one JSON document of documented fields, however the command ends."""

import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest
from click.testing import CliRunner, Result

from app.cli.common import Invocation, verb
from app.cli.fields import fields_of
from app.errors import RunFailed
from app.run import abort
from tests.running import POINTS, ROOT, here, invoke


def strict(text: str) -> Any:
    """The only JSON document in a text; NaN and Infinity are none of JSON's."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def paths(value: Any, path: str = "") -> Iterator[str]:
    """Where in a document values stand that contain no others."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from paths(item, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and value:
        for item in value:
            yield from paths(item, f"{path}[]")
    else:
        yield path


def undocumented(command: str, value: Any) -> set[str]:
    """The fields of a document that `trireme fields` does not name."""
    return unknown_paths(command, paths(value))


def unknown_paths(command: str, names: Iterable[str]) -> set[str]:
    """Those that `trireme fields` does not name."""
    patterns = []
    for documented in fields_of(command):
        pattern = re.escape(documented.removesuffix("[]")).replace(r"\*", r"[^\[\]]*")
        open_end = r".*" if documented.endswith("*") else r"(\[\])?"
        patterns.append(re.compile(pattern + open_end))
    unknown = {name for name in names if not any(p.fullmatch(name) for p in patterns)}
    return {name for name in unknown if not is_empty_container(name, command)}


def is_empty_container(path: str, command: str) -> bool:
    """Whether the fields of what is empty here are documented."""
    return any(name.startswith((f"{path}.", f"{path}[]")) for name in fields_of(command))


@pytest.mark.parametrize(
    ("command", "words", "code"),
    [
        ("config", ["task=tests.tasks:Points"], 0),
        ("runs", ["nowhere"], 2),
        ("watch", ["nowhere"], 2),
        ("cluster list", [], 0),
        ("cluster show", ["aws"], 0),
        ("cluster validate", ["aws", "nowhere"], 2),
        ("fields", ["plan"], 0),
        ("fields", ["plam"], 2),
        ("train", ["task=tests.tasks:Points", "trian.steps=3"], 2),
        ("submit run", [*POINTS, "run.name=x", "--dry-run"], 0),
    ],
)
def test_commands_answer_with_documented_fields(command: str, words: list[str], code: int) -> None:
    result = invoke(*command.split(), *words, "--json", code=code)
    answer = strict(result.stdout)
    assert not undocumented(command, answer)
    assert answer.get("exit_code", 0) == code and bool(answer.get("error")) == bool(code)


def test_a_plan_says_why_and_what_to_write(tmp_path: Path) -> None:
    words = ["task=tests.tasks:Points", "train.global_batch_size=16", "run.name=best"]
    machine = ["--gpus", "2", "--gpu", "a100-80gb"]
    best = tmp_path / "best.yaml"
    plan = strict(invoke("plan", *words, *machine, "--json", "--write", best).stdout)
    assert not undocumented("plan", plan)
    chosen = plan["chosen"]
    assert chosen["reason"].startswith("the best, ") and chosen["strategy"] not in plan["rejected"]
    assert all(plan["rejected"].values()) and "fsdp" in plan["rejected"]
    written = strict(invoke("config", best, "--json").stdout)
    assert strict(invoke("config", *words, *chosen["keys"], "--json").stdout) == written


def test_a_trained_run_is_asked_in_json(tmp_path: Path) -> None:
    """tests/app/launchers/test_resume.py has all that a program of its own writes to stdout."""
    words = [*POINTS, "train.steps=4", "launcher=local", f"run.storage={tmp_path}", "run.name=run"]
    ended = invoke("train", *words, "--json")
    outcome = strict(ended.stdout)
    assert not undocumented("train", outcome) and outcome["summary"]["step"] == 4
    assert "step 4/4" in ended.stderr, "messages are on stderr"
    asked = {
        "runs": [tmp_path],
        "watch": [tmp_path / "run"],
        "export": [tmp_path / "run", "--to", "torch"],
        "sync": [tmp_path / "run"],
        "compare": [tmp_path / "run", tmp_path / "run"],
    }
    answers = {}
    for command, arguments in asked.items():
        answers[command] = strict(invoke(command, *arguments, "--json").stdout)
        assert not undocumented(command, answers[command]), command
    assert answers["runs"]["runs"][0] == answers["watch"]
    assert answers["watch"]["updated_unix_seconds"] > 1e9 and answers["export"]["size_bytes"] > 0


def test_agents_read_a_page_of_commands_that_answer_in_json() -> None:
    """tests/test_documents.py parses the commands."""
    page = (ROOT / "AGENTS.md").read_text()
    assert page.count("\n") <= 60
    commands = [line.partition("#")[0] for line in page.splitlines() if line.startswith("trireme")]
    assert len(commands) >= 8 and all("--json" in command for command in commands)
    named = re.findall(r"`(layouts\[0\]\.\w+|chosen\.\w+|chosen|rejected|remedies)`", page)
    assert len(named) > 4
    assert not unknown_paths("plan", [name.replace("[0]", "[]") for name in named])


# --- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [["plan", "--bad", "--json"], ["plam", "--json"], ["export", "--json"], ["--json", "--bad"]],
)
def test_words_that_are_not_understood_are_told_in_json_too(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = here(monkeypatch, capsys, *words)
    answer = strict(ended.out)
    assert answer["status"] == "refused" and answer["exit_code"] == ended.code == 2
    assert ended.err == f"trireme: {answer['error']}\n"


def ending(*options: str, answer: Any = None, error: BaseException | None = None) -> Result:
    """How a command ends that gives an answer and then raises."""

    @verb("end", group=click)
    def end(cli: Invocation) -> None:
        if answer is not None:
            cli.answer(answer, "for a person")
        if error is not None:
            raise error

    return CliRunner().invoke(end, list(options))


def test_an_error_after_the_answer_is_in_the_same_document() -> None:
    result = ending("--json", answer={"rows": [1]}, error=RunFailed("one differs"))
    expected = {"status": "failed", "rows": [1], "error": "one differs", "exit_code": 1}
    assert strict(result.stdout) == expected and result.stderr == "trireme: one differs\n"
    assert ending(answer={"rows": [1]}).stdout == "for a person\n"


def test_a_stop_and_a_traceback_keep_code_and_document() -> None:
    stopped = ending("--json", error=KeyboardInterrupt())
    assert stopped.exit_code == strict(stopped.stdout)["exit_code"] == 130
    traced = ending("--json", "--traceback", error=RunFailed("it broke"))
    assert traced.exit_code == strict(traced.stdout)["exit_code"] == 1
    assert "Traceback" in traced.stderr


def test_other_ranks_print_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert ending("--json", answer={"rows": []}).stdout == ""


def test_a_process_that_is_ended_at_once_has_printed_its_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @verb("end", group=click)
    def end(cli: Invocation) -> None:
        abort.abort(1, "trireme: the lease is lost")

    def leave(exit_code: int) -> NoReturn:
        raise SystemExit(exit_code)

    monkeypatch.setattr(abort.os, "_exit", leave)
    monkeypatch.setattr(abort, "_first_to_abort", abort.threading.Lock())
    with pytest.raises(SystemExit):
        end.main(["--json"], standalone_mode=False)
    answer = strict(capsys.readouterr().out)
    assert answer == {"status": "failed", "error": "the lease is lost", "exit_code": 1}
