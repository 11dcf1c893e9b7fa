"""A site's process that lives through a run. Flower starts a process for every message, and that one hands it over."""

from __future__ import annotations

import json
import logging
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from lightning_utilities.core.imports import RequirementCache

if not (_flower := RequirementCache("flwr>=1.41")):
    raise ModuleNotFoundError(f"flsv.engines.flower_resident needs Flower: pip install 'flsv[flower]'. {_flower}")

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.supercore.task_identity import TaskIdentity

from flsv.errors import ConfigurationError

# Neither torch nor Lightning nor the app itself may be imported from here: that is what a message need not wait for.

__all__ = ["resident"]

#: Seconds between two looks whether the process is still needed.
LOOK = 0.5
#: What a reply says of its seconds: a record of this name.
TOOK = "took"
#: Where Flower installs what an app depends on (``--allow-runtime-dependency-installation``).
ENVIRONMENTS = "runtime-envs"
_log = logging.getLogger(__name__)


def resident(app: str, *, idle: float = 300.0) -> ClientApp:
    """A Flower ClientApp that hands every message to one process, which has imported the app at the first message.

    Flower starts a process for every message, in which the import of torch and Lightning takes most of the time. Put
    this into a file of its own that imports nothing else, and name it as ``clientapp`` in ``pyproject.toml``.

    The process is the site's own: started by its SuperNode's, under the same user, reached through a socket in the
    site's folder that nobody else may use. It ends with the SuperNode, where the message that it works on is given up,
    or when nothing has come for ``idle`` seconds. Where it has died, the next message starts another one, and one over
    which it has died goes to another one once. Where no such process can be (on Windows, or where Flower installs
    dependencies anew for every message), each message is answered in its own.

    Its data module is made once: data that change within a run are seen after the next start of the SuperNode.

    Args:
        app: where the ClientApp is that :func:`flsv.engines.flower.client_app` has made, ``"package.module:name"``.
        idle: seconds without a message after which the process ends. 0: every message in a process of its own.

    Raises:
        ConfigurationError: another ``app`` or ``idle``.

    Example:
        >>> app = resident("fedapp.federation:client")
    """
    if not isinstance(app, str) or app.count(":") != 1 or not idle >= 0:
        raise ConfigurationError(
            f'resident({app!r}, idle={idle!r}): expected a place such as "fedapp.federation:client", and seconds.'
        )

    def answer(message: Message, context: Context) -> Message:
        start, began = _age(), time.monotonic()
        place = _place(context) if idle else None
        reply = None if place is None else _hand_over(app, place, idle, message, context)
        if reply is None:  # in this process, as Flower alone would have it
            try:
                client, importing = _load(app), time.monotonic() - began
                reply = client(message, context), importing
            except Exception as error:
                _log.exception("the app could not answer")
                raise RuntimeError(_untold(error)) from None
        answered, importing = reply
        if answered.has_content():
            seconds = {"start": start, "import": importing, "work": time.monotonic() - began - importing}
            answered.content[TOOK] = ConfigRecord(dict(seconds))
        return answered

    made = ClientApp()
    for register in (made.train(), made.query(), made.evaluate()):
        register(answer)
    return made


def _load(app: str) -> ClientApp:
    module, _, name = app.partition(":")
    made: ClientApp = getattr(import_module(module), name)
    return made


def _age() -> float:
    """Seconds since this process was started; 0 where only Linux would know."""
    stat = Path("/proc/self/stat")
    if not stat.is_file():
        return 0.0
    started = int(stat.read_text().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def _place(context: Context) -> Path | None:
    """The socket of this site's process for this run; None where there cannot be one."""
    name = context.node_config.get("site")
    # What Flower has installed for this message, it deletes when this process ends.
    installed = any(ENVIRONMENTS in Path(each).parts for each in sys.path)
    if installed or not hasattr(socket, "AF_UNIX") or not isinstance(name, str):
        return None
    folder = Path(str(context.node_config.get("folder", "flsv-sites"))) / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder.absolute() / f"{context.run_id}.sock"


def _hand_over(app: str, place: Path, idle: float, message: Message, context: Context) -> tuple[Message, float] | None:
    """The reply of the site's process, and the seconds until it was there; None where it cannot be started.

    Raises:
        RuntimeError: the app has raised an error there, or it has died twice over this message.
    """
    began = time.monotonic()
    identity = [TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id]
    for again in (False, True):
        link = (None if again else _connected(place)) or _started(app, place, idle)
        if link is None:
            return None
        importing = time.monotonic() - began
        try:
            with link, link.makefile("rwb") as file:
                pickle.dump((identity, message, context), file)
                file.flush()
                reply, state, error = pickle.load(file)
        except (EOFError, OSError, pickle.UnpicklingError):
            _log.warning("the site's process has died over a message: another one is started")
            continue
        if error is not None:
            raise RuntimeError(error)
        context.state = state
        return reply, importing
    raise RuntimeError("the site's process has died twice over this message: the system's log may say why")


@contextmanager
def _within(folder: Path) -> Iterator[None]:
    """A socket's whole path may be too long for the system; its name within its folder is not."""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _connected(place: Path) -> socket.socket | None:
    """To the process that listens there, if one does; only to one of this user, that nobody else can reach."""
    link = socket.socket(socket.AF_UNIX)
    try:
        known = place.stat()
        if known.st_uid == os.getuid() and not known.st_mode & 0o077:
            with _within(place.parent):
                link.connect(place.name)
            return link
    except OSError:  # there is none, or it has been killed
        pass
    link.close()
    return None


def _started(app: str, place: Path, idle: float) -> socket.socket | None:
    """To a new process; None where it did not come to listen."""
    told = {"app": app, "place": str(place), "idle": idle, "parent": os.getppid(), "path": sys.path}
    code = "from flsv.engines.flower_resident import _live; _live()"
    ready, listening = os.pipe()
    with open(ready, "rb") as answer:
        try:
            command = [sys.executable, "-c", code, json.dumps({**told, "ready": listening})]
            subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[listening])
        finally:
            os.close(listening)
        said = answer.read()  # until it listens, or is no more
    link = _connected(place) if said else None
    if link is None:
        _log.warning("the site's process did not start: see above. This message is answered in a process of its own")
    return link


class _Needed:
    """Ends this process when nobody needs it.

    Args:
        place: its socket.
        parent: the process whose end is that of the SuperNode.
        idle: seconds without a message.
    """

    def __init__(self, place: Path, parent: int, idle: float) -> None:
        self._place, self._parent, self._idle = place, parent, idle
        self._own, self._since = place.stat().st_ino, time.monotonic()
        self._link: socket.socket | None = None
        threading.Thread(target=self._watch, daemon=True).start()

    @contextmanager
    def by(self, link: socket.socket) -> Iterator[None]:
        """While a message is worked on."""
        self._link = link
        try:
            yield
        finally:
            self._link, self._since = None, time.monotonic()

    def _watch(self) -> NoReturn:
        while True:
            time.sleep(LOOK)
            link = self._link
            idle = link is None and time.monotonic() - self._since > self._idle
            if idle or not _alive(self._parent) or (link is not None and _hung_up(link)):
                self.end()

    def end(self) -> NoReturn:
        """At once, as Flower's own process would be ended."""
        with suppress(OSError):
            if self._place.stat().st_ino == self._own:  # else another one listens there by now
                self._place.unlink()
        sys.stderr.flush()
        os._exit(0)


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _hung_up(link: socket.socket) -> bool:
    """Whether who waits for the reply is gone: it says nothing after its message but its end."""
    try:
        return bool(select.select([link], [], [], 0)[0])
    except (OSError, ValueError):  # closed here in the meantime
        return False


def _live() -> None:
    """In the process itself."""
    told: dict[str, Any] = json.loads(sys.argv[-1])
    sys.argv, sys.path[:] = sys.argv[:1], told["path"]
    place, ready = Path(told["place"]), told["ready"]
    app = _load(told["app"])
    listener = socket.socket(socket.AF_UNIX)
    with _within(place.parent):
        with suppress(FileNotFoundError):
            os.unlink(place.name)
        before = os.umask(0o177)
        listener.bind(place.name)
        os.umask(before)
    listener.listen()
    needed = _Needed(place, told["parent"], told["idle"])
    os.write(ready, b"listening")
    os.close(ready)
    with suppress(KeyboardInterrupt):
        while True:
            link, _ = listener.accept()
            # Outermost: a file that is closed sends what it still has.
            with suppress(EOFError, ConnectionError, pickle.UnpicklingError), link, link.makefile("rwb") as file:
                given = pickle.load(file)
                with needed.by(link):
                    answered = _answered(app, *given)
                pickle.dump(answered, file)
                file.flush()
    needed.end()


def _answered(app: ClientApp, identity: list[int], message: Message, context: Context) -> tuple[Any, Any, str | None]:
    """The reply, what the app keeps in Flower's context, and its error, if it has raised one."""
    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = identity
    try:
        return app(message, context), context.state, None
    except Exception as error:
        _log.exception("the app could not answer")
        return None, None, _untold(error)


def _untold(error: Exception) -> str:
    """What Flower may tell the server of an error: its text may be of the samples."""
    return f"{type(error).__name__}, the site's own log says more"
