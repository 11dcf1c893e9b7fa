"""Programs whose loss grows with each step, by a number that stands outside of the module's state_dict."""

import tempfile
from pathlib import Path

from zoo.program import Base


class Counting(Base):
    """Weighs its loss by a number that ``next`` returns, as warm-ups and curricula do."""

    def next(self):
        raise NotImplementedError

    def training_step(self, batch, batch_idx):
        return (1 + 0.02 * self.next()) * self.loss(batch)


class CountsInClosure(Counting):
    """Counts in a variable of an enclosing function, as factories of schedules do."""

    def __init__(self):
        super().__init__()
        calls = 0

        def count_calls():
            nonlocal calls
            calls += 1
            return calls

        self.count_calls = count_calls

    def next(self):
        return self.count_calls()


class Slots:
    """An object without a ``__dict__``, as libraries write small records."""

    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


class CountsInSlots(Counting):
    """Counts in an object without a ``__dict__``, as meters of libraries do."""

    def __init__(self):
        super().__init__()
        self.slots = Slots()

    def next(self):
        self.slots.number += 1
        return self.slots.number


CALLS = 0


class CountsInGlobal(Counting):
    """Counts in a global variable, as scripts and notebooks do."""

    def next(self):
        global CALLS
        CALLS += 1
        return CALLS


class CountsInClass(Counting):
    """Counts in an attribute of the class, where a user meant one of the instance."""

    num_steps = 0

    def next(self):
        CountsInClass.num_steps += 1
        return CountsInClass.num_steps


class CountsInFile(Counting):
    """Counts in a file of a folder that ``setup`` makes, as programs with caches on disk do."""

    def setup(self, stage):
        self.file = Path(tempfile.mkdtemp(), "calls.txt")
        self.file.write_text("0")

    def next(self):
        calls = int(self.file.read_text()) + 1
        self.file.write_text(str(calls))
        return calls


class ReadsOpenFile(Counting):
    """Reads its next number from a file that stays open, as readers of large data sets do."""

    def __init__(self):
        super().__init__()
        path = Path(tempfile.mkdtemp(), "numbers")
        path.write_bytes(bytes(range(256)) * 20)
        self.file = path.open("rb", buffering=0)

    def next(self):
        return self.file.read(1)[0]


class ReadsProgress(Base):
    """Weighs its loss by how many batches and steps the Trainer has counted, as warm-ups without a schedule do."""

    def training_step(self, batch, batch_idx):
        num_batches = self.trainer.fit_loop.epoch_loop.total_batch_idx
        factor = 1 + 0.02 * num_batches + 0.01 * self.global_step
        return factor * self.loss(batch)
