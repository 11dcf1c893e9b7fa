"""Quorums and deadlines: with whose answers a round ends, and what is said while it has not."""

from __future__ import annotations

from typing import Any

import pytest

from flsv.engines.remote import Packet, SecureSums, Wait, Waiting
from flsv.engines.remote.messages import failed_packet
from flsv.errors import ConfigurationError

DONE = Packet("update")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("flsv.engines.remote.waiting.time", made)
    return made


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is said in the log; caplog has it only where no earlier test has made Lightning silent."""
    lines: list[str] = []
    monkeypatch.setattr("flsv.engines.remote.waiting.rank_zero_info", lines.append)
    return lines


def test_a_quorum_is_rounded_up_and_not_by_the_error_of_a_float() -> None:
    assert [Waiting(quorum=0.55).enough(n) for n in (1, 2, 100)] == [1, 2, 55]
    assert [Waiting().enough(n) for n in (1, 7)] == [1, 7]


def test_a_round_ends_when_a_quorum_has_answered_and_the_deadline_is_over(clock: Clock) -> None:
    wait = Wait(100.0, asked=4, waiting=Waiting(quorum=0.5, deadline=10))
    three = {1: DONE, 2: DONE, 3: DONE}
    assert not wait.over(three, [4])  # all have the deadline
    clock.now = 10
    assert not wait.over({1: DONE, 2: failed_packet("no", "Lyon", False), 3: "gone (code 5)"}, [4])  # one answer
    assert wait.why_missing() == "no reply within 100 s"
    assert wait.over({1: DONE, 2: DONE}, [3, 4])
    assert wait.why_missing() == "no reply when 50% had answered and 10 s were over"


def test_a_round_ends_with_all_or_with_its_time(clock: Clock) -> None:
    wait = Wait(100.0, start=20.0, waiting=Waiting(quorum=0.5, deadline=10))
    assert wait.over({1: "gone"}, [])  # nobody is missing: not before the deadline alone
    clock.now = 119
    assert not wait.over({}, [1, 2])
    assert wait.left == 1
    clock.now = 120
    assert wait.over({}, [1, 2])


def test_those_who_are_away_count_as_asked() -> None:
    wait = Wait(100.0, asked=4, waiting=Waiting(quorum=0.75))
    assert not wait.over({1: DONE, 2: DONE}, [3])
    assert Wait(100.0, asked=3, waiting=Waiting(quorum=0.6)).over({1: DONE, 2: DONE}, [3])


def test_whom_the_server_waits_for_is_said_now_and_then(clock: Clock, said: list[str]) -> None:
    wait = Wait(600.0, start=12.0, what="round 3, train", names={7: "Lyon", 8: "Osaka"}, asked=3)
    for clock.now in range(70):
        wait.over({6: DONE}, [7, 8] if clock.now < 40 else [8])
    assert said == [
        "flsv: round 3, train: waiting for 'Lyon', 'Osaka', 15 s so far, 612 s at most.",
        "flsv: round 3, train: waiting for 'Lyon', 'Osaka', 30 s so far, 612 s at most.",
        "flsv: round 3, train: waiting for 'Osaka', 60 s so far, 612 s at most.",
    ]


def test_what_a_round_took_is_said_of_the_slowest(clock: Clock, said: list[str]) -> None:
    wait = Wait(600.0, what="round 3, train", names={7: "Lyon", 8: "Osaka"}, asked=3)
    took = [{"start": 0.5, "import": 0.0, "work": seconds, "wire": 3.0} for seconds in (0.25, 2.0)]
    replies: dict[int, Any] = {n: Packet("update", took=each) for n, each in zip((7, 8), took)}
    wait.tell(replies)  # so quick that nothing is said
    clock.now = 5.5
    wait.tell({**replies, 9: "it is still at round 2"})
    assert said == [
        "flsv: round 3, train: 2 of 3 sites in 5.5 s. The slowest, 'Osaka': start 0.5, import 0.0, work 2.0, wire 3.0."
    ]


@pytest.mark.parametrize("wrong", [{"quorum": 0}, {"quorum": 1.1}, {"deadline": -1}, {"quorum": float("nan")}])
def test_what_no_waiting_can_be_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigurationError, match="Waiting"):
        Waiting(**wrong)


def test_a_quorum_that_leaves_too_few_for_a_secure_sum_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"can leave 5 of 10 sites in a secure sum, which needs 6"):
        Waiting(quorum=0.8).check_sums(SecureSums(), 10)
    with pytest.raises(ConfigurationError, match="Raise quorum"):
        Waiting(quorum=0.6).check_sums(SecureSums(), 3)
    Waiting(quorum=0.9).check_sums(SecureSums(), 10)
    Waiting().check_sums(SecureSums(), 3)


def test_a_quorum_that_leaves_too_few_of_a_group_is_refused() -> None:
    threes, fours = [range(3), range(3, 10)], [range(4), range(4, 10)]
    with pytest.raises(ConfigurationError, match="can leave 2 sites of a group in a secure sum, which needs 3"):
        Waiting(quorum=0.9).check_sums(SecureSums(threshold=6), 10, threes)
    Waiting(quorum=1.0).check_sums(SecureSums(), 10, threes)
    Waiting(quorum=0.9).check_sums(SecureSums(threshold=6), 10, fours)
    with pytest.raises(ConfigurationError, match="sites of a group"):
        Waiting(quorum=0.85).check_sums(SecureSums(threshold=6), 10, fours)
