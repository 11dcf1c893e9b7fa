"""``pytest --processor-seconds=40`` lists the tests that take most processor seconds, their processes with them.
Seconds of a clock, which ``--durations`` gives, depend on what else the machine does."""

import os
from collections import Counter

import pytest

SECONDS = Counter()


def seconds_until_now():
    return sum(os.times()[:4])


#: Until the last report.
LAST = {"seconds": seconds_until_now()}


def pytest_addoption(parser):
    text = "list the N tests that take most processor seconds"
    parser.addoption("--processor-seconds", type=int, default=0, metavar="N", help=text)


def pytest_runtest_logstart():
    LAST["seconds"] = seconds_until_now()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    """Add the seconds of a test's phase to its report, which workers send."""
    report = yield
    seconds = seconds_until_now()
    report.processor_seconds = seconds - LAST["seconds"]
    LAST["seconds"] = seconds
    return report


def pytest_runtest_logreport(report):
    SECONDS[report.nodeid] += report.processor_seconds


def pytest_terminal_summary(terminalreporter, config):
    count = config.getoption("processor_seconds")
    if count:
        terminalreporter.section(f"processor seconds: {SECONDS.total():.0f}")
        for test, seconds in SECONDS.most_common(count):
            terminalreporter.line(f"{seconds:7.2f} {test}")
