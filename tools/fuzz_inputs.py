"""Two hundred inputs that people or mishaps could hand to flsv: does each end in a clear error or in the right result?

    python tools/fuzz_inputs.py
    python tools/fuzz_inputs.py --only csv checkpoint --workers 1

Every input says what has to become of it. ``same``: it gives what its ordinary form gives, to the bit. ``refused``: it
ends in exit status 1 or 2 or in a ConfigurationError, with a message of a few lines. ``either`` of these. ``taken``: it
is an input of its own right; ``warned``: that, with a warning. All else is a fault: a traceback, another result, no end
within a minute.
The inputs are in ``fuzz_options.py``, ``fuzz_data.py`` and ``fuzz_runs.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from common import grid

#: Where the inputs are.
MODULES = ["fuzz_options", "fuzz_data", "fuzz_runs"]
SECONDS = 60.0
#: A message is a few sentences; usage and a line of Lightning's may stand before it.
LONGEST = 25
# The process that the others are forked from has no other way to learn where to import from.
os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(MODULES)


def cases() -> dict[str, Any]:
    """All inputs, by name."""
    for name in MODULES:
        importlib.import_module(name)
    return importlib.import_module("fuzz_cases").CASES


def outcome(name: str, folder: str, pipe: Any) -> None:
    """In a process of its own: what becomes of a case, as ``(kind, text)``; kind is ended, warned, refused or
    fault."""
    import torch

    from flsv.errors import ConfigurationError

    torch.set_num_threads(1)
    logging.getLogger("lightning.fabric").setLevel(logging.ERROR)
    os.chdir(folder)
    sys.path.insert(0, folder)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    said = io.StringIO()
    try:
        with (
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            result = cases()[name].run(Path(folder))
        pipe.send(("warned" if warned else "ended", str(result)))
    except ConfigurationError as error:
        pipe.send(("refused", str(error)))
    except SystemExit as error:
        text = said.getvalue()
        kind = "refused" if error.code in (1, 2) and "Traceback" not in text else "fault"
        pipe.send((kind, f"exit {error.code}: {text}"))
    except BaseException:
        pipe.send(("fault", traceback.format_exc()))


def run(name: str, below: Path) -> tuple[str, str]:
    """The case's :func:`outcome`, and ``fault`` where it does not come."""
    folder = below / name.replace("/", "_").replace(" ", "_")[:100]
    folder.mkdir(parents=True)
    mine, other = _context.Pipe(duplex=False)
    process = _context.Process(target=outcome, args=(name, str(folder), other))
    process.start()
    other.close()
    try:
        if not mine.poll(SECONDS):
            return "fault", f"no end within {SECONDS:.0f} s"
        return mine.recv()
    except EOFError:
        return "fault", "the process died"
    finally:
        process.kill()
        process.join()


def judged(kind: str, text: str, expected: str, ordinary: str, names: str) -> str:
    """What is wrong with an outcome; nothing where nothing is.

    Args:
        kind, text: of :func:`outcome`.
        expected: as above.
        ordinary: what the ordinary form gives.
        names: a word that an error has to have.
    """
    if kind == "fault":
        return " | ".join(text.strip().splitlines()[-3:])
    if kind in ("ended", "warned"):
        if expected in ("taken", kind):
            return ""
        if expected == "refused":
            return f"was taken: {text[:200]}"
        return "" if text == ordinary else f"gave {text[:200]} where the ordinary form gives {ordinary[:200]}"
    if expected == "same":
        return f"was refused: {text[-600:]}"
    if len(text.strip().splitlines()) > LONGEST:
        return f"an error of {len(text.splitlines())} lines: {text[-600:]}"
    return "" if names.lower() in text.lower() else f"an error that does not name {names!r}: {text[-600:]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="kinds, or names of single inputs")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--list", action="store_true", help="print what every input ends in")
    options = parser.parse_args()
    known = cases()
    asked = [n for n, case in known.items() if not options.only or n in options.only or case.kind in options.only]
    ordinary = {known[name].ordinary for name in asked}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.workers) as pool:
        needed = [*dict.fromkeys([*sorted(ordinary), *asked])]
        ended = dict(zip(needed, pool.map(lambda name: run(name, Path(folder)), needed)))
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    faults = []
    for name in asked:
        case, (kind, text) = known[name], ended[name]
        wrong = judged(kind, text, case.expected, ended[case.ordinary][1], case.names)
        counts[case.kind]["fault" if wrong else "clear error" if kind == "refused" else "right result"] += 1
        faults += [f"{name}: {wrong}"] if wrong else []
        if options.list:
            print(f"{name}: {kind}: {text.strip().splitlines()[-1][:300] if text.strip() else ''}", file=sys.stderr)
    columns = ("clear error", "right result", "fault")
    rows = [[kind, str(sum(found.values())), *(str(found[c]) for c in columns)] for kind, found in counts.items()]
    total = sum(counts.values(), Counter())
    rows.append(["all", str(sum(total.values())), *(str(total[column]) for column in columns)])
    print(grid([["inputs", "tried", *columns], *rows]))
    print("\n".join(faults))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
