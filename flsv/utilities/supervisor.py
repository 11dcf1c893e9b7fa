"""Functions that run tasks in child processes, several at once, and return their answers."""
# A child that fails, is killed or takes too long is one named failure, and the others go on. No child outlives this
# process (on Linux), and a child runs nothing but its task: no atexit function, finally block or destructor of this
# program.

from __future__ import annotations

import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from tempfile import TemporaryFile
from typing import Any, NoReturn, TypeVar

import cloudpickle
import joblib
from joblib._parallel_backends import LokyBackend
from joblib.parallel import get_active_backend

from flsv.utilities.forks import cpu_times_while_asleep, quiet_fork, set_up_child

Name = TypeVar("Name", bound=Hashable)
#: A function without arguments, to run in a fork, or a command line and its input, to run in a fresh process.
Task = Callable[[], Any] | tuple[Sequence[str], bytes]

#: Number of bytes of a child's output, of which the last line is shown if it fails.
LAST_BYTES = 4096
#: Environment variable with the file descriptor to which a command's process sends its answer.
ANSWER_PIPE_VARIABLE = "FLSV_ANSWER_FD"
#: Seconds between two looks at the children's states.
POLL_S = 0.2
#: A child hangs if it and its children only sleep for so many seconds, or for this share of its time limit.
HANG_S = 60.0
HANG_SHARE = 0.05
#: Seconds between two looks at whether a child sleeps.
LOOK_S = 1.0

_answer_pipe: int | None = None


class ChildFailed(RuntimeError):
    """Error: a child process has ended without an answer."""

    # Whether a signal has ended the process.
    killed = False


class ContinueInChild(BaseException):
    """Exception raised in a forked child to leave :func:`supervise` and continue the program there."""


def supervise(
    tasks: Iterable[tuple[Name, Task]],
    jobs: int = 1,
    limit_s: float | None = None,
) -> Generator[tuple[Name, Any], None, None]:
    """Run tasks in child processes, and yield each task's name and answer when it ends.

    At most ``jobs`` tasks run at once. The answer of a task that fails or takes longer than ``limit_s`` seconds is a
    :class:`ChildFailed`.

    Example:
        >>> dict(supervise([("one", lambda: 1), ("two", lambda: 2)], jobs=2))
        {'one': 1, 'two': 2}
        >>> [(name, failed)] = supervise([("three", lambda: 1 / 0)])
        >>> failed
        ChildFailed('ZeroDivisionError: division by zero')
    """
    waiting_tasks = iter(tasks)
    children: list[_Child] = []
    supervisor_pid = os.getpid()
    all_have_started = False
    with ended_by_sigterm() as raise_if_stopped:
        try:
            while children or not all_have_started:
                raise_if_stopped()
                for name, task in islice(waiting_tasks, jobs - len(children)):
                    children.append(_Child(name, task, limit_s))
                all_have_started = len(children) < jobs
                # Wait until a child answers or ends, but not for long.
                select.select([child.pipe for child in children], [], [], POLL_S)
                ended_children = [child for child in children if child.poll_end()]
                for child in ended_children:
                    children.remove(child)
                    yield child.name, child.answer()
        finally:
            if os.getpid() == supervisor_pid:  # a child that goes on leaves its siblings alone
                for child in children:
                    child.kill()


def supervise_fresh(
    tasks: Iterable[tuple[Name, Callable[[], Any]]],
    jobs: int = 1,
    limit_s: float | None = None,
    forks: bool = True,
) -> Iterator[tuple[Name, Any]]:
    """Run tasks in fresh processes, as :func:`supervise` does in forks of this process.

    With ``forks``, one fresh process forks for each task. Otherwise each task has its own fresh process.
    """
    # Tasks cross by cloudpickle. Without `forks` each has a fresh process, as those that use an accelerator need.
    if forks:
        with closing(FreshProcess()) as process:
            yield from process.supervise(tasks, jobs, limit_s)
        return
    commands = ((name, _command(task)) for name, task in tasks)
    yield from supervise(commands, jobs, limit_s)


class ForksOrFresh:
    """Runner of tasks in forks, which changes to fresh processes if the first fork to end has failed."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._can_fork: bool | None = None  # None before the first fork has ended

    def __call__(
        self,
        tasks: Iterable[tuple[Name, Callable[[], Any]]],
        jobs: int = 1,
        limit_s: float | None = None,
    ) -> Iterator[tuple[Name, Any]]:
        all_tasks = [*tasks]
        tasks_to_fork = all_tasks
        if self._can_fork is False:
            tasks_to_fork = []
        with closing(supervise(tasks_to_fork, jobs, limit_s)) as answers:
            for name, value in answers:
                if self._can_fork is None:
                    self._can_fork = not isinstance(value, ChildFailed)
                if not self._can_fork:
                    self._say(f"fresh processes do what a fork of this process could not: {value}")
                    break
                yield name, value
        if not self._can_fork:
            yield from supervise_fresh(all_tasks, jobs, limit_s)


class FreshProcess:
    """Fresh Python process that forks itself for each task."""

    def __init__(self) -> None:
        self._child: _Child | None = None

    def supervise(
        self,
        tasks: Iterable[tuple[Name, Callable[[], Any]]],
        jobs: int = 1,
        limit_s: float | None = None,
    ) -> Iterator[tuple[Name, Any]]:
        """Run tasks as the function :func:`supervise` does."""
        if self._child is None:
            self._link, link_of_child = Pipe()
            self._child = _Child(
                name=None, task=_command(), limit_s=None, answer_pipe=link_of_child.fileno()
            )
            link_of_child.close()
        child = self._child
        names = {}
        functions = []
        for position, (name, task) in enumerate(tasks):
            names[position] = name
            functions.append(task)
        try:
            self._link.send_bytes(cloudpickle.dumps((functions, jobs, limit_s)))
            with ended_by_sigterm() as raise_if_stopped:
                while names:
                    while not self._link.poll(POLL_S):
                        raise_if_stopped()
                    position, value = pickle.loads(self._link.recv_bytes())
                    yield names.pop(position), value
        except (EOFError, OSError):
            while not child.poll_end():
                time.sleep(POLL_S)
            failure = child.answer()
            for name in list(names.values()):
                yield name, failure
        finally:
            if names and self._child is child:
                self.close()

    def close(self) -> None:
        """End the process."""
        if self._child is None:
            return
        self._link.close()
        self._child.kill()
        self._child = None


def by_workers() -> bool:
    """Return whether ``joblib.parallel_config`` names a backend with its own workers, such as ``"dask"``."""
    return not isinstance(get_active_backend()[0], LokyBackend)


def supervise_by_joblib(
    tasks: Iterable[tuple[Name, Callable[[], Any]]],
    jobs: int = 1,
    limit_s: float | None = None,
) -> Iterator[tuple[Name, Any]]:
    """Run tasks in fresh processes on the workers of ``joblib.parallel_config``. ``jobs`` is ignored."""
    path = sys.path
    folder = os.getcwd()
    run_at_worker = joblib.delayed(_run_at_worker)
    calls = (run_at_worker(name, task, limit_s, path, folder) for name, task in tasks)
    yield from joblib.Parallel(return_as="generator_unordered", pre_dispatch="all")(calls)


def _run_at_worker(
    name: Name,
    task: Callable[[], Any],
    limit_s: float | None,
    path: list[str],
    folder: str,
) -> Any:
    # In a process of its own, so that the worker's path and folder stay for what others run there.
    command = _command(partial(_run_in, folder, task), path)
    (answer_with_name,) = supervise([(name, command)], jobs=1, limit_s=limit_s)
    return answer_with_name


def _run_in(folder: str, task: Callable[[], Any]) -> Any:
    os.chdir(folder)
    return task()


_FRESH_PROGRAM = (
    "import sys; sys.path[:] = {}; from flsv.utilities.supervisor import run_fresh; run_fresh()"
)


def _command(
    task: Callable[[], Any] | None = None, import_path: Sequence[str] | None = None
) -> tuple[Sequence[str], bytes]:
    """Return command and input of a fresh process that runs ``task``, or else forks for each task that it receives."""
    # The fresh process imports flsv from the same folder as this process.
    program = _FRESH_PROGRAM.format(list(import_path or sys.path))
    task_bytes = b"" if task is None else cloudpickle.dumps(task)
    return [sys.executable, "-c", program], task_bytes


def run_fresh() -> None:
    """Run the task in this process's input, or fork for each task that the supervisor sends."""
    answer_pipe = int(os.environ[ANSWER_PIPE_VARIABLE])
    task_bytes = sys.stdin.buffer.read()
    if task_bytes:
        task = pickle.loads(task_bytes)
        _run_task(task, answer_pipe)  # ends the process
    # Without a task of its own, this process forks for each task that it is sent, until the pipe is closed.
    link = Connection(answer_pipe)
    with suppress(EOFError):
        while True:
            functions, jobs, limit_s = pickle.loads(link.recv_bytes())
            numbered_tasks = enumerate(functions)
            for answer_with_number in supervise(numbered_tasks, jobs, limit_s):
                link.send_bytes(pickle.dumps(answer_with_number))


def exit_with_answer(value: Any) -> NoReturn:
    """Send this process's answer to its supervisor, and end the process."""
    _send((True, value))


def exit_with_failure(reason: str) -> NoReturn:
    """Send the reason of a failure to this process's supervisor, and end the process."""
    _send((False, reason))


@contextmanager
def ended_by_sigterm() -> Iterator[Callable[[], None]]:
    """Raise SystemExit at SIGTERM within this context, so that ``finally`` blocks are run.

    Yield a function that raises it again if a library has suppressed it.
    """
    stopped: list[BaseException] = []

    def stop(number: int, _: Any) -> None:
        error: BaseException = KeyboardInterrupt()
        if number == signal.SIGTERM:
            error = SystemExit(128 + number)
        stopped.append(error)
        raise error

    def raise_if_stopped() -> None:
        if stopped:
            raise stopped[-1]

    if threading.current_thread() is not threading.main_thread():
        yield raise_if_stopped
        return
    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)

    owner = os.getpid()
    handlers = {number: signal.signal(number, stop) for number in numbers}
    original_hook = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_value not in stopped:
            original_hook(unraisable)

    sys.unraisablehook = hook
    try:
        yield raise_if_stopped
    finally:
        sys.unraisablehook = original_hook
        if os.getpid() == owner:
            for number, handler in handlers.items():
                signal.signal(number, handler)


class _Child:
    """Handle of a child process that runs one task."""

    def __init__(
        self,
        name: Any,
        task: Task,
        limit_s: float | None,
        answer_pipe: int | None = None,
    ) -> None:
        self.name = name
        self._limit_s = limit_s
        self._deadline: float | None = None
        if limit_s is not None:
            self._deadline = time.monotonic() + limit_s
        self._hang_limit_s = HANG_S
        if limit_s:
            self._hang_limit_s = min(HANG_S, HANG_SHARE * limit_s)
        self._hang_limit_s = max(LOOK_S, self._hang_limit_s)

        self._cpu_times: object = None
        self._last_look = 0.0
        self._idle_seconds = 0.0
        self._data = bytearray()
        self._reason_to_kill = ""
        self._status: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._output: Any = None

        self.pipe, write_end = os.pipe()
        os.set_blocking(self.pipe, False)
        if callable(task):
            self._pid = quiet_fork()
            if not self._pid:
                _run_task(task, write_end)  # returns only for a task that raises ContinueInChild
        else:
            command, task_bytes = task
            self._process = self._start(
                command, task_bytes, end_of_life_pipe=write_end, answer_pipe=answer_pipe
            )
            self._pid = self._process.pid
        os.close(write_end)

    def _start(
        self,
        command: Sequence[str],
        task_bytes: bytes,
        end_of_life_pipe: int,
        answer_pipe: int | None,
    ) -> subprocess.Popen[bytes]:
        """Start a fresh process, which answers to the pipe ``answer_pipe``, or else to ``end_of_life_pipe``."""
        self._output = TemporaryFile()  # noqa: SIM115 - closed in `answer`
        parent = os.getpid()
        # The system closes the pipe when the child has ended, which the reader sees.
        inherited_pipes = {end_of_life_pipe}
        if answer_pipe is None:
            answer_pipe = end_of_life_pipe
        inherited_pipes.add(answer_pipe)
        with TemporaryFile() as task_file:
            task_file.write(task_bytes)
            task_file.seek(0)
            return subprocess.Popen(
                command,
                stdin=task_file,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**os.environ, ANSWER_PIPE_VARIABLE: str(answer_pipe)},
                pass_fds=inherited_pipes,
                preexec_fn=lambda: set_up_child(parent),
            )

    def poll_end(self) -> bool:
        """Read the child's output, end it if it takes too long, and return whether it has ended."""
        self._read()
        if self._poll() is None:
            is_late = self._deadline is not None and time.monotonic() > self._deadline
            if is_late:
                self._reason_to_kill = f"it took longer than {self._limit_s:.0f} s"
            elif self._hangs():
                idle_time = f"{self._idle_seconds:.0f} s"
                self._reason_to_kill = (
                    f"it hung: for {idle_time} neither it nor a child of it used a processor"
                )
            if self._reason_to_kill:
                self.kill()
        if self._poll() is None:
            return False
        self._kill_group()  # what the child has started
        self._read()  # what the child has sent between the first read and its end
        return True

    def _hangs(self) -> bool:
        """Return whether the child and its descendants have used no processor for too long."""
        now = time.monotonic()
        since_last_look = now - self._last_look
        if since_last_look >= LOOK_S:
            cpu_times = cpu_times_while_asleep(self._pid)
            is_idle = cpu_times is not None and cpu_times == self._cpu_times
            if is_idle:
                # If all processes were halted, the time since the last look is longer, and counts as two looks.
                self._idle_seconds += min(since_last_look, 2 * LOOK_S)
            else:
                self._idle_seconds = 0.0
            self._cpu_times = cpu_times
            self._last_look = now
        return self._idle_seconds > self._hang_limit_s

    def answer(self) -> Any:
        """Return the ended child's answer, or a ChildFailed error."""
        os.close(self.pipe)
        try:
            if not self._reason_to_kill:
                # It fails if there is no answer, or only a part of one.
                with suppress(Exception):
                    has_succeeded, value_or_reason = pickle.loads(bytes(self._data))
                    if has_succeeded:
                        return value_or_reason
                    return ChildFailed(value_or_reason)
            failure = ChildFailed(self._reason_to_kill or self._describe_end())
            failure.killed = (self._status or 0) < 0
            return failure
        finally:
            if self._output is not None:
                self._output.close()

    def kill(self) -> None:
        """Kill the child and the processes that it started."""
        self._kill_group()
        while self._poll() is None:
            time.sleep(0.01)

    def _kill_group(self) -> None:
        """Send SIGKILL to the child, unless it has ended, and to the processes that it started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._pid, signal.SIGKILL)
        if self._status is None:  # a child that has just begun may not lead its group yet
            with suppress(ProcessLookupError, PermissionError):
                os.kill(self._pid, signal.SIGKILL)

    def _read(self) -> None:
        with suppress(BlockingIOError):
            while part := os.read(self.pipe, 1 << 20):
                self._data += part

    def _poll(self) -> int | None:
        """Return the child's exit status, None if it still runs."""
        if self._status is not None:
            return self._status
        if self._process is not None:
            self._status = self._process.poll()
            return self._status
        try:
            ended_pid, wait_status = os.waitpid(self._pid, os.WNOHANG)
            if ended_pid:
                self._status = os.waitstatus_to_exitcode(wait_status)
        except ChildProcessError:  # other code of this process has waited for the child
            self._status = 0
        return self._status

    def _describe_end(self) -> str:
        """Say how the child ended, with the last line of its output."""
        status = self._status or 0  # the child has ended: not None
        last_line = ""
        if self._output is not None:
            size = self._output.seek(0, os.SEEK_END)
            self._output.seek(max(0, size - LAST_BYTES))
            text = self._output.read().decode(errors="replace")
            lines = text.strip().splitlines()
            if lines:
                last_line = f": {lines[-1].strip()}"
        if status < 0:
            return f"signal {signal.Signals(-status).name} ended its process{last_line}"
        return f"its process ended with status {status} and no answer{last_line}"


def _run_task(task: Callable[[], Any], answer_pipe: int) -> None:
    """Run a task in this fork, write its answer or error to ``answer_pipe``, and end the process."""
    global _answer_pipe
    _answer_pipe = answer_pipe
    try:
        exit_with_answer(task())
    except ContinueInChild:
        raise
    except BaseException as error:
        try:
            exit_with_failure(f"{type(error).__name__}: {error}")
        finally:
            os._exit(1)


def _send(message: tuple[bool, Any]) -> NoReturn:
    pipe: int | str | None = _answer_pipe  # in a fork
    if pipe is None:
        pipe = os.environ.get(ANSWER_PIPE_VARIABLE)  # in a command
    if pipe is None:
        raise RuntimeError(
            "no supervisor has started this process, and nobody waits for its answer."
        )
    unsent = memoryview(pickle.dumps(message))
    try:
        while unsent:
            num_sent = os.write(int(pipe), unsent)
            unsent = unsent[num_sent:]
    finally:
        os._exit(0)
