"""Children that answer, fail, crash, hang or are killed, and parents that end while children run."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flsv.utilities.supervisor import ChildFailed, ContinueInChild, exit_with_answer, supervise
from helpers.forked import Forked

ANSWERS = "from flsv.utilities.supervisor import exit_with_answer, exit_with_failure; "


def make_command(code: str) -> tuple[list[str], bytes]:
    return [sys.executable, "-c", ANSWERS + code], b""


def kill_process() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def print_lines() -> int:
    for _ in range(200):
        print("x" * 10_000)
    os.write(2, b"y" * 1_000_000)
    return 5


@pytest.mark.slow
def test_failed_child_gives_an_error_and_the_others_go_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    tasks: dict[str, Any] = {
        "hangs": lambda: time.sleep(600),
        "waits": lambda: subprocess.call([sys.executable, "-c", "sum(range(3 * 10**7))"]),
        "command hangs": make_command("import time; time.sleep(600)"),
        "fork": lambda: torch.ones(3),
        "raises": lambda: 1 / 0,
        "killed": kill_process,
        "exits": lambda: sys.exit(3),
        "ends": lambda: os._exit(4),
        "cannot be sent": lambda: lambda: 1,
        "prints": print_lines,
        "large": lambda: bytes(50_000_000),
        "command": make_command("exit_with_answer(sum(range(5)))"),
        "large command": make_command("exit_with_answer(bytes(50_000_000))"),
        "fails": make_command("exit_with_failure('no clients')"),
        "silent": make_command("print('last words')"),
        "command raises": make_command("print('x' * 10**7); 1 / 0"),
        "command is killed": make_command("import os; os.kill(os.getpid(), 11)"),
    }
    time_at_start = time.monotonic()
    results = dict(supervise(tasks.items(), jobs=3, limit_s=100))
    assert time.monotonic() - time_at_start < 500
    assert results.keys() == tasks.keys()

    reasons = {
        name: str(value) for name, value in results.items() if isinstance(value, ChildFailed)
    }

    assert torch.equal(results["fork"], torch.ones(3))
    assert (results["prints"], results["command"], results["waits"]) == (5, 10, 0)
    assert len(results["large"]) == len(results["large command"]) == 50_000_000
    assert reasons.pop("cannot be sent")
    for name in ("hangs", "command hangs"):
        assert reasons.pop(name).startswith("it hung: for ")
    assert reasons == {
        "raises": "ZeroDivisionError: division by zero",
        "killed": "signal SIGKILL ended its process",
        "exits": "SystemExit: 3",
        "ends": "its process ended with status 4 and no answer",
        "fails": "no clients",
        "silent": "its process ended with status 0 and no answer: last words",
        "command raises": "its process ended with status 1 and no answer: ZeroDivisionError: division by zero",
        "command is killed": "signal SIGSEGV ended its process",
    }
    assert capfd.readouterr() == ("", "")


@pytest.mark.slow
def test_child_that_takes_too_long_is_ended() -> None:
    def spin() -> None:
        while True:
            pass

    ((_, failure),) = supervise([("spins", spin)], jobs=1, limit_s=2)
    assert isinstance(failure, ChildFailed)
    assert str(failure) == "it took longer than 2 s"


def test_forked_tasks_see_the_parents_state_and_change_none_of_it(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    path.write_text("0123456789")
    with path.open("rb", buffering=0) as file:
        file.read(2)

        def read_and_draw() -> tuple[bytes, float, float]:
            return file.read(3), random.random(), float(torch.rand(()))

        tasks = [(number, read_and_draw) for number in range(3)]
        answers = dict(supervise(tasks, jobs=2))

        # The parent's file and generators are where they were, so that it now gets what each fork got.
        answer_of_parent = read_and_draw()
        for answer in answers.values():
            assert answer == answer_of_parent
        assert answer_of_parent[0] == b"234"


def test_task_that_raises_go_on_returns_to_the_caller_in_the_child(tmp_path: Path) -> None:
    def go_on() -> None:
        raise ContinueInChild

    path_of_finally = tmp_path / "finally"

    def ask_three_children() -> dict[int, Any]:
        try:
            # The parent returns from here, with the children's answers.
            return dict(supervise([(i, go_on) for i in range(3)], jobs=2))
        except ContinueInChild:
            # A child goes on here. Its answer ends it.
            exit_with_answer(os.getpid())
        finally:
            path_of_finally.write_text(f"{os.getpid()}")

    pids_of_children = ask_three_children()

    pid_of_parent = os.getpid()
    assert len({*pids_of_children.values(), pid_of_parent}) == 3 + 1
    # No `finally` of the program ran in a child.
    assert path_of_finally.read_text() == f"{pid_of_parent}"


PARENT = """
import atexit, os, signal, sys, time
from pathlib import Path
from flsv.utilities.supervisor import supervise
folder, kind = Path(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores in what it starts beside itself
atexit.register(lambda: (folder / f"atexit-{os.getpid()}").touch())

def work(i):
    import subprocess
    (folder / f"child-{os.getpid()}").touch()
    worker = subprocess.Popen(["sleep", "600"])
    (folder / f"worker-{worker.pid}").touch()
    time.sleep(600)

code = "import os, sys, time; open(sys.argv[1] + f'/child-{os.getpid()}', 'w'); time.sleep(600)"
command = [sys.executable, "-c", code, str(folder)], b""
tasks = [(i, (lambda: work(i)) if kind == "forks" else command) for i in range(3)]
(folder / f"parent-{os.getpid()}").touch()
try:
    for each in supervise(tasks, jobs=3):
        pass
finally:
    (folder / f"finally-{os.getpid()}").touch()
"""


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(") ")[1][0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 300.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.1)
    return true()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["forks", "commands"])
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name
)
def test_all_children_end_with_their_parent(
    tmp_path: Path, number: signal.Signals, kind: str
) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), kind], stderr=subprocess.DEVNULL
    )
    num_workers = 3 if kind == "forks" else 0
    is_killed = number == signal.SIGKILL

    def ids_of(name: str) -> list[int]:
        return [int(path.name.split("-")[1]) for path in tmp_path.glob(f"{name}-*")]

    def have_started() -> bool:
        return len(ids_of("child")) == 3 and len(ids_of("worker")) == num_workers

    assert wait_until(have_started)

    parent.send_signal(number)
    parent.wait(300)

    expected_to_end = ids_of("child")
    if not is_killed:
        expected_to_end += ids_of("worker")

    def have_ended() -> bool:
        return not any(map(is_alive, expected_to_end))

    assert wait_until(have_ended), "children are left"

    for pid in ids_of("worker"):  # a child that is killed cannot end what it has started itself
        if is_alive(pid):
            os.kill(pid, signal.SIGKILL)

    parents_that_clean_up = [] if is_killed else [parent.pid]
    assert ids_of("atexit") == parents_that_clean_up
    assert ids_of("finally") == parents_that_clean_up
    expected_codes = {
        signal.SIGTERM: 143,
        signal.SIGINT: -signal.SIGINT,
        signal.SIGKILL: -signal.SIGKILL,
    }
    assert parent.returncode == expected_codes[number]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_a_fork_ends_the_supervisor(tmp_path: Path, number: int) -> None:
    """Python drops exceptions of the functions that it calls at a fork, in which a signal often arrives."""

    def sleep() -> None:
        time.sleep(60)

    def run() -> None:
        os.register_at_fork(after_in_parent=lambda: signal.raise_signal(number))
        list(supervise([(0, sleep), (1, sleep)], jobs=2))

    status, output = Forked(tmp_path, run).wait(50)

    if number == signal.SIGTERM:
        assert status == 128 + signal.SIGTERM
    else:
        assert output.splitlines()[-1] == "KeyboardInterrupt"
    assert "Exception ignored" not in output
