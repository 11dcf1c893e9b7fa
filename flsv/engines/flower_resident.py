"""A resident process that answers all messages to a site."""
# Flower starts a process for every message, which passes the message on to the resident one.

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

# Neither torch nor Lightning nor the app may be imported here: messages must not wait for these imports.

__all__ = ["resident"]

#: The site's folder if its SuperNode's configuration has no entry ``folder``.
SITE_FOLDER = "flsv-site"
#: Part of the path of an environment that Flower deletes after the message: no other process could import from it.
_DELETED_FOLDER = "runtime-envs"
#: Seconds without a message after which the process ends, as when a run is over.
IDLE_SECONDS = 300.0
#: Seconds between two looks whether the SuperNode is still there.
_WATCH_SECONDS = 1.0
_CONNECTION_ERRORS = OSError, EOFError, AuthenticationError, pickle.UnpicklingError
_log = logging.getLogger(__name__)


def resident(app: str) -> ClientApp:
    """Make a Flower ClientApp that answers messages in one resident process.

    Flower starts a process for every message, in which the import of torch and Lightning takes most of the time. The
    resident process imports the real app once. Put the call of this function into a file that imports nothing else, and
    name the result as ``clientapp`` in ``pyproject.toml``.

    A SuperNode has one resident process for each run, reached through a socket with a key in the site's folder, which
    only the site's user can read. The process ends with the SuperNode, or if no message has come for five minutes. If
    it dies while it answers a message, a new process answers the message once more. On Windows, or if Flower installs
    dependencies for each message, each message is answered in a process of its own.

    The data module is made once. Data that change within a run are seen after the next start of the SuperNode.

    Args:
        app: the place to import the real ClientApp from, as ``"package.module:name"``.
            :func:`flsv.engines.flower.client_app` makes the real app.

    Returns:
        The ClientApp that passes messages on.

    Example:
        >>> app = resident("fedapp.federation:client")
    """

    def answer(message: Message, context: Context) -> Message:
        # Flower sets these in the process that it starts for the message.
        identity = [TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id]
        request = (app, identity, message, context)
        is_environment_deleted = any(_DELETED_FOLDER in Path(path).parts for path in sys.path)
        can_use_resident = not is_environment_deleted and os.name == "posix"
        if can_use_resident:
            reply, state, error = _ask_resident_process(request)
        else:
            reply, state, error = _answer_here(*request)
        if error is not None:
            raise RuntimeError(error)
        context.state = state
        return reply

    forwarding_app = ClientApp()
    forwarding_app.train()(answer)
    forwarding_app.query()(answer)
    forwarding_app.evaluate()(answer)
    return forwarding_app


def _answer_here(
    app: str, identity: list[int], message: Message, context: Context
) -> tuple[Any, Any, str | None]:
    """Answer a message in this process: ``(reply, app's state, None)``, or ``(None, None, text)`` after an error."""
    # Flower's code in the app reads these, also in the resident process.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = identity
    module_name, _, app_name = app.partition(":")
    try:
        client_app = getattr(import_module(module_name), app_name)
        reply = client_app(message, context)
        return reply, context.state, None
    except Exception as error:
        _log.exception("the app could not answer")
        # Only the error's class: the error's own text may hold samples, and must not reach the server.
        return None, None, f"{type(error).__name__}, the site's own log says more"


def _ask_resident_process(request: tuple[Any, ...]) -> Any:
    """Send :func:`_answer_here`'s arguments to the resident process, which is started if necessary, and return its
    result.
    """
    app, _identity, _message, context = request
    configured_folder = context.node_config.get("folder", SITE_FOLDER)
    key_file = _key_file(Path(str(configured_folder)).absolute())
    key = key_file.read_bytes()

    # Each SuperNode has a process for each run, and so has each key. The socket is not in the site's folder: its path
    # may not have more than some 100 characters.
    supernode = os.getppid()
    users = f"{key.hex()} {supernode} {context.run_id}"
    name = hashlib.sha256(users.encode()).hexdigest()[:16]
    address = f"{tempfile.gettempdir()}/flsv-{name}.sock"
    open_socket = partial(Client, address, "AF_UNIX", authkey=key)
    arguments = [app, IDLE_SECONDS, address, str(key_file), supernode, sys.path]
    command = [*_COMMAND, json.dumps(arguments)]

    # The first attempt asks a process of an earlier message, the others start one.
    for starts_process in (False, True, True):
        process = None
        if starts_process:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while True:
            with suppress(*_CONNECTION_ERRORS), open_socket() as connection:
                connection.send(request)
                return connection.recv()
            # Reached if there is no process, or it does not listen yet, or has died.
            if process is None or process.poll() is not None:
                break
            time.sleep(0.05)
    raise RuntimeError(
        "the site's process has not started, or has died twice over this message: its log says more"
    )


def _key_file(folder: Path) -> Path:
    """Return the file with a site's key, which only the site's user can read. It is written at the first call."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "socket.key"
    open_private = partial(os.open, mode=0o600)
    with suppress(FileExistsError), open(path, "xb", opener=open_private) as file:
        file.write(secrets.token_bytes(32))
    return path


_COMMAND = [sys.executable, "-c", "from flsv.engines.flower_resident import _live; _live()"]


def _live() -> None:
    """Answer messages until none has come for a while, or the SuperNode has ended."""
    app, idle, address, key_file, supernode, import_paths = json.loads(sys.argv.pop())
    sys.path[:] = import_paths
    threading.Thread(target=_end_with, args=(supernode,), daemon=True).start()
    key = Path(key_file).read_bytes()
    import_module(app.partition(":")[0])
    Path(address).unlink(missing_ok=True)  # of a process that was killed
    listener = Listener(address, "AF_UNIX", authkey=key)
    while True:
        signal.setitimer(signal.ITIMER_REAL, idle)  # its signal ends this process
        with suppress(*_CONNECTION_ERRORS), listener.accept() as connection:
            request = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(_answer_here(*request))


def _end_with(supernode: int) -> None:
    """End this process when the process ``supernode`` has ended."""
    with suppress(OSError):
        while True:
            os.kill(supernode, 0)  # raises an error if there is no such process of this user
            time.sleep(_WATCH_SECONDS)
    os._exit(0)
