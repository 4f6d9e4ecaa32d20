"""`python -m experiments.benchmarks step start`: runs the benchmarks named and prints their tables."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from typing import Any

import click


@click.command()
@click.argument("names", nargs=-1, required=True, type=click.Choice(["step", "start"]))
@click.option("--model", "models", multiple=True, type=click.Choice(["mnist", "gpt"]), help="Default: both.")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    type=click.Choice(["single", "dp", "model_parallel", "ddp", "zero1", "zero2", "fsdp", "hsdp", "tensor"]),
    help="Default: ddp. All but ddp for gpt only.",
)
@click.option("--blocks", default=40, show_default=True, help="Blocks of steps per side.")
@click.option("--rounds", default=5, show_default=True, help="Rounds of whole programs.")
@click.option("--json", "as_json", is_flag=True)
def main(
    names: tuple[str, ...],
    models: tuple[str, ...],
    strategies: tuple[str, ...],
    blocks: int,
    rounds: int,
    as_json: bool,
) -> None:
    """Trireme beside hand-written PyTorch, interleaved in one run."""
    from experiments.benchmarks import start, step

    results: dict[str, Any] = {"machine": machine()}
    if "step" in names:
        results["step"] = step.run(list(models) or ["mnist", "gpt"], list(strategies) or ["ddp"], blocks)
    if "start" in names:
        results["start"] = start.run(rounds)
    click.echo(json.dumps(results) if as_json else table(results))


def machine() -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "ray", "mlflow"))
    return f"{os.cpu_count()} cores, Python {platform.python_version()}, {versions}"


def table(results: dict[str, Any]) -> str:
    """The results as Markdown."""
    lines = [results["machine"], ""]
    if "step" in results:
        lines += ["| step | by hand, ms | Trireme, ms | ratio | 95 % interval |", "|---|---|---|---|---|"]
        for name, r in results["step"].items():
            low, high = r["interval"]
            lines.append(
                f"| {name} | {r['plain_ms']:.2f} | {r['ours_ms']:.2f} | {r['ratio']:.3f} | {low:.3f} to {high:.3f} |"
            )
        lines.append("")
    if "start" in results:
        base = results["start"]["torchrun, by hand"]["median_s"]
        lines += ["| command to first step | median, s | ratio |", "|---|---|---|"]
        for name, r in results["start"].items():
            lines.append(f"| {name} | {r['median_s']:.1f} | {r['median_s'] / base:.2f} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
