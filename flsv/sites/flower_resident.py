"""A resident process that replies to all messages to a site."""
# Flower starts a process for every message, which passes the message to the resident one.

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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from flsv.sites.site_folder import site_folder

# This module must not import torch, Lightning or the app, since every message would wait for these imports.

__all__ = ["resident"]

#: Part of the path of an environment that Flower deletes after the message, so that no other process can use it.
_DELETED_FOLDER = "runtime-envs"
#: Seconds without a message after which the process ends.
IDLE_SECONDS = 300.0
#: Seconds between two checks whether the SuperNode still runs.
_WATCH_SECONDS = 1.0
_CONNECTION_ERRORS = OSError, EOFError, AuthenticationError, pickle.UnpicklingError
_log = logging.getLogger(__name__)


def resident(app: str) -> ClientApp:
    """Make a Flower ClientApp that replies to messages in one resident process.

    Flower starts a process for every message, in which importing torch and Lightning takes most of the time. The
    resident process imports the real app once. Call this function in a file that imports nothing else, and set the
    result as ``clientapp`` in ``pyproject.toml``.

    A SuperNode has one resident process for each run, reached through a socket with a key in the site's folder, which
    only the site's user can read. The process ends with the SuperNode, or after five minutes without a message. If it
    dies while it processes a message, a new process processes the message again. On Windows, or if Flower installs
    dependencies for each message, each message has a process of its own.

    The data module is made once. Changed data are read after the next start of the SuperNode.

    Args:
        app: the place to import the real ClientApp from, as ``"package.module:name"``.
            :func:`flsv.sites.flower.client_app` makes the real app.

    Returns:
        The ClientApp that passes messages to the resident process.

    Example:
        >>> app = resident("fedapp.federation:client")
    """

    def respond(message: Message, context: Context) -> Message:
        # Flower sets these in the process that it starts for the message.
        identity = [TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id]
        request = (app, identity, message, context)
        if _can_use_resident():
            reply, state, error = _reply_of_resident_process(request)
        else:
            reply, state, error = _reply_of_app(*request)
        if error is not None:
            raise RuntimeError(error)
        context.state = state
        return reply

    forwarding_app = ClientApp()
    forwarding_app.train()(respond)
    forwarding_app.query()(respond)
    forwarding_app.evaluate()(respond)
    return forwarding_app


def _can_use_resident() -> bool:
    is_environment_deleted = any(_DELETED_FOLDER in Path(path).parts for path in sys.path)
    return not is_environment_deleted and os.name == "posix"


def _reply_of_app(
    app: str, identity: list[int], message: Message, context: Context
) -> tuple[Any, Any, str | None]:
    """Return the app's reply in this process: ``(reply, state, None)``, or ``(None, None, text)`` after an error."""
    # Flower's code in the app reads these, also in the resident process.
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = identity
    module_name, _, app_name = app.partition(":")
    try:
        client_app = getattr(import_module(module_name), app_name)
        reply = client_app(message, context)
        return reply, context.state, None
    except Exception:
        _log.exception("The app could not reply to a message.")
        # The error may depend on samples, so the server learns only that there was one.
        return None, None, "it failed with an error; the site's own log has the details"


def _reply_of_resident_process(request: tuple[Any, ...]) -> Any:
    """Call :func:`_reply_of_app` in the resident process, which is started if necessary."""
    app, _identity, _message, context = request
    key_file = _key_file(site_folder(context.node_config).absolute())
    key = key_file.read_bytes()
    supernode = os.getppid()
    address = _socket_address(key, supernode, context.run_id)
    open_socket = partial(Client, address, "AF_UNIX", authkey=key)
    arguments = [app, IDLE_SECONDS, address, str(key_file), supernode, sys.path]
    command = [*_COMMAND, json.dumps(arguments)]

    # The first attempt uses the process of an earlier message. The other two start a process.
    for starts_process in (False, True, True):
        process = None
        if starts_process:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        reply = _reply_through(open_socket, request, process)
        if reply is not None:
            return reply
    raise RuntimeError(
        "The site's process has not started, or has died twice while it processed this message. The site's own log has "
        "the details."
    )


def _socket_address(key: bytes, supernode: int, run_id: int) -> str:
    # It is not in the site's folder, since its path may not be longer than some 100 characters.
    users = f"{key.hex()} {supernode} {run_id}"
    name = hashlib.sha256(users.encode()).hexdigest()[:16]
    return f"{tempfile.gettempdir()}/flsv-{name}.sock"


def _reply_through(
    open_socket: Callable[[], Connection],
    request: tuple[Any, ...],
    process: subprocess.Popen[bytes] | None,
) -> Any:
    """Return the reply of the resident process, None if it has died, or if there is none and none was started."""
    while True:
        with suppress(*_CONNECTION_ERRORS), open_socket() as connection:
            connection.send(request)
            return connection.recv()
        # There is no process, or it does not listen yet, or it has died.
        if process is None or process.poll() is not None:
            return None
        time.sleep(0.05)


def _key_file(folder: Path) -> Path:
    """Return the file with a site's key, which only the site's user can read. The first call writes it."""
    path = folder / "socket.key"
    open_private = partial(os.open, mode=0o600)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError), open(path, "xb", opener=open_private) as file:
            file.write(secrets.token_bytes(32))
    except OSError as error:
        _log.exception("The site's folder %s cannot be used.", folder)
        raise RuntimeError(
            f"nothing can be written into the site's folder: {error.strerror}"
        ) from error
    return path


_COMMAND = [sys.executable, "-c", "from flsv.sites.flower_resident import _live; _live()"]


def _live() -> None:
    """Reply to messages until none has arrived for a while, or the SuperNode has ended."""
    app, idle, address, key_file, supernode, import_paths = json.loads(sys.argv.pop())
    sys.path[:] = import_paths
    threading.Thread(target=_end_with, args=(supernode,), daemon=True).start()
    key = Path(key_file).read_bytes()
    import_module(app.partition(":")[0])
    Path(address).unlink(missing_ok=True)  # a killed process has left it
    listener = Listener(address, "AF_UNIX", authkey=key)
    while True:
        signal.setitimer(signal.ITIMER_REAL, idle)  # its signal ends this process
        with suppress(*_CONNECTION_ERRORS), listener.accept() as connection:
            request = connection.recv()
            signal.setitimer(signal.ITIMER_REAL, 0)
            connection.send(_reply_of_app(*request))


def _end_with(supernode: int) -> None:
    """End this process when the process ``supernode`` has ended."""
    with suppress(OSError):
        while True:
            os.kill(supernode, 0)  # raises an error if there is no such process of this user
            time.sleep(_WATCH_SECONDS)
    os._exit(0)
