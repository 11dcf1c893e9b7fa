"""What would tell a single site's update is refused: by the server before training, by a site whoever asks."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from remote_federation import Remotely, ServerData, shapfed, site
from remote_sites import NAMES

from flsv import ClientEvaluation, FederatedLoop
from flsv.aggregation import FedAvg, FedNova, GeometricMedian, ShapFedWA
from flsv.clients.algorithms import SCAFFOLD
from flsv.engines.remote import Packet, SecureSums, SitePolicy, Waiting
from flsv.engines.remote.secure.at_site import identity
from flsv.errors import ConfigurationError
from flsv.filters import NormCap, OutlierFilter
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    CosineGradientShapley,
    EverybodyElse,
    PartialFederatedShapley,
    ShadowShapley,
)
from flsv.personalization import ShapFedPersonalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import PowerOfChoice
from flsv.uploads import TopK

SPLITS = {"client_val": 0.3}


def loop(**options: Any) -> FederatedLoop:
    return shapfed(**{"aggregator": FedAvg(), "metrics": {"else": EverybodyElse()}, **options})


SINGLE: dict[str, tuple[dict[str, Any], str]] = {
    "ShapFed": (
        {"aggregator": ShapFedWA("cssv"), "metrics": {"cssv": ClassSpecificShapley()}},
        r"aggregator ShapFedWA\(.*Take FedAvg",
    ),
    "median": ({"aggregator": GeometricMedian()}, r"aggregator GeometricMedian\(.*Take FedAvg"),
    "FedNova": ({"aggregator": FedNova()}, r"aggregator FedNova\("),
    "SCAFFOLD": ({"client_algorithm": SCAFFOLD()}, r"client_algorithm SCAFFOLD\(.*Take FedProx"),
    "own models": (
        {"personalizer": ShapFedPersonalizer("cssv"), "metrics": {"cssv": ClassSpecificShapley()}},
        r"personalizer ShapFedPersonalizer\(.*all sites have to have one.*share=",
    ),
    "losses": ({"sampler": PowerOfChoice(2, 3)}, r"sampler PowerOfChoice\(.*Take UniformSampler"),
    "outliers": ({"filters": [OutlierFilter(exclude=True)]}, r"filters OutlierFilter\(.*clip="),
    "norms": ({"filters": [OutlierFilter(), NormCap(1.25)], "metrics": {}}, r"filters NormCap\("),
    "compression": ({"uploads": [TopK(0.1)]}, r"uploads TopK\(.*Take|uploads TopK\(.*GaussianPrivacy"),
    "evaluation": ({"evaluation": ClientEvaluation(every=1)}, r"evaluation=ClientEvaluation\(every=1"),
    "shadow": ({"metrics": {"s": ShadowShapley()}}, r"client_algorithm ShadowTraining\("),
}
METRICS: dict[str, tuple[Any, str]] = {
    "heads": (ClassSpecificShapley(), "client_heads"),
    "cosines": (CosineGradientShapley(), "client_updates"),
    "FedCE": (ContributionEstimation(), "client_updates"),
    "games": (PartialFederatedShapley(), "utility"),
}


@pytest.mark.parametrize("what", SINGLE)
def test_a_part_that_looks_at_single_updates(tmp_path: Path, what: str) -> None:
    """By a site when it is made, so that it never trains; and by the server, were its sites without care."""
    options, match = SINGLE[what]
    with pytest.raises(ConfigurationError, match=f"With secure sums the server sees no update by itself, and {match}"):
        Remotely(tmp_path, partial(loop, **options), secure=True, **SPLITS)


def test_a_quorum_that_can_leave_too_few(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, loop, secure=True, **SPLITS)
    with pytest.raises(ConfigurationError, match="can leave 2 of 3 sites in a secure sum, which needs 3 or more"):
        remote.fit(1, waiting=Waiting(quorum=0.6))
    remote.fit(1, waiting=Waiting(quorum=0.9))


@pytest.mark.parametrize("what", METRICS)
def test_a_metric_that_looks_at_single_updates(tmp_path: Path, what: str) -> None:
    metric, asks = METRICS[what]
    remote = Remotely(tmp_path, partial(loop, metrics={"mine": metric}), secure=True, **SPLITS)
    trained = []
    remote.transport.spoil = lambda address, packet, reply: trained.append(packet.kind) or reply  # type: ignore[func-returns-value]
    match = rf"the metric 'mine' \({type(metric).__name__}\) asks for .*{asks}.*Take EverybodyElse"
    with pytest.raises(ConfigurationError, match=match):
        remote.fit(1, own=ServerData())
    assert set(trained) == {"hello"}


def test_noise_goes_with_sums(tmp_path: Path) -> None:
    noisy = partial(loop, uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=0.1)])
    found = [Remotely(tmp_path / str(s), noisy, secure=s, **SPLITS).fit(2) for s in (False, True)]
    torch.testing.assert_close(found[1].state.model(), found[0].state.model(), rtol=0, atol=5e-6)
    assert torch.equal(found[1].contributions["epsilon"], found[0].contributions["epsilon"])


def test_both_sides_have_the_same(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, loop, secure=SecureSums(clip=1.0), **SPLITS)
    for other in (SecureSums(clip=2.0), False):
        remote.secure = other
        with pytest.raises(ConfigurationError, match="differ in secure sums: 'SecureSums.*clip=1.0"):
            remote.fit(1)
    remote.secure, remote.make = SecureSums(clip=1.0), partial(loop, aggregator=FedAvg("uniform"))
    with pytest.raises(ConfigurationError, match=r"differ in secure sums: .*by samples' there, .*by site' here"):
        remote.fit(1)


def test_two_sites_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="secure sums of 2 sites: expected 3 or more"):
        Remotely(tmp_path, loop, secure=True, names=NAMES[:2], **SPLITS).fit(1)


def test_a_policy_that_wants_sums_takes_part_in_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text("secure = true\nleast_sites = 3\n")
    policy = SitePolicy.read(path)
    own = site(tmp_path, 0, loop, policy=policy, **SPLITS)
    for kind in ("hello", "train", "ask", "test"):
        reply = own.answer(Packet(kind, {"sites": NAMES, "clients": 3}))
        assert reply.kind == "failed"
        assert "its policy wants secure = true, and the app would send its update by itself" in reply.plain["error"]
    remote = Remotely(tmp_path / "b", loop, secure=True, **SPLITS)
    remote.transport.sites[100] = site(tmp_path / "b", 0, loop, policy=policy, secure=True, **SPLITS)
    assert remote.fit(1).participations.tolist() == [1, 1, 1]


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("secure = true", r"least_sites=1\): of a sum of two.*Set least_sites to 3 or more"),
        ("secure = true\nleast_sites = 2", "Set least_sites to 3 or more"),
        ("secure = 1\nleast_sites = 3", "expected true or false"),
        ('[peers]\nLyon = "abc"', "expected identities by site"),
    ],
)
def test_a_policy_that_makes_no_sense(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=match):
        SitePolicy.read(tmp_path / "site.toml")


def test_peers_are_who_they_were_said_to_be(tmp_path: Path) -> None:
    """Each owner has told the others its site's identity. Then Lyon is another machine, with Lyon's name."""
    known = {name: identity(tmp_path / "sites" / name) for name in NAMES}
    assert len(set(known.values())) == 3
    policy = SitePolicy(secure=True, least_sites=3, peers=known)
    remote = Remotely(tmp_path, loop, secure=True, **SPLITS)
    remote.transport.sites = {100 + i: site(tmp_path, i, loop, policy=policy, secure=True, **SPLITS) for i in range(3)}
    assert remote.fit(1).participations.tolist() == [1, 1, 1]
    (tmp_path / "book.json").unlink()
    remote.transport.sites[101] = site(tmp_path / "other", 1, loop, secure=True, **SPLITS)
    with (
        pytest.warns(UserWarning, match="'Boston'.*site 'Lyon' is none of its peers, or has another identity"),
        pytest.raises(RuntimeError, match="1 of the sites"),
    ):
        remote.fit(1)


def asked(remote: Remotely) -> list[Packet]:
    """What the server sends Boston in a round."""
    sent = []

    def kept(address: int, packet: Packet, reply: Packet) -> Packet:
        if address == 100:
            sent.append(packet)
        return reply

    remote.transport.spoil = kept
    remote.fit(1)
    return sent


def said(remote: Remotely, packet: Packet, **plain: Any) -> str:
    reply = remote.sites[100].answer(Packet(packet.kind, {**packet.plain, **plain}, packet.tensors))
    assert not reply.tensors or reply.kind == "answer"
    return f"{reply.kind} {reply.plain.get('error', '')}"


def test_a_server_that_asks_for_more(tmp_path: Path) -> None:
    """After an honest round, a server sends Boston again what it was sent, and variations."""
    remote = Remotely(tmp_path, loop, secure=True, **SPLITS)
    sent = {packet.kind: packet for packet in asked(remote)}
    assert set(sent) == {"hello", "keys", "shares", "train", "unmask", "ask"}
    assert "stands after 'unmasked', not after 'shares'" in said(remote, sent["train"])
    assert "tells no others" in said(remote, sent["unmask"], survivors=[0, 1])
    assert "has drawn no keys for round 7" in said(remote, sent["train"], round=7)
    question = sent["ask"]
    assert said(remote, question).startswith("answer")  # the reply was lost on the way
    other = Packet("ask", question.plain, {"0": question.tensors["0"] + 1})
    assert "about another model" in said(remote, other)
    changed = {"tuple": [{"tuple": [{"tensor": "0"}, 0.999]}, question.plain["arguments"]["tuple"][1]]}
    assert "about another model" in said(remote, question, arguments=changed)
    assert "sends sums only" in said(remote, question, question="flsv.round.round:started_from")
    assert "sends sums only" in said(remote, question, question="flsv.sampling.power_of_choice:local_loss")
    assert "has summed nothing in round 5" in said(remote, question, round=5)
    assert said(remote, Packet("test", sent["train"].plain)).startswith("failed KeyError")


def test_a_start_point_that_is_not_what_all_are_sent(tmp_path: Path) -> None:
    """The server tells Boston the hash of one model and sends another."""
    remote = Remotely(tmp_path, loop, secure=True, **SPLITS)
    answer = remote.sites[100].answer

    def other(packet: Packet) -> Packet:
        if packet.kind == "train":
            packet = Packet("train", packet.plain, {"start": packet.tensors["start"] * 0})
        return answer(packet)

    remote.sites[100].answer = other  # type: ignore[method-assign]
    with (
        pytest.warns(UserWarning, match="'Boston'.*not what the server says that all sites are sent"),
        pytest.raises(RuntimeError, match="2 of the sites"),
    ):
        remote.fit(1)


def test_secrets_are_the_owners_to_read_and_gone_after_the_round(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, loop, secure=True, **SPLITS)
    modes, seeds = [], []

    def look(address: int, packet: Packet, reply: Packet) -> Packet:
        for path in tmp_path.rglob("sum.json"):
            modes.append(path.stat().st_mode & 0o777)
            seeds.append((packet.kind, '"seed": ""' in path.read_text()))
        return reply

    remote.transport.spoil = look
    remote.fit(1)
    assert set(modes) == {0o600}
    assert ("keys", False) in seeds
    assert all('"seed": ""' in path.read_text() for path in tmp_path.rglob("sum.json"))
