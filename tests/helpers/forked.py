"""Processes that are forks of the tests' own, so that nothing is imported again. What they do, and how they are ended,
is as real as of others."""

import os
import signal
import sys
import time
import traceback
from pathlib import Path


class Forked:
    """``function(*arguments)``, whose value is the exit status, in a folder and a session of its own, with these
    variables. Its output is in ``output``."""

    def __init__(self, folder, function, *arguments, **environment):
        folder.mkdir(parents=True, exist_ok=True)
        self.output = folder / "output.txt"
        self.output.touch()
        self.status = None
        self.pid = os.fork()

        is_child = self.pid == 0
        if is_child:
            _run_and_exit(self.output, function, arguments, environment)

    def wait(self, seconds=900.0):
        """Its status, negative for a signal and None while it runs, and its output."""
        end = time.monotonic() + seconds
        while self.status is None:
            ended_pid, status = os.waitpid(self.pid, os.WNOHANG)
            if ended_pid:
                self.status = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                break
            else:
                time.sleep(0.01)

        return self.status, self.output.read_text()


def _run_and_exit(output, function, arguments, environment):
    status = 1  # until the function has returned
    try:
        os.setsid()
        os.chdir(output.parent)
        redirect_output(output)
        os.environ.update(environment)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # as from a terminal
        status = function(*arguments) or 0
    except SystemExit as ended:
        status = ended.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status if isinstance(status, int) else 1)


def redirect_output(path):
    """Let this process, and what it starts, write into a file in place of stdout and stderr."""
    file = os.open(path, os.O_WRONLY | os.O_TRUNC)
    stdout = 1
    stderr = 2
    os.dup2(file, stdout)
    os.dup2(file, stderr)
    # pytest has replaced Python's streams. New ones write each line at once.
    sys.stdout = open(stdout, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(stderr, "w", buffering=1, closefd=False)  # noqa: SIM115


def processes(session):
    """The processes of a session that have not ended."""
    ids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            text = (process / "stat").read_text()
        except OSError:
            continue  # it has ended
        # After the program's name, in parentheses: state, parent, group, session, ...
        _, fields = text.rsplit(")", 1)
        state, _, _, session_of_process, *_ = fields.split()
        is_zombie = state == "Z"
        if int(session_of_process) == session and not is_zombie:
            ids.append(int(process.name))

    return ids
