"""A pytest plugin: each Trainer of a test that would train on the CPU trains on the emulated accelerator.

FLSV_EMULATED=1 pytest -p device.on_emulated tests/federation
"""

from typing import Any

from device.emulated import DEVICE
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

made = SingleDeviceStrategy.__init__


def on_the_device(self: SingleDeviceStrategy, device: Any = "cpu", *args: Any, **options: Any) -> None:
    made(self, DEVICE if str(device) == "cpu" else device, *args, **options)


SingleDeviceStrategy.__init__ = on_the_device
CPUAccelerator.setup_device = lambda self, device: None
