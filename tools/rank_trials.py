"""Federations on one, two and three ranks, and what becomes of them when a rank is killed.

    python tools/rank_trials.py [--configs] [--kills] [--questions]

``--configs``: every file of ``configs/`` that is a federation, on the quickstart's digits (3 rounds): last checkpoints
(without paths and batch counters) and ``contributions.csv`` of two and three ranks against one process. ``--kills``:
three ranks, each of which is killed (SIGKILL) in turn at every place of a round; after how many seconds the others have
ended, whether they have named it, and whether the run, resumed on one, two and three ranks, ends as if nothing had
been. ``--questions``: every game and every question by a value that the module logs, each in a federation of its own of
three and of five clients, on two, three and five ranks against one process.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/engines")]

from common import grid  # noqa: E402
from rank_processes import Group  # noqa: E402
from same_runs import differences  # noqa: E402

#: Not a federation of its own: other data, or too large for a trial.
LEFT_OUT = ("cifar10_resnet34", "fashion_mnist", "quickstart", "value")
PLACES = ("first batch", "last batch", "update", "aggregate", "validation", "checkpoint")


def configs(folder: Path) -> None:
    """Print a table of all configurations."""
    rows = [["configuration", "two ranks", "three ranks"]]
    for path in sorted((ROOT / "configs").glob("*.yaml")):
        if path.stem in LEFT_OUT:
            continue
        said = []
        groups = {
            size: Group("from_config", [str(path), str(folder / path.stem / str(size))], size, folder / f"o{size}")
            for size in (1, 2, 3)
        }
        ended = {size: group.wait(120) for size, group in groups.items()}
        for size in (2, 3):
            codes = [rank.code for rank in (*ended[1], *ended[size])]
            if any(codes):
                failed = next(rank for rank in (*ended[1], *ended[size]) if rank.code)
                said.append(f"failed: {failed.output.strip().splitlines()[-1][:200] if failed.output else codes}")
                continue
            found = differences(folder / path.stem / "1", folder / path.stem / str(size))
            said.append("equal to the bit" if not found else f"{len(found)} differ: {found[0][:80]}")
        rows.append([path.stem, *said])
        print(rows[-1], file=sys.stderr, flush=True)
    print(grid(rows))


def kills(folder: Path) -> None:
    """Print a table of all trials."""
    name = "kept_momentum"
    whole = folder / "whole"
    Group("run_all", [str(whole), [name]], 1, folder / "output").wait(120)
    rows = [["killed", "at", "others ended after", "named", "resumed on 1, 2, 3 ranks"]]
    for place in PLACES:
        for rank in range(3):
            run = folder / place.replace(" ", "_") / str(rank)
            ended = Group("run_and_die", [str(run / "run"), name, rank, place], 3, run / "output").wait(60)
            others = [end for r, end in enumerate(ended) if r != rank]
            seconds = max(end.seconds for end in others)
            named = all(f"rank {rank} is gone" in end.output for end in others)
            codes = all(end.code == 1 for end in others) and ended[rank].code == -9
            said = []
            for size in (1, 2, 3):
                again = run / f"again{size}"
                shutil.copytree(run / "run", again)
                done = Group("run_and_die", [str(again), name, rank, place], size, run / f"output{size}").wait(60)
                same = not any(end.code for end in done) and not differences(whole / name, again)
                said.append("equal" if same else "differs")
            rows.append([f"rank {rank}", place, f"{seconds:.1f} s", str(named and codes), ", ".join(said)])
            print(rows[-1], file=sys.stderr, flush=True)
    print(grid(rows))


def questions(folder: Path) -> None:
    """Print a table of all games and questions by a logged value."""
    sizes = (2, 3, 5)
    rows = [["question", "clients", *(f"{size} ranks" for size in sizes)]]
    for clients in (3, 5):
        for size in (1, *sizes):
            group = Group("run_questions", [str(folder / f"{clients}/{size}"), clients], size, folder / f"output{size}")
            ended = group.wait(300)
            if any(rank.code for rank in ended):
                raise SystemExit(ended[0].output[-3000:])
        for one in sorted((folder / f"{clients}/1").iterdir()):
            found = [differences(one, folder / f"{clients}/{size}" / one.name) for size in sizes]
            rows.append([one.name, str(clients), *("differs" if each else "equal to the bit" for each in found)])
    print(grid(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", action="store_true")
    parser.add_argument("--kills", action="store_true")
    parser.add_argument("--questions", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.configs:
            configs(Path(folder) / "configs")
        if options.kills:
            kills(Path(folder) / "kills")
        if options.questions:
            questions(Path(folder) / "questions")


if __name__ == "__main__":
    main()
