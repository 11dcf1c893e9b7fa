"""A resident process that answers all messages to a site."""
# Flower starts a process for every message, which passes the message on to the resident one.

from __future__ import annotations

import hashlib
import json
import logging
import math
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

from filelock import FileLock, Timeout
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

# Neither torch nor Lightning nor the app may be imported here: messages must not wait for these imports.

__all__ = ["resident"]

#: The site's folder if its SuperNode's configuration has no entry ``folder``.
SITE_FOLDER = "flsv-site"
#: Seconds between two checks whether the process is still needed.
CHECK_SECONDS = 0.5
#: Part of the path of an environment that Flower deletes after the message: no other process could import from it.
_DELETED_FOLDER = "runtime-envs"
_TAKEN_MESSAGE = (
    "another SuperNode works in this site's folder: give each SuperNode a folder of its own"
)
_CONNECTION_ERRORS = OSError, EOFError, AuthenticationError, pickle.UnpicklingError
_log = logging.getLogger(__name__)


def resident(app: str, *, idle: float = 300.0) -> ClientApp:
    """Make a Flower ClientApp that answers messages in one resident process.

    Flower starts a process for every message, in which the import of torch and Lightning takes most of the time. The
    resident process imports the real app once. Put the call of this function into a file that imports nothing else, and
    name the result as ``clientapp`` in ``pyproject.toml``.

    A site has one resident process for each run, reached through a socket with a key in the site's folder. Only the
    site's user can read them. The process ends with the SuperNode, with another key, or if no message has come for
    ``idle`` seconds. If it dies while it answers a message, a new process answers the message once more. Messages of a
    second SuperNode with the same folder fail. On Windows, or if Flower installs dependencies for each message, each
    message is answered in a process of its own.

    The data module is made once. Data that change within a run are seen after the next start of the SuperNode.

    Args:
        app: the place to import the real ClientApp from, as ``"package.module:name"``.
            :func:`flsv.engines.flower.client_app` makes the real app.
        idle: seconds without a message after which the process ends. With 0 every message has its own process.

    Returns:
        The ClientApp that passes messages on.

    Example:
        >>> app = resident("fedapp.federation:client")
    """

    def answer(message: Message, context: Context) -> Message:
        # Flower sets these in the process that it starts for the message.
        identity = [TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id]
        is_environment_deleted = any(_DELETED_FOLDER in Path(path).parts for path in sys.path)
        can_use_resident = bool(idle) and not is_environment_deleted and os.name == "posix"
        if can_use_resident:
            reply, state, error = _ask_resident_process(idle, app, identity, message, context)
        else:
            reply, state, error = _answer_here(app, identity, message, context)
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


def _ask_resident_process(
    idle: float,
    app: str,
    identity: list[int],
    message: Message,
    context: Context,
) -> Any:
    """Return the reply of the site's resident process, which is started if necessary."""
    configured_folder = context.node_config.get("folder", SITE_FOLDER)
    folder = Path(str(configured_folder)).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    key_file = folder / "socket.key"
    open_private = partial(os.open, mode=0o600)
    with suppress(FileExistsError), open(key_file, "xb", opener=open_private) as file:
        file.write(secrets.token_bytes(32))
    # The socket is not in the site's folder: its path may not have more than some 100 characters.
    folder_and_run = f"{folder} {context.run_id}"
    name = hashlib.sha256(folder_and_run.encode()).hexdigest()[:16]
    address = f"{tempfile.gettempdir()}/flsv-{name}.sock"
    connect = partial(Client, address, "AF_UNIX", authkey=key_file.read_bytes())
    node_id = identity[2]
    supernode = os.getppid()
    arguments = [app, node_id, idle, supernode, address, str(key_file), sys.path]
    command = [*_COMMAND, json.dumps(arguments)]

    # The first attempt asks a process of an earlier message, the others start one.
    for starts_process in (False, True, True):
        process = None
        if starts_process:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        while True:
            with suppress(*_CONNECTION_ERRORS), connect() as connection:
                connection.send((app, identity, message, context))
                return connection.recv()
            # Reached if there is no process, or it does not listen yet, or has died.
            if process is None or process.poll() is not None:
                break
            time.sleep(0.05)
    raise RuntimeError(
        "the site's process has not started, or has died twice over this message: its log says more"
    )


_COMMAND = [sys.executable, "-c", "from flsv.engines.flower_resident import _live; _live()"]


def _live() -> None:
    arguments = json.loads(sys.argv.pop())
    app, own_node, idle, supernode, address, key, sys.path[:] = arguments
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # this process ends with the SuperNode
    lock = FileLock(f"{address}.lock")  # until the process ends
    try:
        lock.acquire(timeout=5)  # seconds, for a process that is about to end
    except Timeout:
        sys.exit(f"{_TAKEN_MESSAGE}: {Path(key).parent}")
    holder = Path(key).with_suffix(".node")  # of all processes of one SuperNode
    text_of_holder = holder.read_text() if holder.is_file() else ""
    earlier_node, _, earlier_supernode = text_of_holder.partition(" ")
    if earlier_node not in ("", str(own_node)):
        # An error means: that SuperNode has ended, and this one takes over.
        with suppress(ProcessLookupError, PermissionError):
            os.kill(int(earlier_supernode), 0)
            sys.exit(f"{_TAKEN_MESSAGE}: {Path(key).parent}")
    holder.write_text(f"{own_node} {supernode}")
    import_module(app.partition(":")[0])
    Path(address).unlink(missing_ok=True)
    umask_before = os.umask(0o177)
    initial_key = Path(key).read_bytes()
    listener = Listener(address, "AF_UNIX", authkey=initial_key)
    os.umask(umask_before)
    time_of_answer = time.monotonic()  # inf while an answer is computed

    def exit_if_unused() -> None:
        with suppress(OSError):  # the SuperNode has ended, or the key is gone
            while time.monotonic() - time_of_answer <= idle:
                has_new_key = Path(key).read_bytes() != initial_key
                if has_new_key:  # nobody can connect with the initial key any more
                    break
                os.kill(supernode, 0)  # raises an error if it has ended
                time.sleep(CHECK_SECONDS)
        os._exit(0)

    threading.Thread(target=exit_if_unused, daemon=True).start()
    while True:
        with suppress(*_CONNECTION_ERRORS), listener.accept() as connection:
            app, identity, message, context = connection.recv()
            if identity[2] != own_node:
                # An error if that SuperNode has ended: the process of this one takes over.
                os.kill(supernode, 0)
                connection.send((None, None, _TAKEN_MESSAGE))
                continue
            time_of_answer = math.inf
            result = _answer_here(app, identity, message, context)
            time_of_answer = time.monotonic()
            connection.send(result)
