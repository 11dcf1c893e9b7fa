"""The board is what runs have come to, and renews itself as long as one of them goes on."""

from __future__ import annotations

import json
import os
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from made_runs import make_run

from flsv.cli import main
from flsv.errors import ConfigurationError
from flsv.report.board import Board, board_page, runs_in
from flsv.report.page import to_markdown


@contextmanager
def served(folders: Sequence[Path]) -> Iterator[Board]:
    with Board(folders, every=3) as board:
        thread = threading.Thread(target=board.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield board
        finally:
            board.shutdown()
            thread.join()


def test_it_renews_itself_until_the_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ended=False)
    with served([run]) as board:
        assert board.server_address[0] == "127.0.0.1"
        with urllib.request.urlopen(board.url) as answer:
            assert answer.headers["Refresh"] == "3"
            text = answer.read().decode()
        assert "Boston" in text
        assert "A run, as it goes on" in text
        assert "<script" not in text
        make_run(run)
        with urllib.request.urlopen(f"{board.url}/?again") as answer:
            assert answer.headers["Refresh"] is None
            assert "A run, at the end" in answer.read().decode()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{board.url}/../etc/passwd")
        with pytest.raises(ConfigurationError, match=f"port {board.server_address[1]} cannot be used"):
            Board([run], port=board.server_address[1])


def test_a_run_that_has_not_begun_is_waited_for(tmp_path: Path) -> None:
    page, goes_on = board_page([tmp_path])
    assert goes_on
    assert "Nothing yet." in to_markdown(page)
    make_run(tmp_path / "version_0", ended=False)
    assert "Boston" in to_markdown(board_page([tmp_path])[0])


def test_several_runs_stand_side_by_side(tmp_path: Path) -> None:
    for number in range(10):
        make_run(tmp_path / f"version_{number}", rounds=number + 2)
        os.utime(tmp_path / f"version_{number}", (number, number))
    assert [path.name for path in runs_in(tmp_path)] == [f"version_{number}" for number in range(9, 1, -1)]
    text = to_markdown(board_page([tmp_path / "version_3", tmp_path / "version_5", tmp_path / "version_3"])[0])
    assert "2 runs, at the end" in text
    assert text.count("Shares, side by side") == 1
    make_run(tmp_path / "others", names=("A", "B", "C", "D"))
    text = to_markdown(board_page([tmp_path / "version_3", tmp_path / "others"])[0])
    assert "Shares, side by side" not in text


def test_who_was_warned_of_is_named(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", ended=False)
    record = json.loads((run / "run.json").read_text())
    record["copies"], record["named"] = [[0, 2]], {"1": [2, 5]}
    record["incidents"] = [
        {"client": 3, "what": "is left out: it is away", "first": 1, "last": 4, "times": 3},
        {"client": 1, "what": "did not <b>answer</b>", "first": 2, "last": 2, "times": 1},
    ]
    (run / "run.json").write_text(json.dumps(record))
    text = to_markdown(board_page([run])[0])
    assert "Oslo: is left out: it is away (rounds 1 to 4, 3 times)" in text
    assert "did not" in text
    assert "(round 2)" in text
    assert "Lyon (2 of 5 rounds)" in text
    assert "as one client under several names does" in text
    assert "has not come to its end" not in text
    with served([run]) as board, urllib.request.urlopen(board.url) as answer:
        assert "<b>answer" not in answer.read().decode()


def test_what_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["board", str(tmp_path / "none")])
    assert "there is no folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["board", str(tmp_path), "--every", "0"])
    assert "--every" in capsys.readouterr().err
