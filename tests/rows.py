"""Which rows of a test are run: ``fast_rows`` says which ones are not slow, and ``pytest --turn N`` leaves out those of
tests ``by_turn`` whose turn it is not."""

from fnmatch import fnmatchcase

import pytest

#: After so many turns each row has run.
TURNS = 5


def pytest_addoption(parser):
    text = "of tests marked by_turn run each fifth slow row, with the next number the next ones"
    parser.addoption("--turn", type=int, metavar="N", help=text)


def pytest_report_header(config):
    turn = config.getoption("turn")
    if turn is None:
        return None
    return f"rows by turn: those of --turn {turn % TURNS}"


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem(collector):
    collected = yield
    if not isinstance(collected, list) or not collected:
        return collected
    test = collected[0]

    fast_rows = test.get_closest_marker("fast_rows")
    if fast_rows is not None:
        mark_slow_rows(collected, fast_rows.args)

    turn = collector.config.getoption("turn")
    if turn is None or test.get_closest_marker("by_turn") is None:
        return collected
    return rows_of_turn(collected, turn)


def mark_slow_rows(rows, patterns):
    """Mark rows ``slow`` but those that ``fast_rows("a", "b*")`` names by their ids, or the first one."""
    fast_rows = [] if patterns else rows[:1]
    for pattern in patterns:
        matching_rows = [row for row in rows if fnmatchcase(row.callspec.id, pattern)]
        assert matching_rows, f"{rows[0].nodeid} and the others: no row {pattern!r}"
        fast_rows += matching_rows

    for row in rows:
        if row not in fast_rows:
            row.add_marker(pytest.mark.slow)


def rows_of_turn(rows, turn):
    """Return the rows that are fast, and those of the others whose turn it is."""
    slow_rows = [row for row in rows if row.get_closest_marker("slow")]
    waiting = {row for place, row in enumerate(slow_rows) if turn_of(place) != turn % TURNS}
    return [row for row in rows if row not in waiting]


def turn_of(place):
    """Return the turn of a row: of each five rows another one, and of the next five the next one, so that a turn has a
    diagonal of a grid."""
    return (place + place // TURNS) % TURNS


def names_of_rows(request, test):
    """Return the argument ``name`` of the rows of a test that are run, for a fixture that trains what they ask for."""
    return [
        row.callspec.params["name"]
        for row in request.session.items
        if getattr(row, "function", None) is test
    ]
