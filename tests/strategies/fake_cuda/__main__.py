"""`python -m tests.strategies.fake_cuda [WORD …]`: the table of the cases that have all these words in their names.

`serve` as the only word: reads a case's number from each line of its input and answers with its problems as JSON.
"""

import gc
import importlib
import json
import os
import sys
from collections import Counter

from tests.strategies.fake_cuda import device


def main(words: list[str]) -> int:
    device.install(8)
    importlib.import_module("torch._dynamo")  # what every case would import by itself otherwise

    from tests.strategies.fake_cuda import cases, forks

    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the cases print is not part of the answer
    known: dict[str, list[float]] = {}
    gc.disable()
    gc.freeze()  # a collection in a fork would copy every page that it looks at

    def tried(case: cases.Case) -> tuple[dict, list[str]]:
        truth: list[float] = []
        for name in case.imports:
            importlib.import_module(name)
        if case.truth is not None:
            key = str(case.truth.work)
            if key not in known:
                alone = forks.run(case.truth.work, 1)["ranks"][0]
                if "error" in alone:
                    return {"seconds": 0.0, "ranks": [alone]}, [f"on a CPU: {alone['error']}"]
                known[key] = alone["numbers"]
            truth = known[key]
        ran = forks.run(case.work, case.workers)
        return ran, cases.problems(case, ran, truth)

    if words == ["serve"]:
        for line in sys.stdin:
            print(json.dumps(tried([*cases.CASES, *cases.FAULTY][int(line)])[1]), file=out, flush=True)
        return 0
    wrong, total = 0, 0.0
    for case in [case for case in cases.CASES if all(word in case.name for word in words)]:
        ran, found = tried(case)
        total, wrong = total + ran["seconds"], wrong + bool(found)
        waits = Counter(where for rank in ran["ranks"] for _, where in [*rank.get("first", ()), *rank.get("waits", ())])
        told = ", ".join(f"{where} × {count}" for where, count in waits.items())
        verdict = "WRONG" if found else "ok"
        print(f"{case.name:<72} {case.workers} {ran['seconds']:5.1f} s  {verdict:<6}{told}", file=out, flush=True)
        for problem in found:
            print(f"    {problem}", file=out)
    for name, why in cases.CANNOT.items():
        print(f"{name:<72} not tried: {why}", file=out)
    print(f"{total:.0f} s of CPU, {wrong} wrong", file=out)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
