"""Ranks for the tests: processes forked from one that has imported everything, with a hard end."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The process to fork from has no other way to learn where to import from; nor have those that a rank starts.
os.environ["PYTHONPATH"] = os.pathsep.join([*(path for path in sys.path if path), str(Path(__file__).parent)])
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["rank_cases"])


@dataclass
class Ended:
    """How a rank ended: its exit code, and what it printed."""

    code: int | None
    output: str


class Group:
    """Processes that are the ranks of one federation.

    Args:
        function: of ``rank_cases``, by name, that every rank calls.
        arguments: its arguments.
        size: how many ranks.
        folder: for their outputs.
        environment: more environment variables, for every rank.
        nodes: whether every rank is a host of its own.
    """

    def __init__(
        self,
        function: str,
        arguments: Sequence[Any],
        size: int,
        folder: Path,
        environment: dict[str, str] | None = None,
        nodes: bool = False,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._outputs = [folder / f"rank{rank}.txt" for rank in range(size)]
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANKS": str(size)}
        self.processes: list[Any] = []
        for rank in range(size):
            own = {"NODE_RANK": str(rank), "LOCAL_RANK": "0"} if nodes else {"NODE_RANK": "0", "LOCAL_RANK": str(rank)}
            own["NODES"] = str(size if nodes else 1)
            variables = {**common, **own, **(environment or {})}
            given = (function, list(arguments), variables, str(self._outputs[rank]))
            process = _context.Process(target=_run, args=given, daemon=True)
            process.start()
            self.processes.append(process)

    def wait(self, seconds: float = 900.0) -> list[Ended]:
        """Until all have ended; who has not by then, on however busy a machine, is killed, and its code is None."""
        end = time.monotonic() + seconds
        codes: dict[int, int | None] = {}
        while len(codes) < len(self.processes) and time.monotonic() < end:
            for rank, process in enumerate(self.processes):
                if rank not in codes and process.exitcode is not None:
                    codes[rank] = process.exitcode
            time.sleep(0.02)
        for rank, process in enumerate(self.processes):
            if rank not in codes:
                process.kill()
                process.join()
                codes[rank] = None
        return [Ended(codes[rank], self._outputs[rank].read_text()) for rank in sorted(codes)]


def run_ranks(function: str, arguments: Sequence[Any], size: int, folder: Path, **kwargs: Any) -> list[Ended]:
    """Start them, wait, and check that all ended well."""
    ended = Group(function, arguments, size, folder, **kwargs).wait()
    assert [rank.code for rank in ended] == [0] * size, "\n".join(rank.output[-3000:] for rank in ended)
    return ended


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
