"""The emulated accelerator of ``emulated.cpp``: built once per version of torch, registered by importing this.

torch knows one such backend per process, under one name, so only a process that is there for it may import this.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
import types
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
import torchgen
import yaml
from lightning.pytorch.accelerators import Accelerator, CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

import flsv

_SOURCE = Path(__file__).with_name("emulated.cpp")


def _without_device_check():
    """A header with the names of the operators that torch lets mix a device's tensors with CPU scalars."""
    table = Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml"
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    functions = yaml.load(table.read_text(), loader)
    names = [f["func"].split("(")[0] for f in functions if f.get("device_check") == "NoCheck"]
    listed = ",\n".join(f'"aten::{name}"' for name in names)

    return (
        f"static const std::unordered_set<std::string> WITHOUT_DEVICE_CHECK = {{\n{listed}\n}};\n"
    )


def build():
    """The shared object, in a cache folder of this user's: about 20 s the first time."""
    root = Path(torch.__file__).parent
    include = sysconfig.get_paths()["include"]
    parts = [
        _SOURCE.read_bytes(),
        torch.__version__.encode(),
        sys.version.encode(),
        str(root).encode(),
    ]
    key = hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = cache / "flsv-tests" / f"emulated-{key}" / "flsv_emulated.so"

    if target.exists():
        return target

    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError:  # no home to write to: built anew every time
        target = Path(tempfile.mkdtemp(prefix="flsv-emulated-")) / target.name

    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        (Path(folder) / "without_device_check.h").write_text(_without_device_check())
        shared_object = Path(folder) / target.name
        subprocess.run(
            [
                *("g++", "-O1", "-std=c++20", "-fPIC", "-shared"),
                "-DTORCH_EXTENSION_NAME=flsv_emulated",
                *(
                    f"-I{root}/include",
                    f"-I{root}/include/torch/csrc/api/include",
                    f"-I{include}",
                    f"-I{folder}",
                ),
                *(str(_SOURCE), "-o", str(shared_object)),
                *(
                    f"-L{root}/lib",
                    "-lc10",
                    "-ltorch_cpu",
                    "-ltorch",
                    "-ltorch_python",
                    f"-Wl,-rpath,{root}/lib",
                ),
            ],
            check=True,
        )
        shared_object.replace(target)  # at once: another process may be looking

    return target


def _load():
    spec = importlib.util.spec_from_file_location("flsv_emulated", build())
    assert spec is not None
    assert spec.loader is not None

    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _register():
    torch.utils.rename_privateuse1_backend("emulated")
    backend = types.ModuleType("torch.emulated")
    backend.is_available = backend.is_initialized = lambda: True
    backend._is_in_bad_fork = lambda: False
    backend.device_count = lambda: 1
    backend.current_device = lambda: 0
    backend.manual_seed = backend.manual_seed_all = backend.set_device = lambda _: None
    backend.synchronize = lambda device=None: None
    backend.device = lambda device: nullcontext()
    backend.get_rng_state = lambda device=0: torch.get_rng_state()
    backend.set_rng_state = lambda state, device=0: None
    backend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    backend.mem_get_info = lambda device=None: (MEMORY, MEMORY)
    backend.memory_reserved = backend.memory_allocated = lambda device=None: 0
    backend._lazy_init = lambda: None
    torch._register_device_module("emulated", backend)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


#: What it says of its memory, in bytes.
MEMORY = 1 << 30
_library = _load()
_register()
DEVICE = torch.device("emulated:0")
PACKAGE = Path(flsv.__file__).parent


def counts():
    """So far: ``operators``, copies ``to_device`` and ``to_host``, and other ``waits`` of the host for the device."""
    return _library.counts()


def our_line(frame):
    """The innermost line of flsv that has led here, else of what is not torch."""
    line_outside = None
    while frame is not None:
        path = frame.f_code.co_filename
        if Path(path).is_relative_to(PACKAGE):
            path_in_package = Path(path).relative_to(PACKAGE)
            return f"flsv/{path_in_package}:{frame.f_lineno}"
        if line_outside is None and "/torch/" not in path:
            line_outside = f"{Path(path).name}:{frame.f_lineno}"
        frame = frame.f_back

    return line_outside or "autograd"


@contextmanager
def count_by_line(at_least=0):
    """Count the copies and waits within the context by kind and by the line of flsv, else of Lightning, that asks; of
    copies only those of at least ``at_least`` numbers."""
    counts = Counter()

    def count_operation(kind, numbers):
        if numbers >= at_least:
            counts[kind, our_line(sys._getframe(1))] += 1

    _library.watch(count_operation)
    try:
        yield counts
    finally:
        _library.watch(None)


class EmulatedAccelerator(Accelerator):
    """For Lightning."""

    def setup_device(self, device): ...
    def teardown(self): ...

    @staticmethod
    def parse_devices(devices):
        return 1

    @staticmethod
    def get_parallel_devices(devices):
        return [DEVICE]

    @staticmethod
    def auto_device_count():
        return 1

    @staticmethod
    def is_available():
        return True

    @staticmethod
    def name():
        return "emulated"

    def get_device_stats(self, device):
        return {}


def on_the_device():
    """Arguments of a ``Trainer`` that trains there."""
    return {
        "accelerator": "auto",
        "strategy": SingleDeviceStrategy(DEVICE, accelerator=EmulatedAccelerator()),
    }


def put_every_trainer_on_the_device(replace):
    """Put each Trainer there that would train on the CPU; ``replace`` is ``setattr``, or that of a monkeypatch."""
    original_init = SingleDeviceStrategy.__init__

    def init_on_device(self, device="cpu", *args, **options):
        if str(device) == "cpu":
            device = DEVICE
        original_init(self, device, *args, **options)

    replace(SingleDeviceStrategy, "__init__", init_on_device)
    replace(CPUAccelerator, "setup_device", lambda self, device: None)
