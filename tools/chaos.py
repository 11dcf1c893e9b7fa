"""What a deployment on Flower loses when its processes are killed, stopped and lied to. Needs ``flsv[flower]``.

    python tools/chaos.py                                  # all, with real processes: ten minutes
    python tools/chaos.py --only stopped stolen --rounds 3

A SuperLink with TLS and keys and three SuperNodes run the project of ``flsv init --flower``, by its own scripts. Each
trial is a run of the app to which something is done. Then it is compared to a run in one process in which those sites
and rounds are missing that were lost, and nothing else: the last model and all contributions are to be the same to the
bit.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaos_trial import Trial, Wrong, project, wait_until
from common import grid
from flower_deployment import ACCEPTED, SITES, Deployment


@dataclass
class Found:
    """A row of the table.

    Args:
        done: what was done.
        lost: sites and rounds.
        may_be_lost: those of which this is no fault.
        differences: from a run without these.
        said: by the server.
    """

    done: str
    lost: list[tuple[str, int]]
    may_be_lost: Callable[[str, int], bool]
    differences: list[str]
    said: str

    @property
    def wrong(self) -> list[str]:
        """What should not be."""
        return [f"{s} lost round {i}" for s, i in self.lost if not self.may_be_lost(s, i)] + self.differences

    def row(self) -> list[str]:
        lost = ", ".join(f"{site}: round {index}" for site, index in self.lost) or "nothing"
        return [self.done, lost, "no: " + self.differences[0] if self.differences else "yes", self.said]


def _never(site: str, index: int) -> bool:
    return False


Make = Callable[..., Trial]


def undisturbed(make: Make, deployed: Deployment) -> Iterator[Found]:
    trial = make("undisturbed")
    trial.start()
    trial.wait()
    yield Found("nothing", trial.lost(), _never, trial.differences(), "")


def replies(make: Make, deployed: Deployment) -> Iterator[Found]:
    """Sites that answer, and what."""
    wrong = {("Lyon", 1): "garbage", ("Boston", 1): "nan", ("Lyon", 2): "fails", ("Osaka", 2): "late"}
    words = {"garbage": "sends garbage", "nan": "sends a model with a NaN", "fails": "raises an error"}
    words["late"] = "answers after the time of the round"
    trial = make("replies", wrong=wrong)
    trial.start()
    trial.wait()
    expected = {*wrong, ("Osaka", 3)}  # who is late for a round may still be at it in the next
    more = [f"{site} lost round {index}" for site, index in trial.lost() if (site, index) not in expected]
    differences = trial.differences() + more
    for (site, index), what in wrong.items():
        lost = [(s, i) for s, i in trial.lost() if s == site and (i == index or (what == "late" and i > index))]
        said = trial.said("returned a model with NaN") if what == "nan" else trial.incidents(site, index)
        yield Found(f"a site {words[what]}", lost, lambda *_: True, differences, said)


def killed(make: Make, deployed: Deployment) -> Iterator[Found]:
    """SIGKILL to a SuperNode at work, which a supervisor starts again."""
    trial = make("killed", wrong={("Osaka", 1): "waits"})
    trial.start()
    trial.wait_until_busy("Osaka", 1)
    deployed.kill("Osaka")
    trial.go_on()
    deployed.start_site("Osaka", until_accepted=True)
    trial.wait()
    deployed.wait_for("Osaka", lambda log: ACCEPTED in log)
    yield Found(
        "a SuperNode is killed while it trains, and started again",
        *(trial.lost(), lambda site, index: site == "Osaka" and index >= 1, trial.differences()),
        trial.incidents("Osaka"),
    )


def stopped(make: Make, deployed: Deployment) -> Iterator[Found]:
    """SIGSTOP to a SuperNode at work, and SIGCONT in time."""
    trial = make("stopped", wrong={("Osaka", 1): "waits"})
    trial.start()
    trial.wait_until_busy("Osaka", 1)
    deployed.signal("Osaka", signal.SIGSTOP)
    trial.go_on()
    time.sleep(15)
    deployed.signal("Osaka", signal.SIGCONT)
    trial.wait()
    yield Found(
        "a SuperNode is stopped (SIGSTOP) for 15 s while it trains", trial.lost(), _never, trial.differences(), ""
    )


def stolen(make: Make, deployed: Deployment) -> Iterator[Found]:
    """A node with a key of its own says that it is Osaka, in the second round."""
    trial = make("stolen", wrong={("Lyon", 1): "waits"})
    trial.start()
    trial.wait_until_busy("Lyon", 1)
    deployed.start_site("Thief", says="Osaka")
    deployed.wait_for("Thief", lambda log: ACCEPTED in log)
    trial.go_on()
    trial.wait()
    deployed.stop("Thief")
    yield Found(
        "a second SuperNode comes with a key of its own and the name of another",
        *(trial.lost(), _never, trial.differences(), trial.said("left alone")),
    )


def server(make: Make, deployed: Deployment) -> Iterator[Found]:
    """SIGKILL to the server's app within a round."""
    trial = make("server", wrong={("Lyon", 1): "waits"})
    trial.start()
    trial.wait_until_busy("Lyon", 1)
    os.kill(trial.server, signal.SIGKILL)
    trial.go_on()
    trial.wait()
    yield Found(
        "the server's app is killed within a round, and started again",
        *(trial.lost(), _never, trial.differences(), trial.said("started again")),
    )


def link(make: Make, deployed: Deployment) -> Iterator[Found]:
    """SIGKILL to the SuperLink within a round; its database stays."""
    trial = make("link", wrong={("Lyon", 1): "waits"})
    trial.start()
    trial.wait_until_busy("Lyon", 1)
    deployed.kill("link")
    trial.go_on()
    deployed.start_link()
    trial.wait()
    yield Found(
        "the SuperLink is killed within a round, and started again",
        *(trial.lost(), _never, trial.differences(), trial.said("started again")),
    )


def two(make: Make, deployed: Deployment) -> Iterator[Found]:
    """Two servers on the same sites."""
    trials = [make("first"), make("second")]
    for trial in trials:
        trial.start()
        wait_until((trial.folder / "status.json").is_file, f"the begin of {trial.name}", trial.log)
    for trial in trials:
        trial.wait()
    for trial, which in zip(trials, ("one", "the other")):
        done = f"two runs at once on the same sites: {which}"
        yield Found(done, trial.lost(), _never, trial.differences(), "".join(map(trial.incidents, SITES)))


TRIALS = {each.__name__: each for each in (undisturbed, replies, killed, stopped, stolen, server, link, two)}


def run(names: Sequence[str], rounds: int, timeout: float, folder: Path) -> Iterator[Found]:
    """Do all that is named to one deployment.

    Args:
        names: of :data:`TRIALS`.
        rounds: of each run.
        timeout: seconds that a site has for a reply.
        folder: of the project; new.
    """
    with project(folder) as deployed:

        def make(name: str, wrong: Wrong = {}) -> Trial:  # noqa: B006
            return Trial(name, deployed, rounds, timeout, wrong)

        for name in names:
            begin = time.monotonic()
            yield from TRIALS[name](make, deployed)
            print(f"{name}: {time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=TRIALS, default=list(TRIALS), help="default: all")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--timeout", type=float, default=90, help="seconds that a site has for a reply")
    given = parser.parse_args()
    begin = time.monotonic()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that no process of the deployment stays
    print(grid([["what is done", "lost", "all else to the bit", "what the server says"]]), flush=True)
    wrong = []
    with tempfile.TemporaryDirectory() as scratch:
        for found in run(given.only, given.rounds, given.timeout, Path(scratch) / "app"):
            print("| " + " | ".join(found.row()) + " |", flush=True)
            wrong += found.wrong
    print(f"\n{given.rounds} rounds each, {time.monotonic() - begin:.0f} s.")
    sys.exit("\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
