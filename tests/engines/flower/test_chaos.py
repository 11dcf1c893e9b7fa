"""A SuperNode stopped, a name stolen, the SuperLink killed, and two runs at once: nothing of either run is lost."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="needs pip install 'flsv[flower]'")

from chaos_trial import Trial, project
from flower_deployment import ACCEPTED

pytestmark = pytest.mark.flower
ROUNDS = 3


def test_two_runs_lose_nothing(tmp_path: Path) -> None:
    """Both give what each gives in one process, to the bit."""
    with project(tmp_path / "app") as deployed:
        first = Trial("first", deployed, ROUNDS, 240, wrong={("server", 1): "waits", ("Osaka", 2): "waits"})
        second = Trial("second", deployed, ROUNDS, 240, wrong={("Boston", 1): "waits"})
        first.start()
        first.wait_until_busy("server", 1)
        second.start()
        second.wait_for_sites()
        deployed.start_site("Thief", says="Osaka")
        deployed.wait_for("Thief", lambda log: ACCEPTED in log)
        first.go_on(1)
        first.wait_until_busy("Osaka", 2)
        deployed.signal("Osaka", signal.SIGSTOP)
        first.go_on(2)
        time.sleep(5)
        deployed.signal("Osaka", signal.SIGCONT)
        second.wait_until_busy("Boston", 1)
        deployed.kill("link")
        second.go_on(1)
        deployed.start_link()
        first.wait()
        second.wait()
    for trial in (first, second):
        assert trial.lost() == []
        assert trial.differences() == []
    # The words depend on whether the site itself was there when the other came.
    assert re.search("a second node calls itself site 'Osaka'|is not the one that did so first", second.log())
    assert "it is started again" in second.log()
    # What is compared would tell.
    table = first.folder / "contributions.csv"
    table.write_text(table.read_text().replace("\n1,", "\n0,", 1))
    assert first.differences()
