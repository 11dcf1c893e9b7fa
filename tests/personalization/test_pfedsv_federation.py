"""PFedSV in whole federations: what it finds, partial participation, resuming, and what crosses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from data_options import grouped
from lightning.pytorch.callbacks import ModelCheckpoint
from resume_run import Stop
from torch import Tensor, nn
from toys import Plain, fit, toy_data

from flsv import ClientEvaluation, FederatedDataModule
from flsv.data import PathologicalPartitioner
from flsv.errors import ConfigurationError
from flsv.loop import FederatedLoop
from flsv.metrics import CommunicationCost, DomainRelevance
from flsv.parameters import ParameterSpace
from flsv.participants import Client
from flsv.personalization import PFedSV
from flsv.personalization.base import OWN_MODEL
from flsv.personalization.pfedsv import collaborate
from flsv.sampling import ClientSampler, UniformSampler

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


def pathological(clients: int, **kwargs: Any) -> FederatedDataModule:
    fractions = {"client_val": 0.25, "client_test": 0.25}
    return FederatedDataModule(
        "digits", PathologicalPartitioner(clients, 2), **grouped({"batch_size": 8, **fractions, **kwargs})
    )


def digits_net() -> Plain:
    torch.manual_seed(0)
    return Plain(nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)))


def test_a_hundred_clients_of_which_ten_take_part(tmp_path: Path) -> None:
    loop = federation(sampler=UniformSampler(10), evaluation=ClientEvaluation(every=8), personalizer=PFedSV())
    data = pathological(100, server_val=0.0)
    fit(loop, tmp_path, digits_net(), data, rounds=8, limit_val_batches=0)
    relevance = loop.contributions["relevance"].by_class
    seen = loop.contributions["cost"].by_class[:, 0] > 0
    assert 10 < seen.sum() < 80
    assert relevance[~seen].isnan().all()
    assert relevance[:, ~seen].isnan().all()  # who never uploaded cannot be judged
    last = loop.weights.nan_to_num(-1).ge(0).nonzero().flatten().tolist()
    absent = [i for i in seen.nonzero().flatten().tolist() if i not in last]
    assert absent
    models = loop.received()
    assert not torch.equal(models[absent[0]], models[last[0]])
    kept = loop.state_dict()["clients"]
    assert sorted(kept) == seen.nonzero().flatten().tolist()
    assert all(torch.equal(models[i], state[OWN_MODEL]) for i, state in kept.items())


class Late(ClientSampler):
    """Client 2 comes in the third round only."""

    def sample(self, num_clients: int, contributions: Any, generator: Any, round_index: int = 0) -> Tensor:
        self.rounds = getattr(self, "rounds", 0) + 1
        return torch.arange(2 if self.rounds < 3 else 3)

    def inclusion_probabilities(self, num_clients: int, contributions: Any, round_index: int = 0) -> Tensor:
        return torch.ones(num_clients)


def test_a_client_that_appears_first_in_a_late_round(tmp_path: Path) -> None:
    starts: list[Tensor] = []

    class Watched(PFedSV):
        def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
            if len(round) == 3:
                starts.append(round.matrix.starts[2])
            return super().personalize(round, contributions, models)

    loop = federation(personalizer=Watched(k=2), sampler=Late())
    module = Plain()
    first = ParameterSpace(module).read(module)
    fit(loop, tmp_path, module, toy_data(drop_last=True, client_val=0.2))
    assert torch.equal(starts[0], first)
    assert not loop.contributions["relevance"].by_class[2].isnan().any()
    assert loop.contributions["relevance"].by_class[:2, 2].isnan().tolist() == [False, False]


def run(folder: Path, ckpt_path: Any = None, callbacks: Any = ()) -> FederatedLoop:
    loop = federation(
        sampler=UniformSampler(3), evaluation=ClientEvaluation(every=2), personalizer=PFedSV(mode="extractor")
    )
    fit(
        loop,
        folder,
        data=toy_data((4, 2, 3, 3, 2), client_val=0.2),
        rounds=5,
        ckpt_path=ckpt_path,
        enable_checkpointing=True,
        callbacks=[*callbacks, ModelCheckpoint(folder / "saved", filename="last", enable_version_counter=False)],
    )
    return loop


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run(tmp_path / "parts", callbacks=[Stop(3, 1, RuntimeError)])
    resumed = run(tmp_path / "parts", ckpt_path=tmp_path / "parts/saved/last.ckpt")
    for name, value in whole.contributions.items():
        assert torch.equal(resumed.contributions[name].nan_to_num(9), value.nan_to_num(9))
    mine, theirs = resumed.received(), whole.received()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[i], model) for i, model in theirs.items())
    assert torch.equal(resumed.client_accuracy, whole.client_accuracy)
    states = [loop.personalizer.state_dict() for loop in (whole, resumed)]
    assert states[0]["cohort"] == states[1]["cohort"]
    assert all(torch.equal(states[1]["uploads"][i], upload) for i, upload in states[0]["uploads"].items())
    csv = [(tmp_path / part / "contributions.csv").read_text() for part in ("whole", "parts")]
    assert csv[0] == csv[1]


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
