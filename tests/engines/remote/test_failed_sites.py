"""Sites that do not answer, or send what is of no use: who is left out, and what stays as it was."""

import json
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv import FederatedLoop
from flsv.aggregation import FedAvg, FedCE, GeometricMedian, TrimmedMean
from flsv.core import find_loop
from flsv.engines.remote import Packet
from flsv.engines.remote.messages import pack
from flsv.filters import OutlierFilter
from flsv.metrics import ContributionEstimation, DomainRelevance
from flsv.personalization import IFCA, FedFomo, PFedSV
from flsv.sampling import PowerOfChoice
from flsv.training.algorithms import SCAFFOLD
from helpers.sites import NAMES, SPLITS, Remotely, kept_at, shapfed

_plain, _tensors = pack(torch.zeros(7))
#: What becomes of an answer.
LATE, GARBAGE = None, Packet("hm", {"a": "b"})
WRONG_SHAPE = Packet("answer", {"answer": _plain, "visit": "0" * 64}, _tensors)


def judging(personalizer: Any) -> FederatedLoop:
    return shapfed(
        aggregator=FedAvg(), metrics={"relevance": DomainRelevance()}, personalizer=personalizer()
    )


pfedsv = partial(judging, partial(PFedSV, "relevance", k=2))
fedfomo = partial(judging, partial(FedFomo, num_downloads=2))


@pytest.mark.parametrize(
    ("make", "instead", "words"),
    [
        (pfedsv, LATE, "did not answer .*no reply within 1 s"),
        (fedfomo, GARBAGE, "did not answer .* lacks or garbles 'answer'"),
        (pfedsv, WRONG_SHAPE, "judged 3 models by Tensor"),
    ],
)
def test_site_that_does_not_evaluate_models_counts_as_not_drawn(
    tmp_path: Path, make: Any, instead: Any, words: str
) -> None:
    """In its first round, when it has no model of its own to go on from, and in a later one."""

    def spoil(address: int, packet: Packet, reply: Packet) -> Any:
        hit = packet.kind == "ask" and (address, packet.plain["round"]) in [(101, 0), (102, 1)]
        return instead if hit else reply

    seen = []
    kept = []  # by the last site

    class Sees(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append(find_loop(trainer.callbacks).contributions["relevance"].by_class.clone())
            kept.append(kept_at(tmp_path, NAMES[2])[-1])

    remote = Remotely(tmp_path, make, client_val=0.3)
    remote.transport.spoil = spoil
    with pytest.warns(UserWarning, match=words):
        loop = remote.fit(callbacks=[Sees()])
    assert seen[0][1].isnan().all()
    assert seen[0][2].isfinite().any()
    torch.testing.assert_close(seen[1][2], seen[0][2], rtol=0, atol=0, equal_nan=True)
    assert loop.contributions["relevance"].by_class[1].isfinite().any()
    assert loop.participations.tolist() == [3, 3, 3]
    # The mixture of round 1, whose judgment never came, is not what it goes on from.
    assert not torch.equal(
        kept[0]["store"]["tensors"]["own_model"], kept[1]["store"]["tensors"]["own_model"]
    )
    torch.testing.assert_close(
        kept[2]["start"], kept[0]["store"]["tensors"]["own_model"], rtol=0, atol=0
    )


@pytest.mark.parametrize(
    ("instead", "words"),
    [(LATE, "no reply within"), (WRONG_SHAPE, "was asked for a number and answered")],
)
def test_fedce_leaves_out_sites_that_do_not_score_the_others(
    tmp_path: Path, instead: Any, words: str
) -> None:
    """One site is silent in round 0, all of them in round 1."""

    def spoil(address: int, packet: Packet, reply: Packet) -> Any:
        return (
            instead
            if packet.kind == "ask" and (address == 101 or packet.plain["round"] == 1)
            else reply
        )

    def make() -> FederatedLoop:
        return shapfed(aggregator=FedCE(), metrics={"fedce": ContributionEstimation()})

    remote = Remotely(tmp_path, make, **SPLITS)
    remote.transport.spoil = spoil
    with pytest.warns(UserWarning, match=words):
        loop = remote.fit(rounds=2)
    fedce = loop.metrics["fedce"]
    assert fedce.seen.tolist() == [1, 0, 1]
    assert fedce.rounds == 2
    assert loop.contributions["fedce"].isnan().tolist() == [False, True, False]


@pytest.mark.slow
@pytest.mark.parametrize("exclude", [False, True])
def test_lost_or_excluded_update_leaves_the_sites_control_variate_unchanged(
    tmp_path: Path, exclude: bool
) -> None:
    """A site's control variate moves only with the server's, whether its update is lost or excluded. The server is
    killed and goes on from its checkpoint, too."""

    def spoil(address: int, packet: Packet, reply: Packet) -> Any:
        if packet.kind != "train" or address != 101 or packet.plain["round"] not in (1, 2):
            return reply
        huge = {**reply.tensors, "vector": 1e6 * reply.tensors["vector"]}
        return Packet("update", reply.plain, huge) if exclude else None

    scaffold = partial(
        shapfed, aggregator=FedAvg("uniform"), metrics={}, client_algorithm=SCAFFOLD()
    )
    remote = Remotely(tmp_path, partial(scaffold, filters=[OutlierFilter(exclude=exclude)]))
    remote.transport.spoil = spoil
    options = {
        "callbacks": [ModelCheckpoint(tmp_path / "ckpt", save_last=True)],
        "enable_checkpointing": True,
    }
    with pytest.warns(UserWarning, match="left out of"):
        remote.fit(rounds=3, **options)
    loop = remote.fit(rounds=4, ckpt_path=tmp_path / "ckpt/last.ckpt", **options)
    assert loop.participations.tolist() == [4, 2, 4]
    kept = [kept_at(tmp_path, name) for name in NAMES]
    assert [visit["who"][-1] for visit in kept[1]] == [0, 3]
    own = torch.stack([visits[-1]["store"]["tensors"]["control_variate"] for visits in kept])
    variate = loop.state_dict()["strategies"]["client_algorithm"]["variate"]
    torch.testing.assert_close(variate, own.mean(0), rtol=1e-5, atol=1e-6)


def test_site_that_exceeds_its_time_stops_and_joins_the_next_round(tmp_path: Path) -> None:
    """It keeps nothing of what it has stopped."""

    class Hurried:
        def answer(self, packet: Packet) -> Packet:
            seconds = (
                {"seconds": 0.0} if packet.kind == "train" and packet.plain["round"] == 1 else {}
            )
            return own.answer(Packet(packet.kind, {**packet.plain, **seconds}, packet.tensors))

    remote = Remotely(tmp_path, shapfed)
    own, remote.transport.sites[101] = remote.transport.sites[101], Hurried()
    words = (
        r"site 'Lyon' \(client 1\) is left out of round 2: it has stopped, not ready after 0.0 s"
    )
    with pytest.warns(UserWarning, match=words):
        loop = remote.fit()
    assert loop.participations.tolist() == [3, 2, 3]
    assert [visit["who"][-1] for visit in kept_at(tmp_path, "Lyon")] == [0, 2]


def test_absent_site_keeps_its_value(tmp_path: Path) -> None:
    """A site that is away in a round keeps its value, and its moving average goes on when it is back."""
    remote = Remotely(tmp_path, shapfed)
    away = remote.transport.sites.pop(102)
    seen = {}

    class Comes(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen[trainer.current_epoch] = find_loop(trainer.callbacks).contributions["cssv"].clone()
            remote.transport.sites[102] = away

    (tmp_path / "book.json").write_text(json.dumps({"Osaka": {"train": 152, "val": 0, "test": 0}}))
    with pytest.warns(
        UserWarning, match=r"site 'Osaka' \(client 2\) is left out of round 1: it is away"
    ) as warned:
        loop = remote.fit(callbacks=[Comes()])
    (changed,) = [
        str(each.message) for each in warned if "samples now and had" in str(each.message)
    ]
    assert "site 'Osaka' has {'train': 153" in changed
    assert loop.participations.tolist() == [3, 3, 2]
    assert seen[0][2].isnan().all()
    assert seen[0][:2].isfinite().all()
    assert loop.contributions["cssv"].isfinite().all()


def test_power_of_choice_candidate_that_answers_without_a_loss_is_chosen_last(
    tmp_path: Path,
) -> None:
    def spoil(address: int, packet: Packet, reply: Packet) -> Packet:
        high = {**reply.plain, "answer": "high"}
        return Packet(reply.kind, high) if packet.kind == "ask" and address == 101 else reply

    make = partial(shapfed, aggregator=FedAvg("uniform"), metrics={}, sampler=PowerOfChoice(2, 3))
    remote = Remotely(tmp_path, make)
    remote.transport.spoil = spoil
    with pytest.warns(UserWarning, match="It is chosen last"):
        assert remote.fit().participations.tolist() == [3, 0, 3]


GUARDS: dict[str, dict[str, Any]] = {
    "trimmed mean": {"aggregator": TrimmedMean(0.34)},
    "geometric median": {"aggregator": GeometricMedian()},
    "mean": {"aggregator": FedAvg("uniform")},
}


@pytest.mark.parametrize("guard", GUARDS)
def test_false_report_of_one_site_cannot_move_the_model_far(tmp_path: Path, guard: str) -> None:
    """Its update is as it should be, and what it reports beside it is any number."""
    make = partial(shapfed, metrics={}, client_algorithm=SCAFFOLD(), **GUARDS[guard])
    honest = Remotely(tmp_path / "honest", make).fit().state.model()
    for lie in (100.0, 3e38, 1e-6, 1e-300, -1.0):

        def spoil(address: int, packet: Packet, reply: Packet, lie: float = lie) -> Packet:
            if packet.kind != "train" or address != 101:
                return reply
            lies = {
                n: torch.full_like(t, lie) if n.startswith("report/") else t
                for n, t in reply.tensors.items()
            }
            return Packet("update", reply.plain, lies)

        remote = Remotely(tmp_path / f"{lie}", make)
        remote.transport.spoil = spoil
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            model = remote.fit().state.model()
        assert (model - honest).norm() < 0.1 * honest.norm(), lie
        named = [str(each.message) for each in said if "Lyon" in str(each.message)]
        assert bool(named) == (lie < 1e-3), (lie, named)


def test_site_that_reports_an_invalid_cluster_does_not_stop_the_run(tmp_path: Path) -> None:
    def spoil(address: int, packet: Packet, reply: Packet) -> Packet:
        if packet.kind != "train" or address != 101:
            return reply
        return Packet(
            "update", reply.plain, {**reply.tensors, "report/cluster": torch.tensor(-7e9).double()}
        )

    remote = Remotely(
        tmp_path, partial(shapfed, metrics={}, aggregator=FedAvg("uniform"), personalizer=IFCA(2))
    )
    remote.transport.spoil = spoil
    assert remote.fit().participations.tolist() == [3, 3, 3]
