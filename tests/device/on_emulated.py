"""A pytest plugin: each Trainer of a test that would train on the CPU trains on the emulated accelerator.

FLSV_EMULATED=1 pytest -p device.on_emulated tests/federation
"""

from device.emulated import put_every_trainer_on_the_device

put_every_trainer_on_the_device(setattr)
