"""Ranks for the tests: processes forked from one that has imported everything, with a hard end."""

import faulthandler
import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# The process to fork from has no other way to learn where to import from; nor have those that a rank starts.
os.environ["PYTHONPATH"] = os.pathsep.join([*(path for path in sys.path if path), str(Path(__file__).parent)])
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rank_cases"])


class Ended(NamedTuple):
    """How a rank ended: its exit code, and what it printed."""

    code: int | None
    output: str


class Group:
    """Processes that are the ranks of one federation, each of which calls a function of ``rank_cases``; with ``nodes``
    every rank is a host of its own."""

    def __init__(self, function: str, arguments: Sequence[Any], size: int, folder: Path, nodes: bool = False) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = [folder / f"rank{rank}.txt" for rank in range(size)]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANKS": str(size)}
        common["NODES"] = str(size if nodes else 1)
        self.processes: list[Any] = []
        for rank in range(size):
            own = {"NODE_RANK": str(rank), "LOCAL_RANK": "0"} if nodes else {"NODE_RANK": "0", "LOCAL_RANK": str(rank)}
            given = (function, list(arguments), common | own, str(self._outputs[rank]))
            self.processes.append(_context.Process(target=_run, args=given, daemon=True))
            self.processes[-1].start()

    def wait(self, seconds: float = 900.0) -> list[Ended]:
        """Until all have ended; who has not by then, on however busy a machine, is killed, and its code is None."""
        end = time.monotonic() + seconds
        codes: list[int | None] = []
        for process in self.processes:
            process.join(max(0.0, end - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
        return [Ended(code, output.read_text()) for code, output in zip(codes, self._outputs)]

    def done(self) -> None:
        """All have ended well."""
        ended = self.wait()
        assert {rank.code for rank in ended} == {0}, "\n".join(rank.output[-3000:] for rank in ended)


def _run(function: str, arguments: list[Any], variables: dict[str, str], output: str) -> None:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1) for number in (1, 2))  # noqa: SIM115
    os.environ.update(variables)
    # Where a rank hangs, its output says at what.
    faulthandler.dump_traceback_later(float(os.environ.get("DUMP_AFTER", 50)), file=sys.stderr)
    try:
        getattr(importlib.import_module("rank_cases"), function)(*arguments)
    except BaseException:
        traceback.print_exc()
        raise SystemExit(1) from None


def free_port() -> int:
    """Where nobody listens on the loopback address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
