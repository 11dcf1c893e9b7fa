"""The display of the work after a run: a bar in a terminal, and log lines elsewhere."""

import logging
import os
import pty
import sys
import termios
from contextlib import ExitStack, suppress

import pytest

from flsv.metrics import ShadowShapley
from flsv.retraining import progress as progress_module
from flsv.retraining.progress import PAUSE_SECONDS, Progress
from helpers.fits import plain_trainer
from helpers.forked import Forked
from zoo.program import Base, fit_valued

TITLE = "Groups of clients"
END = "<end>"


class StandingClock:
    """In the place of the module ``time`` and of its function: stands still until it is set."""

    seconds = 1000.0

    def monotonic(self):
        return self.seconds

    __call__ = monotonic


@pytest.fixture
def clock(monkeypatch):
    """The clock of the log lines and of tqdm, which redraws a bar at most ten times per second."""
    clock = StandingClock()
    monkeypatch.setattr(progress_module, "time", clock)
    monkeypatch.setattr("tqdm.std.time", clock)
    return clock


class Terminal:
    """A terminal, and what is written into it."""

    def __init__(self):
        self._descriptor, screen = pty.openpty()
        rows_and_columns = (24, 80)  # tqdm draws nothing into a terminal of no columns
        termios.tcsetwinsize(screen, rows_and_columns)
        self.stream = os.fdopen(screen, "w")

    def read(self):
        """Return what has been written since the last call."""
        # The kernel hands over what is written a little later, so an end is written and waited for.
        self.stream.write(END)
        self.stream.flush()
        text = ""
        while not text.endswith(END):
            text += os.read(self._descriptor, 65536).decode()
        return text.removesuffix(END)

    def forget(self):
        """Leave what has been written so far out of what is read next."""
        self.read()

    def close(self):
        self.stream.close()
        os.close(self._descriptor)


@pytest.fixture
def terminal(monkeypatch):
    terminal = Terminal()
    yield terminal
    monkeypatch.undo()
    terminal.close()


class HandlerThatKeepsLinesOfFlsv(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        line = record.getMessage()
        if line.startswith("flsv: "):
            self.lines.append(line)


@pytest.fixture
def log_lines():
    """The lines of flsv that Lightning logs, which a pipe gets as they are."""
    handler = HandlerThatKeepsLinesOfFlsv()
    logger = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    logger.addHandler(handler)
    yield handler.lines
    logger.removeHandler(handler)


@pytest.fixture
def make_progress(tmp_path, clock):
    with ExitStack() as bars:  # a bar that is left open moves later bars to lines below it

        def make(total, shows_bars=True):
            trainer = plain_trainer(tmp_path, enable_progress_bar=shows_bars)
            progress = Progress(trainer, total, TITLE)
            bars.push(progress)
            return progress

        yield make


@pytest.fixture
def make_progress_in_terminal(make_progress, terminal, monkeypatch):
    """It is a fixture's function, since pytest takes standard error over when a test is called."""

    def make(total, shows_bars=True):
        monkeypatch.setattr(sys, "stderr", terminal.stream)
        return make_progress(total, shows_bars)

    return make


def test_bar_is_drawn_in_a_terminal_from_the_first_step_on(
    make_progress_in_terminal, terminal, clock
):
    progress = make_progress_in_terminal(total=4)

    assert terminal.read() == ""

    progress()

    assert f"{TITLE}: " in terminal.read()


def test_bar_is_drawn_before_the_first_step_inside_of_a_with_statement(
    make_progress_in_terminal, terminal, clock
):
    with make_progress_in_terminal(total=4):
        assert f"{TITLE}:   0%" in terminal.read()


def test_bar_moves_with_each_step_that_takes_long(make_progress_in_terminal, terminal, clock):
    with make_progress_in_terminal(total=4) as progress:
        terminal.forget()
        for percent in (25, 50, 75):
            clock.seconds += 9.0
            progress()
            assert f"{TITLE}:  {percent}%" in terminal.read()


def assert_last_line_is_blank(terminal):
    """Assert that the bar is overwritten by blanks, and that the cursor is at the line's begin."""
    *_, blanks, text_after_blanks = terminal.read().split("\r")
    assert blanks.isspace()
    assert len(blanks) > len(TITLE)
    assert text_after_blanks == ""


def test_bar_leaves_an_empty_line_after_the_last_step(make_progress_in_terminal, terminal, clock):
    progress = make_progress_in_terminal(total=2)
    progress()
    terminal.forget()

    clock.seconds += 1.0
    progress()

    assert_last_line_is_blank(terminal)


def test_bar_leaves_an_empty_line_after_an_error(make_progress_in_terminal, terminal, clock):
    with suppress(KeyboardInterrupt), make_progress_in_terminal(total=2) as progress:
        progress()
        terminal.forget()
        raise KeyboardInterrupt

    assert_last_line_is_blank(terminal)


def test_bar_in_a_terminal_stands_in_place_of_log_lines(
    make_progress_in_terminal, clock, log_lines
):
    progress = make_progress_in_terminal(total=4)

    for _ in range(4):
        clock.seconds += PAUSE_SECONDS
        progress()

    assert log_lines == []


def test_trainer_without_bars_logs_lines_in_a_terminal(
    make_progress_in_terminal, terminal, clock, log_lines
):
    progress = make_progress_in_terminal(total=4, shows_bars=False)

    clock.seconds += PAUSE_SECONDS
    progress()

    assert log_lines == [f"flsv: {TITLE}: 1 of 4 are done."]
    assert TITLE not in terminal.read()


def test_log_line_is_written_ten_seconds_after_the_work_began_and_not_before(
    make_progress, capsys, clock, log_lines
):
    progress = make_progress(total=4)

    clock.seconds += PAUSE_SECONDS - 0.1
    progress()
    assert log_lines == []

    clock.seconds += 0.1
    progress()
    assert log_lines == [f"flsv: {TITLE}: 2 of 4 are done."]
    assert capsys.readouterr().err == ""


def test_log_lines_of_short_steps_are_ten_seconds_apart(make_progress, clock, log_lines):
    num_steps = 200
    with make_progress(num_steps) as progress:
        for _ in range(num_steps):
            clock.seconds += 0.5
            progress()

    steps_with_lines = range(20, num_steps + 1, 20)
    assert log_lines == [f"flsv: {TITLE}: {step} of 200 are done." for step in steps_with_lines]


LINES_OF_THREE_GROUPS = [
    f"flsv: {TITLE}: 1 of 3 are done.",
    f"flsv: {TITLE}: 2 of 3 are done.",
    f"flsv: {TITLE}: 3 of 3 are done.",
]


def fit_with_lines_without_pauses(folder):
    """Fit three clients. Logs go to standard error, as they do outside of pytest."""
    logging.getLogger("lightning.pytorch").handlers = [logging.StreamHandler()]
    progress_module.PAUSE_SECONDS = 0.0
    fit_valued(folder, Base(), enable_progress_bar=True)


@pytest.mark.slow
def test_file_gets_whole_lines_of_the_work_after_a_run(tmp_path):
    process = Forked(tmp_path / "process", fit_with_lines_without_pauses, tmp_path / "run")

    status, output = process.wait()

    assert status == 0, output
    lines = output.splitlines()
    lines_of_groups = [line for line in lines if TITLE in line]
    assert lines_of_groups == LINES_OF_THREE_GROUPS
    assert any(line.startswith("flsv: Values of clients: ") for line in lines)


@pytest.mark.slow
def test_bars_of_singles_and_of_halves_count_the_trainings_that_each_has(
    tmp_path, clock, log_lines, monkeypatch
):
    monkeypatch.setattr(progress_module, "PAUSE_SECONDS", 0.0)

    fit_valued(tmp_path, Base(), metric=ShadowShapley(coalitions="halves"))

    lines_of_trainings = [
        line for line in log_lines if "of clients: " in line and "Values" not in line
    ]
    # Of two halves one is a client alone, which is trained already.
    line_of_halves = "flsv: Halves of clients: 1 of 1 are done."
    assert lines_of_trainings == [*LINES_OF_THREE_GROUPS, line_of_halves]
