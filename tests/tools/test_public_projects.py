"""The list of public projects, and what is said of one that is equal, that is not, and that is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import public_kinds
import public_projects
import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "results" / "public_projects.md"
NAME = "Lightning, BoringModel"


def test_every_project_is_pinned_and_has_its_kind() -> None:
    known = public_projects.projects()
    assert len(known) >= 20
    for each in known.values():
        assert each.get("not_run") or callable(getattr(public_kinds, each["kind"]))
        assert all("==" in pin for pin in each.get("install", ()))


def test_the_page_has_a_row_for_each() -> None:
    rows = [line.split(" | ") for line in PAGE.read_text().splitlines() if line.startswith("| ")][2:]
    assert {row[0].removeprefix("| ") for row in rows} == public_projects.projects().keys()


def test_one_that_is_equal_and_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert public_projects.one(NAME)["outcome"] == "equal"
    kind = public_kinds.lightning_boring()

    def another() -> torch.nn.Module:
        module = kind.module()
        with torch.no_grad():
            module.layer.bias.add_(0.1)
        return module

    monkeypatch.setattr(public_kinds, "lightning_boring", lambda: replace(kind, by_hand=another))
    found = public_projects.one(NAME)
    assert found["outcome"] == "not equal"
    assert "layer" in found["why"]


def test_one_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = replace(public_kinds.lightning_boring(), trainer={"max_steps": 3})
    monkeypatch.setattr(public_kinds, "lightning_boring", lambda: kind)
    found = public_projects.one(NAME)
    assert found["outcome"] == "refused"
    assert "in the middle of a round" in found["why"]


def test_what_is_not_installed_is_not_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> None:
        import no_such_package  # noqa: F401

    monkeypatch.setattr(public_kinds, "lightning_boring", missing)
    assert public_projects.one(NAME) == {
        "outcome": "not run",
        "why": "cannot be imported here: No module named 'no_such_package'",
    }
    assert public_projects.run("x", {"not_run": "too large"}, tmp_path) == {"outcome": "not run", "why": "too large"}
