"""What something costs, in ratios to what it is compared with: the cases of ``cost_cases.py``.

    python tools/costs.py --list
    python tools/costs.py round ordinary/lenet10 --repeats 5 --csv FILE
    python tools/costs.py ordinary --against OTHER_CHECKOUT

A case has programs by name; the first one is what the others are compared with. Each runs in a process of its own with
one torch thread, in turns, and the least of the repetitions counts: seconds of the processor (those of its child
processes, too) and of the clock, without imports, the median round of a fit but for the first one, the peak memory, and
the processor seconds of each part of a fit. In parentheses stands the ratio to the first program of this checkout.
Another checkout of flsv is measured in turns with this one, by the same programs.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from pkgutil import resolve_name

import pandas as pd

#: Parts of a fit, and the functions whose processor seconds they are. What a checkout does not have is left out.
PARTS = {
    "coalitions": "flsv.retraining.one_by_one.train_missing",
    "repetition": "flsv.retraining.after_the_run.TrainingAfterTheRun._compare_with_run",
    "estimates": "flsv.metrics.shadow.ShadowShapley.complete",
}
CHECKOUT = Path(__file__).parents[1]
#: What a program may return beside nothing: numbers by the names of their columns.
Program = Callable[[], dict[str, float] | None]


def processor_seconds() -> float:
    """Return the processor seconds of this process and of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def time_part(path: str, part: str, seconds: Counter[str]) -> None:
    """Let the processor seconds of a function count for a part from now on, if the checkout has this function."""
    owner_path, _, name = path.rpartition(".")
    try:
        owner = resolve_name(owner_path)
        function = getattr(owner, name)
    except (ImportError, AttributeError):
        return

    @wraps(function)
    def timed(*args, **kwargs):
        start = processor_seconds()
        try:
            return function(*args, **kwargs)
        finally:
            seconds[part] += processor_seconds() - start

    setattr(owner, name, timed)


def measure(program: Program) -> dict[str, float]:
    """Run a program in this process, and return its numbers by column."""
    seconds_of_parts: Counter[str] = Counter()
    for part, path in PARTS.items():
        time_part(path, part, seconds_of_parts)

    processor_start = processor_seconds()
    clock_start = time.perf_counter()
    numbers = program() or {}
    return {
        "processor_s": processor_seconds() - processor_start,
        "clock_s": time.perf_counter() - clock_start,
        "memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        **numbers,
        **seconds_of_parts,
    }


def measure_in_process(
    case: str, program: str, accelerator: str, checkout: Path
) -> dict[str, float]:
    """Return the numbers of a program with the code of a checkout, from a process of its own."""
    command = [sys.executable, __file__, case, "--only", program, "--accelerator", accelerator]
    options = {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment = {**os.environ, **options}
    # As for users, only the first repetition compiles what it imports.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        subprocess.run(
            [*command, "--result", result],
            cwd=folder,
            env=environment,
            check=True,
            stdout=subprocess.DEVNULL,
        )
        return json.loads(result.read_text(encoding="utf-8"))


def measure_case(
    case: str,
    programs: Sequence[str],
    checkouts: Sequence[Path],
    accelerator: str,
    repeats: int,
) -> pd.DataFrame:
    """Return a row for each program and checkout, of the repetition that took the fewest processor seconds."""
    trials = []
    for _ in range(repeats):
        for program in programs:
            for checkout in checkouts:
                numbers = measure_in_process(case, program, accelerator, checkout)
                trials.append({"program": program, "checkout": checkout.name, **numbers})
    table = pd.DataFrame(trials).sort_values("processor_s")
    best_trials = table.groupby(["program", "checkout"], sort=False).head(1)
    # In the order of the programs, whichever repetition was the best one.
    num_in_turn = len(programs) * len(checkouts)
    best_trials = best_trials.sort_index(key=lambda trial: trial % num_in_turn)
    best_trials.insert(0, "case", case)
    return best_trials.reset_index(drop=True)


def with_ratios(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table as text, each number with its ratio to that of the first row."""
    text = table.astype(object)
    for column in table.select_dtypes("number"):
        first_number = table[column].iloc[0]
        for row, number in table[column].items():
            ratio = f" ({number / first_number:.2f})" if first_number > 0 else ""
            text.loc[row, column] = f"{number:.3g}{ratio}".replace("nan", "-")
    return text.drop(columns="case")


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="names, or what they begin with")
    parser.add_argument("--list", action="store_true", help="print the cases and their programs")
    parser.add_argument("--only", nargs="+", metavar="PROGRAM", help="of the programs these")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--accelerator", default="cpu")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout")
    parser.add_argument("--csv", type=Path, help="file for the numbers")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()

    import cost_cases  # imports the checkout's flsv

    cases = {
        name: programs
        for name, programs in cost_cases.cases(options.accelerator).items()
        if not options.cases or name.split("/")[0] in options.cases or name in options.cases
    }
    if options.list or not options.cases:
        for name, programs in cases.items():
            print(f"{name}: {', '.join(programs)}")
        return
    if options.result:
        (program,) = options.only
        cost_cases.be_quiet()
        numbers = measure(cases[options.cases[0]][program])
        if os.environ.get("LOCAL_RANK", "0") == "0":
            options.result.write_text(json.dumps(numbers), encoding="utf-8")
        return

    checkouts = [CHECKOUT, *([options.against.absolute()] if options.against else [])]
    tables = []
    for name, programs in cases.items():
        chosen = [program for program in programs if not options.only or program in options.only]
        table = measure_case(name, chosen, checkouts, options.accelerator, options.repeats)
        print(f"{name}\n\n{with_ratios(table).to_string(index=False)}\n", flush=True)
        tables.append(table)
    if options.csv:
        pd.concat(tables).round(4).to_csv(options.csv, index=False)


if __name__ == "__main__":
    main()
