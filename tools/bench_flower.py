"""What a round of real SuperNodes costs, with a process of the site's own and without.

    python tools/bench_flower.py                          # both, 8 rounds each
    python tools/bench_flower.py --resident --rounds 20   # only with it

A SuperLink and three SuperNodes with TLS and authentication on this machine, as the template's README starts them. The
table is of what the server's log says of every round but the first (in which the processes start).
"""

from __future__ import annotations

import argparse
import re
import tempfile
from pathlib import Path
from statistics import median

from common import grid
from flower_deployment import SECONDS, deployment

from flsv.cli import main as flsv

LINE = re.compile(r"flsv: round \d+: \d of 3 sites in ([\d.]+) s\.")


def measured(folder: Path, resident: bool, rounds: int) -> list[float]:
    """Of every round the server's seconds for the exchange."""
    flsv(["init", "--flower", str(folder)])
    federation, site = folder / "fedapp/federation.py", folder / "fedapp/site.py"
    federation.write_text(federation.read_text().replace("rounds=3", f"rounds={rounds}"))
    if not resident:
        site.write_text(site.read_text().replace('client")', 'client", idle=0)'))
    status = folder / "runs/status.json"
    with deployment(folder) as processes:
        processes.run()
        processes.wait_for("run", lambda _: status.is_file() and "finished" in status.read_text(), SECONDS)
        # The log comes through the SuperLink, some seconds later.
        processes.wait_for("run", lambda log: len(LINE.findall(log)) == rounds, 60)
    return [float(seconds) for seconds in LINE.findall((folder / "run.log").read_text())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--resident", action=argparse.BooleanOptionalAction, help="only with it, or only without")
    given = parser.parse_args()
    rows = [["process that trains", "first round", "median", "slowest"]]
    for resident in (False, True) if given.resident is None else (given.resident,):
        with tempfile.TemporaryDirectory() as place:
            first, *later = measured(Path(place) / "app", resident, given.rounds)
        name = "the site's own" if resident else "one for each message (`idle=0`)"
        rows.append([name, *(f"{seconds:.1f}" for seconds in (first, median(later), max(later)))])
    print(grid(rows))


if __name__ == "__main__":
    main()
