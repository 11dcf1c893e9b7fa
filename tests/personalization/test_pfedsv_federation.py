"""PFedSV in whole federations: what it finds, partial participation, resuming, and what crosses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from toys import Plain, fit, toy_data

from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import CommunicationCost, DomainRelevance
from flsv.participants import Client
from flsv.personalization import PFedSV
from flsv.personalization.pfedsv import collaborate

nan = float("nan")


class Careful(Plain):
    """Fails as soon as it is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("training has begun")


def federation(**kwargs: Any) -> FederatedLoop:
    kwargs.setdefault("metrics", {"relevance": DomainRelevance(), "cost": CommunicationCost()})
    kwargs.setdefault("personalizer", PFedSV(k=2))
    return FederatedLoop(seed=4, **kwargs)


def test_an_empty_validation_set_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"clients \[0, 1, 2\] have none.*client_val"):
        fit(federation(), tmp_path, module=Careful())


def test_no_sample_leaves_a_client(tmp_path: Path) -> None:
    """What a question returns is one number for each model that was played with."""
    crossed: list[Any] = []
    ask = Client.ask

    def watched(self: Client, question: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ask(self, question, *args, **kwargs)
        if getattr(question, "func", None) is collaborate:
            crossed.append(answer)
        else:
            assert not answer  # nobody asks for a report, and pictures are written at the client
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "ask", watched)
        loop = federation()
        fit(loop, tmp_path, data=toy_data(drop_last=True, client_val=0.2), rounds=2)
    assert len(crossed) == 6
    for values in crossed:
        assert values.ndim == 1
        assert 1 <= len(values) <= 3
    sent = {(message.direction, message.name): message.traffic.numbers for message in loop.channel.messages}
    assert sent.keys() == {("up", "update"), ("up", "collaborate"), ("down", "collaborate")}
    assert sent["up", "update"] == loop.space.size
