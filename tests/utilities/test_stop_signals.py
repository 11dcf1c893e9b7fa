"""When a signal's error is raised: at once, between two batches, or after a time."""

import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flsv.cli import runs_with_seeds
from flsv.cli.entry import exit_status
from flsv.engines.ranks import RankGroup
from flsv.utilities.stop_signals import (
    Terminated,
    stop_if_signaled,
    stopping_between_batches,
    terminable,
)

SIGNALS = pytest.mark.parametrize(
    ("signal_number", "error"),
    [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)],
    ids=["SIGTERM", "SIGINT"],
)
SECONDS_OF_HANGING_BATCH = 30


@pytest.fixture(autouse=True)
def handler_of_terminal():
    """Python's handler of Ctrl-C, which a process has not got that a shell has started in the background."""
    previous_handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous_handler)


def receive_in_del_method(signal_number):
    """Python prints an exception that is raised in ``__del__``, and goes on."""

    class ObjectThatReceivesASignalInDel:
        def __del__(self):
            signal.raise_signal(signal_number)

    ObjectThatReceivesASignalInDel()


@pytest.mark.parametrize("receive", [signal.raise_signal, receive_in_del_method])
@SIGNALS
def test_signal_stops_a_command_even_if_received_in_a_del_method(receive, signal_number, error):
    def receive_and_sleep():
        with terminable():
            receive(signal_number)
            time.sleep(SECONDS_OF_HANGING_BATCH)

    with pytest.raises(error) as raised:
        receive_and_sleep()

    assert type(raised.value) is error


def test_signal_that_was_lost_is_not_sent_again_after_the_command():
    received_signals = list[int]()

    def record_signal(signal_number, frame):
        received_signals.append(signal_number)

    seconds_until_raised_again = 0.1
    previous_handlers = {
        number: signal.signal(number, record_signal) for number in (signal.SIGTERM, signal.SIGALRM)
    }
    try:
        with terminable():
            receive_in_del_method(signal.SIGTERM)
        time.sleep(3 * seconds_until_raised_again)
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)

    assert received_signals == []


@SIGNALS
def test_command_whose_fit_has_ended_without_coalitions_has_the_status_of_the_signal(
    signal_number, error, capsys
):
    run = SimpleNamespace(ended=True, performances={"value": {"interrupted": True}})

    def repeat(words):
        with suppress(error):  # as the training of coalitions does
            signal.raise_signal(signal_number)
        runs_with_seeds._check_complete(run, Path())

    assert exit_status(repeat, [], is_resumable=True) == 128 + signal_number
    assert "flsv: stopped" in capsys.readouterr().err


def run_batches(*batches):
    """Call the functions as the batches of a fit."""
    with terminable(), stopping_between_batches():
        for batch in batches:
            batch()
            stop_if_signaled()


def hang():
    time.sleep(SECONDS_OF_HANGING_BATCH)


@SIGNALS
def test_fit_that_received_a_signal_stops_after_the_batch(signal_number, error):
    ended_batches = []

    def receive_and_end():
        signal.raise_signal(signal_number)
        signal.raise_signal(signal.SIGTERM)  # that of rank 0, after that of the group
        ended_batches.append(1)

    with pytest.raises(error) as raised:
        run_batches(partial(ended_batches.append, 0), receive_and_end, hang)

    assert ended_batches == [0, 1]
    assert type(raised.value) is error


@SIGNALS
def test_batch_that_hangs_ends_by_a_second_signal(signal_number, error, monkeypatch):
    monkeypatch.setattr("flsv.utilities.stop_signals.SECONDS_OF_ONE_SIGNAL", 0.0)

    def receive_twice_and_hang():
        signal.raise_signal(signal_number)
        signal.raise_signal(signal_number)
        hang()

    start_time = time.monotonic()
    with pytest.raises(error):
        run_batches(receive_twice_and_hang)

    assert time.monotonic() - start_time < 1


@SIGNALS
def test_batch_that_hangs_ends_after_some_seconds(signal_number, error, monkeypatch):
    monkeypatch.setattr("flsv.utilities.stop_signals.MAX_SECONDS_OF_BATCH", 0.05)

    def receive_and_hang():
        signal.raise_signal(signal_number)
        hang()

    with pytest.raises(error):
        run_batches(receive_and_hang)


def test_signal_is_raised_in_place_of_the_error_that_it_has_caused():
    def lose_worker():
        signal.raise_signal(signal.SIGINT)
        raise RuntimeError("DataLoader worker exited unexpectedly")

    with pytest.raises(KeyboardInterrupt) as raised:
        run_batches(lose_worker)

    assert isinstance(raised.value.__context__, RuntimeError)


def test_rank_that_was_stopped_names_the_signal_and_not_the_rank_that_has_ended_before_it():
    class GroupWithoutTheOtherRank:
        rank = staticmethod(int)
        size = staticmethod(lambda: 2)

        def broadcast(self, row, owner):
            signal.raise_signal(signal.SIGTERM)
            raise RuntimeError("connection closed by peer")

    ranks = RankGroup(GroupWithoutTheOtherRank(), torch.device("cpu"))

    raised = []
    with suppress(KeyboardInterrupt), terminable(), stopping_between_batches():
        try:
            ranks.all_gather("value", "values")
        except BaseException as error:
            raised.append(type(error))

    assert raised == [Terminated]
