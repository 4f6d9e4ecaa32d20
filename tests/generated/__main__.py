"""Compares every strategy with one device on models drawn at random, and prints a table.

    python -m tests.generated --models 2000 --seed 1

Each mistake is shown once, with the shortest model that fails in the same way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.generated.compare import (
    RIVALS,
    WIDE,
    Comparison,
    Invalid,
    Kind,
    Rival,
    Verdict,
    drawn,
    shrunk,
)
from tests.generated.grammar import Model
from tests.pool import close


@dataclass
class Mistake:
    """One way to fail: the smallest model that shows it, and the strategies that fail so."""

    model: Model
    verdict: Verdict
    rivals: list[str]
    seeds: list[int] = field(default_factory=list)


@dataclass
class Survey:
    """The verdicts on many models.

    Attributes:
        counts: Verdicts by rival and kind.
        features: Verdicts by unusual choice and kind.
        mistakes: The different mistakes.
        models: The number of models that one device trains.
        invalid: The error of each model that one device does not train, by seed.
    """

    counts: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    features: Counter[tuple[str, Kind]] = field(default_factory=Counter)
    mistakes: list[Mistake] = field(default_factory=list)
    models: int = 0
    invalid: dict[int, str] = field(default_factory=dict)

    def look_at(
        self, seed: int, rivals: tuple[Rival, ...], extra: int, shrink: bool = True
    ) -> list[Verdict]:
        """Compares the model of this seed with some rivals, and returns their verdicts."""
        model = Model.draw(seed)
        chosen = drawn(seed, rivals, extra)
        try:
            verdicts = Comparison(model).verdicts(chosen)
        except Invalid as error:
            self.invalid[seed] = f"{model}: {error}"
            return []
        self.models += 1
        for rival in chosen:
            verdict = verdicts.get(rival.name)
            if verdict is None:
                continue
            self.counts[rival.name, verdict.kind] += 1
            for name in model.unusual:
                self.features[name, verdict.kind] += 1
            if verdict.kind is Kind.WRONG and not self._is_known(seed, model, rival, verdict):
                small = shrunk(model, rival, verdict.signature) if shrink else (model, verdict)
                self._note(seed, small, rival)
        return list(verdicts.values())

    def _is_known(self, seed: int, model: Model, rival: Rival, verdict: Verdict) -> bool:
        """Whether a smaller model is known that fails in the same way."""
        for mistake in self.mistakes:
            alike = mistake.verdict.signature == verdict.signature and rival.name in mistake.rivals
            if alike and mistake.model.unusual - {"two_blocks"} <= model.unusual:
                mistake.seeds.append(seed)
                return True
        return False

    def _note(self, seed: int, small: tuple[Model, Verdict], rival: Rival) -> None:
        for mistake in self.mistakes:
            if mistake.model == small[0] and mistake.verdict.signature == small[1].signature:
                mistake.rivals.append(rival.name)
                mistake.seeds.append(seed)
                return
        self.mistakes.append(Mistake(small[0], small[1], [rival.name], [seed]))

    def table(self) -> str:
        """The numbers of verdicts by strategy and by choice."""
        return "\n".join([*_rows("strategy", self.counts), "", *_rows("choice", self.features)])

    def findings(self) -> str:
        """Each mistake with its model, the most frequent one first."""
        parts = []
        for mistake in sorted(self.mistakes, key=lambda mistake: -len(mistake.seeds)):
            head = (
                f"## {mistake.model} under {', '.join(mistake.rivals)}: {len(mistake.seeds)} times"
            )
            first = f"seed {mistake.seeds[0]}: {mistake.verdict.text[:600]}"
            parts.append(f"{head}\n\n{first}\n\n```python\n{mistake.model.source().strip()}\n```")
        return "\n\n".join(parts)


def _rows(title: str, counts: Counter[tuple[str, Kind]]) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in counts))
    rows = [f"{title:<26}" + "".join(f"{kind.value:>9}" for kind in Kind)]
    for name in names:
        rows.append(f"{name:<26}" + "".join(f"{counts[name, kind]:>9}" for kind in Kind))
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.generated", description=__doc__)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the others follow")
    parser.add_argument(
        "--more", type=int, default=3, help="strategies besides the four that every model meets"
    )
    parser.add_argument("--wide", action="store_true", help="also on four ranks")
    parser.add_argument("--no-shrink", action="store_true")
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="after which no further model is started",
    )
    parser.add_argument("--out", type=Path, help="a file for the findings, kept up to date")
    options = parser.parse_args(arguments)
    survey = Survey()
    start = time.monotonic()
    rivals = (*RIVALS, *WIDE) if options.wide else RIVALS
    for seed in range(options.seed, options.seed + options.models):
        if time.monotonic() - start > options.seconds:
            break
        before = len(survey.mistakes)
        verdicts = survey.look_at(seed, rivals, options.more, shrink=not options.no_shrink)
        wrong = sum(verdict.kind is Kind.WRONG for verdict in verdicts)
        if len(survey.mistakes) > before and options.out:
            options.out.write_text(survey.findings())
        print(
            f"{seed}: {len(verdicts)} compared, {wrong} wrong; {Model.draw(seed)}",
            file=sys.stderr,
            flush=True,
        )
    seconds = time.monotonic() - start
    print(survey.table())
    compared = sum(survey.counts.values())
    rate = f"{60 * compared / seconds:.0f} comparisons a minute"
    print(f"\n{survey.models} models, {compared} comparisons in {seconds:.0f} s: {rate}")
    for seed, why in survey.invalid.items():
        print(f"not trained by one device: seed {seed}: {why[:300]}")
    print(survey.findings())
    close()
    return 1 if survey.mistakes else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
