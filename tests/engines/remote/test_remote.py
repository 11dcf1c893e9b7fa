"""A federation of three sites, each of which has its own data, module and Trainer, gives what one process gives."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from remote_federation import (
    CASES,
    Remotely,
    ServerData,
    assert_same,
    both_with_splits,
    kept_at,
    one_process,
    shapfed,
)
from remote_sites import NAMES, SEED, SiteData, module
from sifted import slow_except

from flsv import ClientEvaluation, FederatedLoop, Reporting
from flsv.aggregation import FedAdam, FedAvg, FedCE
from flsv.attacks import FalseReports
from flsv.clients.algorithms import Ditto, FedProx, PerFedAvg
from flsv.engines.remote import Packet, Site
from flsv.metrics import (
    ClassSpecificShapley,
    CommunicationCost,
    ContributionEstimation,
    DecayedShapley,
    DomainRelevance,
    ShadowShapley,
)
from flsv.personalization import FedFomo, PFedSV, ShapFedPersonalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import PowerOfChoice
from flsv.uploads import TopK

FAST = ("kept momentum, two of three", "scaffold", "a schedule by rounds", "a schedule by a client's own steps")


@pytest.mark.parametrize("case", slow_except(FAST, CASES))
def test_sites_give_what_one_process_gives(tmp_path: Path, case: str) -> None:
    make, options = CASES[case]
    assert_same(Remotely(tmp_path / "b", make, **options).fit(), one_process(tmp_path / "a", make, **options))


def test_games_on_the_servers_own_data(tmp_path: Path) -> None:
    make = partial(shapfed, metrics={"cssv": ClassSpecificShapley(), "ssv": DecayedShapley()})
    remote = Remotely(tmp_path / "b", make).fit(own=ServerData())
    assert_same(remote, one_process(tmp_path / "a", make))
    (record,) = (tmp_path / "b").rglob("run.json")
    assert json.loads(record.read_text())["validation"] == {"of": "the server's own data", "rows": 144}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(dict, marks=pytest.mark.slow),
        lambda: {"aggregator": FedAdam(0.02), "client_algorithm": FedProx(0.1)},
    ],
)
@pytest.mark.filterwarnings("ignore:.*one after the other")
def test_sites_train_the_models_of_their_coalitions(tmp_path: Path, options: Any) -> None:
    def make() -> FederatedLoop:
        metrics = {"shadow": ShadowShapley(performance="negative_loss")}
        return FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False), **options())

    remote = Remotely(tmp_path / "b", make).fit(own=ServerData())
    local = one_process(tmp_path / "a", make)
    assert_same(remote, local)
    assert remote.channel.bytes(range(3), "up").tolist() == local.channel.bytes(range(3), "up").tolist()


@pytest.mark.parametrize("personalizer", [partial(PFedSV, "relevance", k=2), partial(FedFomo, num_downloads=2)])
def test_sites_answer_what_they_find_others_worth(tmp_path: Path, personalizer: Any) -> None:
    def make() -> FederatedLoop:
        return shapfed(
            aggregator=FedAvg(),
            metrics={"relevance": DomainRelevance()},
            personalizer=personalizer(),
            evaluation=ClientEvaluation(every=2),
        )

    loop, local = both_with_splits(tmp_path, make)
    assert_same(loop, local)
    assert loop.client_accuracy is not None
    torch.testing.assert_close(loop.client_scores, local.client_scores, rtol=0, atol=0, equal_nan=True)
    assert local.contributions["relevance"].isfinite().any()


@pytest.mark.parametrize("algorithm", [partial(Ditto, 0.3, 0.05), partial(PerFedAvg, 0.05, "free")])
def test_a_second_model_and_candidates_that_are_asked(tmp_path: Path, algorithm: Any) -> None:
    def make() -> FederatedLoop:
        return shapfed(
            aggregator=FedAvg(),
            metrics={"cost": CommunicationCost()},
            client_algorithm=algorithm(),
            sampler=PowerOfChoice(2, 3),
            evaluation=ClientEvaluation(every=2),
        )

    loop, local = both_with_splits(tmp_path, make)
    assert_same(loop, local)
    assert loop.client_accuracy is not None
    torch.testing.assert_close(loop.client_scores, local.client_scores, rtol=0, atol=0, equal_nan=True)
    for client, state in local.state_dict()["clients"].items():
        (kept,) = [each["state"] for each in kept_at(tmp_path / "b", NAMES[client])[-1:]]
        assert kept.keys() == state.keys()
        assert all(torch.equal(kept[name], state[name]) for name in kept)


def test_sites_say_what_the_others_model_is_worth(tmp_path: Path) -> None:
    """FedCE, where what sites send is not what they have trained, and one lies about what it found."""

    def make() -> FederatedLoop:
        metrics = {"fedce": ContributionEstimation()}
        uploads = [FalseReports(score=0.0, clients=[1]), TopK(share=0.2)]
        return shapfed(aggregator=FedCE(), metrics=metrics, uploads=uploads)

    loop, local = both_with_splits(tmp_path, make)
    assert_same(loop, local)
    assert local.contributions["fedce"].isfinite().all()
    errors = loop.metrics["fedce"].diagnostics()["error"]
    assert errors[1] == 1
    assert (errors[[0, 2]] < 1).all()


def test_models_that_only_their_sites_have(tmp_path: Path) -> None:
    """A site that trains the global model uses a mixture of its own, which the server does not know."""

    def make() -> FederatedLoop:
        own = PFedSV("relevance", k=2, shared=1.0)
        return shapfed(metrics={"relevance": DomainRelevance()}, aggregator=FedAvg(), personalizer=own)

    remote, local = both_with_splits(tmp_path, make)
    assert sorted(local.received()) == [0, 1, 2]
    assert remote.received() == {}
    at_server = Remotely(tmp_path / "c", partial(shapfed, personalizer=ShapFedPersonalizer("cssv"))).fit(rounds=1)
    assert sorted(at_server.received()) == [0, 1, 2]


def test_the_server_cannot_draw_a_sites_noise(tmp_path: Path) -> None:
    """It is of a secret of the site's: the same when a round is asked for again, and another in another run, or the
    difference of two runs' updates would have none."""
    make = partial(shapfed, uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=0.1)])
    known = Remotely(tmp_path / "a", make).fit(1).state.model()
    remote = Remotely(tmp_path / "b", make)
    remote.transport.sites = {
        100 + i: Site(module, partial(SiteData, i), make, tmp_path / "sites" / NAMES[i]) for i in range(3)
    }
    sent: list[torch.Tensor] = []

    def twice(address: int, packet: Packet, reply: Packet) -> Packet:
        if packet.kind == "train":
            again = remote.transport.sites[address].answer(packet)
            torch.testing.assert_close(again.tensors["vector"], reply.tensors["vector"], rtol=0, atol=0)
            sent.append(reply.tensors["vector"])
        return reply

    remote.transport.spoil = twice
    model = remote.fit(1).state.model()
    assert (model - known).abs().max() > 1e-4
    remote.fit(1)
    for before, now in zip(sent[:3], sent[3:], strict=True):
        assert (before - now).abs().max() > 1e-4
