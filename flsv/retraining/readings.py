"""What a coalition's training reads of the run and its fit leaves out: callbacks, loggers, validations, changed files.

Stand-ins take the place of callbacks and loggers. A stand-in is of the same class, does nothing when Lightning calls
it, and holds no result. If training reads a result from it, a value that a validation logs, or a file that the run has
changed, the coalition's process ends with the reader's name.
"""

from __future__ import annotations

import inspect
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import lightning as L
from lightning.pytorch.loggers.logger import DummyLogger, Logger

from flsv._lightning.patches import PatchedAttributes, callbacks_of
from flsv._lightning.private import (
    LoggerConnector,
    connector_of_logged_values,
    no_validation_patches,
)
from flsv.core.parameter_space import ParameterSpace
from flsv.games.lent_module import noted_changes
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.supervisor import exit_with_answer

#: Packages that may ask a stand-in without using what it would know.
_ASKING_PACKAGES = ("lightning", "flsv")
#: Packages between a reader and what it reads, whose functions are not named as the reader.
_INTERMEDIATE_PACKAGES = {*_ASKING_PACKAGES, "torch", *sys.stdlib_module_names}
#: What is wrong with reading a callback or a logger.
_WHY_NO_CALLBACK = (
    "which only watches the run or ends it, and coalitions in fresh processes lack it"
)
_WHY_NO_LOGGER = "but coalitions log nothing"
#: Attributes with a logger's folders, and where a stand-in has them.
_FOLDER_ATTRIBUTES = {
    "log_dir": "_stand_in_log_dir",
    "save_dir": "_stand_in_save_dir",
}
#: Special methods of numbers, texts and collections that hold, get or set something, and use no value.
_HOLDING_METHODS = {
    "__getitem__",
    "__setitem__",
    "__delitem__",
    "__class_getitem__",
    "__getnewargs__",
}
#: Special methods of all objects that use a value.
_COMPARING_METHODS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_SHOWING_METHODS = {"__hash__", "__str__", "__repr__", "__format__", "__fspath__"}


@dataclass(frozen=True)
class Reading:
    """Answer of a coalition's process: its training has read ``source``, such as ``"EarlyStopping.wait_count"``."""

    reader: str
    source: str
    # What is wrong with it.
    why: str
    # Whether the coalition could train with the original, which its process has.
    can_take_part: bool = False
    # Whether it could train with the validations that were left out.
    needs_validation: bool = False

    def __str__(self) -> str:
        return f"{self.reader} reads {self.source}"


class ReadingRefused(ConfigurationError):
    """Error: a coalition's training reads something of the run, such as a logger that its fit lacks."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(f"{reading}, {reading.why}. Let the module hold what it reads.")
        self.reading = reading

    def __reduce__(self) -> tuple[type, tuple[Reading]]:
        """Let a rank send the error to the others."""
        return type(self), (self.reading,)


def become_stand_in(original: L.Callback | Logger, folder: str | None = None) -> None:
    """Turn a callback or a logger into a stand-in, in place, since others may refer to it. A logger's files lie in
    ``folder`` if it is set.
    """
    # The object stays, since others may hold it, and gets another class.
    original_class: Any = type(original)
    if isinstance(original, Logger):
        vars(original).update(_folders_of(original, folder))
    if _is_stand_in_class(original_class):
        return
    if isinstance(original, Logger):
        original.__class__ = _logger_stand_in_class(original_class)
    else:
        original.__class__ = _callback_stand_in_class(original_class)


def _is_stand_in_class(some_class: type) -> bool:
    return "stand_in" in vars(some_class)


def reduced(original: L.Callback | Logger) -> tuple[Any, ...]:
    """Return how to pickle a callback or a logger as a stand-in."""
    original_class: Any = type(original)
    if isinstance(original, Logger):
        folders = _folders_of(original, None)
        return _unpickled_stand_in, (_logger_stand_in_class, original_class, folders)
    return _unpickled_stand_in, (_callback_stand_in_class, original_class, {})


def reader_name() -> str:
    """Return the name and place of the function by which the present value is read."""
    frame = _reading_frame(_INTERMEDIATE_PACKAGES)
    code = frame.f_code
    file_name = os.path.basename(code.co_filename)
    return f"{code.co_qualname} ({file_name}, line {frame.f_lineno})"


def package_reading() -> str:
    """Return the package that reads the present value, itself or by the standard library or ``fsspec``."""
    between = {"fsspec", *sys.stdlib_module_names}
    frame = _reading_frame(between, skipped=3)
    return package_of(frame)


def _reading_frame(between: set[str], skipped: int = 0) -> FrameType:
    frame = sys._getframe(2 + skipped)
    while frame.f_back is not None and package_of(frame) in between:
        frame = frame.f_back
    return frame


def package_of(frame: FrameType) -> str:
    """Return the top package of the code that runs in a frame."""
    module_name = frame.f_globals.get("__name__", "")
    return str(module_name).partition(".")[0]


def _folders_of(logger: Logger, folder: str | None) -> dict[str, str | None]:
    folders = {}  # by the names of the stand-in's attributes
    for name, stand_in_name in _FOLDER_ATTRIBUTES.items():
        logger_folder = getattr(logger, name)
        if logger_folder is None or folder is None:
            folders[stand_in_name] = logger_folder
        else:
            folders[stand_in_name] = folder
    return folders


def _unpickled_stand_in(make_class: Any, original_class: type, attributes: dict[str, Any]) -> Any:
    stand_in_class = make_class(original_class)
    stand_in = object.__new__(stand_in_class)
    vars(stand_in).update(attributes, _stand_in_is_unpickled=True)
    return stand_in


def _is_read_by_libraries(name: str, frame: FrameType) -> bool:
    """Return whether an attribute is read by Lightning, by flsv, or by Python itself."""
    is_special = name.startswith("__") and name != "__dict__"
    return is_special or package_of(frame) in _ASKING_PACKAGES


def _attribute_without_state(base: type, stand_in: Any, name: str) -> Any:
    """Return an attribute of an object of class ``base`` that has no state."""
    attribute = inspect.getattr_static(base, name)
    if hasattr(attribute, "__get__"):
        return attribute.__get__(stand_in, type(stand_in))
    return attribute


@cache
def _callback_stand_in_class(callback_class: type[L.Callback]) -> type[L.Callback]:
    # It is the __getattribute__ of the class that stands for a callback in a coalition's process.
    def get_attribute(stand_in: Any, name: str) -> Any:
        reading_frame = sys._getframe(1)

        # The training depends on the callback: `exit_with_answer` ends this process with the reader's name.
        if not _is_read_by_libraries(name, reading_frame):
            attribute = f"{callback_class.__name__}.{name}"
            has_original = not object.__getattribute__(stand_in, "_stand_in_is_unpickled")
            exit_with_answer(
                Reading(reader_name(), attribute, _WHY_NO_CALLBACK, can_take_part=has_original)
            )

        # Hooks do nothing. Python and flsv get the stand-in's own attributes, libraries get None.
        is_special = name.startswith("__")
        is_hook = not is_special and hasattr(L.Callback, name)
        if is_hook:
            return _attribute_without_state(L.Callback, stand_in, name)
        if is_special or package_of(reading_frame) == "flsv":
            return object.__getattribute__(stand_in, name)
        return None

    return _stand_in_class(callback_class, get_attribute, make_class=_callback_stand_in_class)


@cache
def _logger_stand_in_class(logger_class: type[Logger]) -> type[Logger]:
    def get_attribute(stand_in: Any, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(stand_in, name)
        if name in _FOLDER_ATTRIBUTES:
            return object.__getattribute__(stand_in, _FOLDER_ATTRIBUTES[name])
        is_method = inspect.isfunction(vars(Logger).get(name))
        is_title = name in ("name", "version")
        if is_method or (is_title and _is_read_by_libraries(name, sys._getframe(1))):
            return _attribute_without_state(DummyLogger, stand_in, name)
        # It answers only if its value is used, since modules log for others to read.
        return _Nothing(f"{logger_class.__name__}.{name}")

    return _stand_in_class(logger_class, get_attribute, make_class=_logger_stand_in_class)


def _stand_in_class(
    original_class: type,
    get_attribute: Callable[[Any, str], Any],
    make_class: Callable[[Any], type],
) -> Any:
    """Return a subclass of ``original_class`` whose attributes ``get_attribute`` returns."""

    def reduce(stand_in: Any, _protocol: Any) -> Any:
        # Pickle has no name for a class made at run time: the other process makes it anew.
        attributes = vars(stand_in)
        names = _FOLDER_ATTRIBUTES.values()
        folders = {name: attributes[name] for name in names if name in attributes}
        return _unpickled_stand_in, (make_class, original_class, folders)

    class_attributes = {
        "__module__": original_class.__module__,
        "__qualname__": original_class.__qualname__,
        "__getattribute__": get_attribute,
        "__reduce_ex__": reduce,
        "stand_in": True,
        "_stand_in_is_unpickled": False,
    }
    metaclass = type(original_class)  # a class of another one could not inherit
    return metaclass(original_class.__name__, (original_class,), class_attributes)


class _Nothing:
    """What a logger would give. It may be called, entered and set, and tells who uses it as a value."""

    def __init__(self, attribute: str) -> None:
        vars(self)["_stand_in_source"] = attribute

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(f"{self._stand_in_source}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _Nothing(f"{self._stand_in_source}()")

    def __getitem__(self, key: Any) -> Any:
        return _Nothing(f"{self._stand_in_source}[{key!r}]")

    def __setattr__(self, name: str, value: Any) -> None:
        pass

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __delitem__(self, key: Any) -> None:
        pass

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _using(name: str) -> Any:
    def use(nothing: Any, *args: Any) -> NoReturn:
        attribute = vars(nothing)["_stand_in_source"]
        exit_with_answer(Reading(reader_name(), attribute, _WHY_NO_LOGGER))

    use.__name__ = name
    return use


def _special_methods(kind: type) -> set[str]:
    names = set()
    for name, value in vars(kind).items():
        is_special = name.startswith("__") and name not in vars(object)
        if is_special and callable(value):
            names.add(name)
    return names


for _kind in (bool, int, float, str, bytes, list, dict, set):
    _uses = _special_methods(_kind) - _HOLDING_METHODS
    for _name in _uses | _COMPARING_METHODS | _SHOWING_METHODS:
        setattr(_Nothing, _name, _using(_name))


#: What is wrong with reading such a file.
_WHY_NO_CHANGED_FILE = "which the run has changed since its first round"
#: Folders whose files are no files, except :data:`_SHARED_MEMORY_FOLDER`.
_DEVICE_FOLDERS = ("/proc/", "/sys/", "/dev/")
_SHARED_MEMORY_FOLDER = "/dev/shm/"
#: Packages whose listings of folders choose a new name.
_NAMING_PACKAGES = ("lightning", "flsv")
#: Number of frames from `_check_listing` to the code that lists a folder, over _check_event and __call__.
_FRAMES_TO_LISTING = 3
#: Longest time between two ticks of a kernel, at 100 a second.
_TICK_SECONDS = 0.01
_READING_EVENTS = ("sqlite3.connect", "mmap.__new__")
_LISTING_EVENTS = ("os.listdir", "os.scandir")


def file_time() -> float:
    """Return a time that lies between the file changes made before the call and those made after it."""
    now = time.time()
    # A changed file gets the time of the kernel's last tick, which may lie before now.
    time.sleep(_TICK_SECONDS)
    return now


class ChangedFiles:
    """Audit hook that ends this process if it reads a file that was changed between two times."""

    def __init__(self, start_time: float, end_time: float) -> None:
        self._start_time = start_time
        self._end_time = end_time
        # For each file that this process has opened only to write: whether nothing of the run is in it.
        self._is_clean: dict[str, bool] = {}
        self._is_looking = False

    def watch(self) -> None:
        """Check the files that are open, and from now on those that are opened."""
        for path in sorted(set(_paths_open_to_read())):  # a library's file is mapped in parts
            if self._is_changed(path):
                exit_with_answer(
                    Reading("an open file or memory map", repr(path), _WHY_NO_CHANGED_FILE)
                )
        sys.addaudithook(self)

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._is_looking:
            return
        self._is_looking = True
        try:
            self._check_event(event, arguments)
        finally:
            self._is_looking = False

    def _check_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":  # of (name, mode, flags)
            name = arguments[0]
            flags = arguments[2]
            self._note_opened(name, flags)
        elif event in _READING_EVENTS:
            self._check_read(_path(arguments[0]))
        elif event in _LISTING_EVENTS:
            self._check_listing(_path(arguments[0] or "."))
        elif event == "os.remove":
            self._is_clean[_path(arguments[0])] = True
        elif event == "os.rename":
            source = _path(arguments[0])
            target = _path(arguments[1])
            self._is_clean[target] = not self._has_parts_of_the_run(source)

    def _note_opened(self, name: Any, flags: Any) -> None:
        path = _path(name)
        if not isinstance(flags, int) or path.endswith(".pyc"):
            return
        is_emptied = bool(flags & os.O_TRUNC)
        is_only_written = flags & os.O_ACCMODE == os.O_WRONLY
        # A file is clean if nothing of the run is in it.
        if is_emptied:
            self._is_clean[path] = True
        elif is_only_written:
            self._is_clean[path] = not self._has_parts_of_the_run(path)
        else:
            self._check_read(path)

    def _check_read(self, path: str) -> None:
        if self._has_parts_of_the_run(path):
            exit_with_answer(Reading(reader_name(), repr(path), _WHY_NO_CHANGED_FILE))

    def _check_listing(self, folder: str) -> None:
        listing_code = sys._getframe(_FRAMES_TO_LISTING).f_code
        if listing_code.co_filename.startswith("<frozen"):  # an import
            return
        if package_reading() in _NAMING_PACKAGES or not self._may_be_changed(folder):
            return
        # Whoever lists a folder may depend on each file's presence.
        with suppress(OSError):
            for name in os.listdir(folder):
                self._check_read(os.path.join(folder, name))

    def _has_parts_of_the_run(self, path: str) -> bool:
        is_clean = self._is_clean.get(path)
        if is_clean is None:
            return self._is_changed(path)
        return not is_clean

    def _may_be_changed(self, folder: str) -> bool:
        try:
            return os.stat(folder).st_ctime >= self._start_time and not _is_device(folder)
        except OSError:
            return False

    def _is_changed(self, path: str) -> bool:
        try:
            status = os.stat(path)
        except (OSError, ValueError):
            return False
        if stat.S_ISDIR(status.st_mode) or _is_device(path):
            return False
        return self._start_time <= status.st_ctime <= self._end_time


def _is_device(path: str) -> bool:
    return path.startswith(_DEVICE_FOLDERS) and not path.startswith(_SHARED_MEMORY_FOLDER)


def _path(name: Any) -> str:
    if isinstance(name, int):  # a file descriptor
        return os.path.realpath(f"/proc/self/fd/{name}")
    text = os.fsdecode(name)
    if text.startswith("file:"):  # a URI of SQLite's, with options after "?"
        path, _, _ = text.removeprefix("file:").partition("?")
    else:
        path = text
    return os.path.realpath(path)


def _paths_open_to_read() -> Iterator[str]:
    # Open files.
    descriptors = Path("/proc/self/fd")  # only Linux has these lists
    if not descriptors.is_dir():
        return
    for descriptor in descriptors.iterdir():
        with suppress(OSError):
            information = Path("/proc/self/fdinfo", descriptor.name)
            # One line is "flags:", then the flags in octal.
            _, _, after_label = information.read_text().partition("flags:")
            flags = int(after_label.split()[0], base=8)
            is_only_read = flags & os.O_ACCMODE == os.O_RDONLY
            if is_only_read:
                yield os.readlink(descriptor)

    # Memory maps.
    for line in Path("/proc/self/maps").read_text().splitlines():
        # address, permissions, offset, device, inode and, if it maps a file, path
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith("/"):
            yield fields[5]


#: Packages whose hooks and reads are known not to depend on a validation, unless a scheduler does.
_PACKAGES_WITH_KNOWN_READS = ("lightning", "pytorch_lightning", "flsv")
#: Packages whose modules' hooks are known.
_PACKAGES_WITH_KNOWN_HOOKS = ("flsv", "lightning", "pytorch_lightning", "torch", "builtins")
_HOOK_PREFIXES = ("on_validation_", "on_sanity_check_")
_WHY_NO_VALIDATION = "which coalitions lack if they do not validate"


class OmittedValidation:
    """Omission of the validations of a Trainer's fit.

    They are run if a hook of the module, a callback or a scheduler sees them. Whoever reads a logged value ends the
    process with its name.
    """

    def __init__(self) -> None:
        self._patches: PatchedAttributes | None = None

    def begin(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Leave out validations from now on, unless a hook of the module or a callback sees them."""
        if has_validation_hook(trainer, module):
            return
        connector = connector_of_logged_values(trainer)
        patches = [
            *no_validation_patches(trainer),
            (connector, "__class__", _ConnectorReportingReaders),
        ]
        self._patches = PatchedAttributes(patches)

    def end_if_scheduled(self, trainer: L.Trainer) -> None:
        """Run validations again if a scheduler steps by a logged value. It is called before the first round."""
        is_scheduled = any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs)
        if is_scheduled and self._patches is not None:
            self._patches.restore()
            self._patches = None


def observe_first_validation(trainer: L.Trainer, space: ParameterSpace, changes: list[str]) -> None:
    """Add to ``changes`` the names of what a fit's next validation changes, since later training may read it."""
    validation_loop: Any = trainer.fit_loop.epoch_loop.val_loop
    original_run = validation_loop.run

    def observed_run() -> Any:
        stop_observing(trainer)  # after the first validation
        with noted_changes(trainer.lightning_module, space) as changed_names:
            outputs = original_run()
        changes.extend(changed_names)
        return outputs

    validation_loop.run = observed_run


def stop_observing(trainer: L.Trainer) -> None:
    """Undo :func:`observe_first_validation`."""
    validation_loop: Any = trainer.fit_loop.epoch_loop.val_loop
    vars(validation_loop).pop("run", None)


def has_validation_hook(trainer: L.Trainer, module: L.LightningModule) -> bool:
    """Return whether the module or a callback has a hook of validation that is not of flsv or an idle one."""
    callbacks = callbacks_of(trainer)
    originals = [callback for callback in callbacks if not _is_stand_in_class(type(callback))]
    return bool(validation_hooks(module, originals))


def validation_hooks(module: L.LightningModule, callbacks: Sequence[L.Callback]) -> list[str]:
    """List the hooks of validation that training may depend on, such as ``"Net.on_validation_end"``."""
    hooks = _hooks_of(module, L.LightningModule, _PACKAGES_WITH_KNOWN_HOOKS)
    for callback in callbacks:
        hooks += _hooks_of(callback, L.Callback, ("flsv", "builtins"))
    return hooks


def _hooks_of(owner: Any, lightning_base: type, idle_packages: tuple[str, ...]) -> list[str]:
    attributes = set(vars(owner))
    for parent in type(owner).__mro__:
        package, _, _ = parent.__module__.partition(".")
        if parent is not lightning_base and package not in idle_packages:
            attributes.update(vars(parent))

    class_name = type(owner).__name__
    hook_names = [name for name in sorted(attributes) if name.startswith(_HOOK_PREFIXES)]
    return [f"{class_name}.{name}" for name in hook_names]


class _ConnectorReportingReaders(LoggerConnector):
    """Holder of logged values that ends this process with the name of who reads them."""

    @property
    def callback_metrics(self) -> Any:
        _report_reader(sys._getframe(1), "callback_metrics")
        return super().callback_metrics

    @property
    def logged_metrics(self) -> Any:
        _report_reader(sys._getframe(1), "logged_metrics")
        return super().logged_metrics

    @property
    def progress_bar_metrics(self) -> Any:
        _report_reader(sys._getframe(1), "progress_bar_metrics")
        return super().progress_bar_metrics


def _report_reader(frame: FrameType, name: str) -> None:
    """Answer with the reader's name, unless Lightning or flsv reads."""
    is_property = frame.f_code.co_name == name and frame.f_back is not None
    reading_frame: Any = frame.f_back if is_property else frame
    if package_of(reading_frame) not in _PACKAGES_WITH_KNOWN_READS:
        reading = Reading(
            reader_name(), f"trainer.{name}", _WHY_NO_VALIDATION, needs_validation=True
        )
        exit_with_answer(reading)
