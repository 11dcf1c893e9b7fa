"""What tests of Flower's messages share."""

import pytest


@pytest.fixture
def as_a_task(monkeypatch):
    """Flower numbers messages by the task that makes them; there are no tasks here."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("task_id", "run_id", "node_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1, raising=False)
    monkeypatch.setattr("flsv.sites.flower.POLL_SECONDS", 0.02)
