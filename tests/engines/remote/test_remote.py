"""A federation of three sites, each of which has its own data, module and Trainer, gives what one process gives."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from remote_sites import NAMES, QUIET, SEED, SiteData, SiteTransport, module, whole

from flsv import ClassifierClient, FederatedDataModule, FederatedLoop
from flsv.aggregation import DivergenceWeighted, FedAvg, FedCE, ShapFedWA
from flsv.attacks import FalseReports
from flsv.clients.algorithms import SCAFFOLD
from flsv.data import OneClient
from flsv.engines.remote import Directory, Packet, RemoteData, RemoteFederation, Site, agreement
from flsv.engines.remote.memory import SiteMemory
from flsv.engines.remote.wire import pack
from flsv.errors import ConfigurationError
from flsv.metrics import (
    ClassSpecificShapley,
    ContributionEstimation,
    DecayedShapley,
    DomainRelevance,
    EverybodyElse,
    WassersteinContribution,
)
from flsv.personalization import FedFomo, PFedSV, ShapFedPersonalizer
from flsv.privacy import GaussianPrivacy
from flsv.sampling import UniformSampler
from flsv.uploads import TopK

ROUNDS = 3
Make = Callable[..., FederatedLoop]


def shapfed(**options: Any) -> FederatedLoop:
    metrics = {"cssv": ClassSpecificShapley()}
    return FederatedLoop(
        **{"aggregator": ShapFedWA("cssv"), "metrics": metrics, "seed": SEED, "print_table": False, **options}
    )


def one_process(tmp: Path, make: Make, make_module: Any = module, rounds: int = ROUNDS, **data: Any) -> FederatedLoop:
    loop = make()
    trainer = L.Trainer(max_epochs=rounds, callbacks=[loop], enable_checkpointing=False, default_root_dir=tmp, **QUIET)
    trainer.fit(make_module(), whole(**data))
    return loop


def site(tmp: Path, client: int, make: Make, make_module: Any = module, **data: Any) -> Site:
    own: Any = partial(SiteData, client)
    if data:
        own = partial(_as_federated, client, data)
    return Site(NAMES[client], make_module, own, make, tmp / "sites", upload_seed=SEED)


def _as_federated(client: int, options: dict[str, Any]) -> FederatedDataModule:
    return FederatedDataModule(SiteData(client), OneClient(), **{"server_val_fraction": 0.0, **options})


class ServerData(L.LightningDataModule):
    """The validation samples that the server of :func:`whole` has."""

    def val_dataloader(self) -> Any:
        data = whole()
        data.setup("fit")
        return data.val_dataloader()


class Remotely:
    """The same federation with a wire in it."""

    def __init__(self, tmp: Path, make: Make, make_module: Any = module, **data: Any) -> None:
        self.tmp, self.make, self.make_module = tmp, make, make_module
        self.sites = {100 + i: site(tmp, i, make, make_module, **data) for i in range(3)}
        self.transport = SiteTransport(self.sites)

    def fit(self, rounds: int = ROUNDS, own: Any = None, **options: Any) -> FederatedLoop:
        ours = agreement(self.make_module(), self.make())
        directory = Directory(self.transport, NAMES, ours, self.tmp / "book.json", timeout=1, wait=0.2)
        directory.gather()
        data = RemoteData(NAMES, [directory.sizes[i] for i in range(3)], 10, own=own)
        loop = self.make().replace(engine=partial(RemoteFederation, directory))
        self.module = self.make_module()
        options = {"enable_checkpointing": False, "num_sanity_val_steps": 0, **QUIET, **options}
        ckpt = options.pop("ckpt_path", None)
        callbacks = [loop, *options.pop("callbacks", [])]
        L.Trainer(max_epochs=rounds, callbacks=callbacks, default_root_dir=self.tmp, **options).fit(
            self.module, data, ckpt_path=ckpt
        )
        return loop


def assert_same(remote: FederatedLoop, local: FederatedLoop) -> None:
    torch.testing.assert_close(remote.state.model(), local.state.model(), rtol=0, atol=0)
    assert remote.contributions.keys() == local.contributions.keys()
    for name, value in local.contributions.items():
        torch.testing.assert_close(remote.contributions[name], value, rtol=0, atol=0, equal_nan=True)


def momentum() -> Any:
    return module(optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9))


class Scheduled(ClassifierClient):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def scheduled() -> Any:
    torch.manual_seed(SEED)
    return Scheduled("mlp", num_classes=10, input_shape=(1, 8, 8))


class Decaying(ClassifierClient):
    """Ends at zero after the last of a client's steps."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def decaying() -> Any:
    torch.manual_seed(SEED)
    return Decaying("mlp", num_classes=10, input_shape=(1, 8, 8))


CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "cssv": (shapfed, {}),
    "kept momentum, two of three": (
        partial(shapfed, client_optimizer="keep", sampler=UniformSampler(2), local_epochs=2),
        {"make_module": momentum},
    ),
    "a schedule by rounds": (shapfed, {"make_module": scheduled}),
    "a schedule by a client's own steps": (partial(shapfed, sampler=UniformSampler(2)), {"make_module": decaying}),
    "local heads": (partial(shapfed, aggregator=FedAvg(), metrics={}, share=["!head"]), {}),
    "scaffold": (partial(shapfed, aggregator=FedAvg("uniform"), client_algorithm=SCAFFOLD()), {}),
    "privacy": (partial(shapfed, privacy=GaussianPrivacy(clip=1.0, noise_multiplier=0.1)), {}),
    "compression with memory": (partial(shapfed, uploads=[TopK(0.1)]), {}),
    "own models at the server": (partial(shapfed, personalizer=ShapFedPersonalizer("cssv")), {}),
}


@pytest.mark.parametrize("case", CASES)
def test_sites_give_what_one_process_gives(tmp_path: Path, case: str) -> None:
    make, options = CASES[case]
    assert_same(Remotely(tmp_path / "b", make, **options).fit(), one_process(tmp_path / "a", make, **options))


def test_games_on_the_servers_own_data(tmp_path: Path) -> None:
    make = partial(shapfed, metrics={"cssv": ClassSpecificShapley(), "ssv": DecayedShapley()})
    remote = Remotely(tmp_path / "b", make).fit(own=ServerData())
    assert_same(remote, one_process(tmp_path / "a", make))


@pytest.mark.parametrize("personalizer", [partial(PFedSV, "relevance", k=2), partial(FedFomo, num_downloads=2)])
def test_sites_answer_what_they_find_others_worth(tmp_path: Path, personalizer: Any) -> None:
    def make() -> FederatedLoop:
        return shapfed(
            aggregator=FedAvg(),
            metrics={"relevance": DomainRelevance()},
            personalizer=personalizer(),
            evaluate_clients_every=2,
        )

    loop, local = both_with_splits(tmp_path, make)
    assert_same(loop, local)
    assert loop.client_accuracy is not None
    torch.testing.assert_close(loop.client_accuracy, local.client_accuracy, rtol=0, atol=0)
    assert local.contributions["relevance"].isfinite().any()


_plain, _tensors = pack(torch.zeros(7))
wrong_shape = Packet("answer", {"answer": _plain}, _tensors)
ANSWERS: dict[str, tuple[Any, str]] = {
    "late": (lambda reply: None, "did not answer .*no reply within 1 s"),
    "garbage": (lambda reply: Packet("hm", {"a": "b"}), "answered .* lacks or garbles 'answer'"),
    "another shape": (lambda reply: wrong_shape, "judged 3 models by Tensor"),
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("personalizer", [partial(PFedSV, "relevance", k=2), partial(FedFomo, num_downloads=2)])
def test_who_does_not_judge_is_as_one_not_drawn(tmp_path: Path, personalizer: Any, kind: str) -> None:
    """In its first round, when it has no model of its own to go on from, and in a later one."""
    what, words = ANSWERS[kind]

    def make() -> FederatedLoop:
        metrics = {"relevance": DomainRelevance()}
        return shapfed(aggregator=FedAvg(), metrics=metrics, personalizer=personalizer())

    def spoil(address: int, packet: Packet, reply: Packet) -> Any:
        hit = packet.kind == "ask" and (address, packet.plain["round"]) in [(101, 0), (102, 1)]
        return what(reply) if hit else reply

    seen = []

    class Sees(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen.append(trainer.callbacks[0].contributions["relevance"].clone())  # type: ignore[attr-defined]

    remote = Remotely(tmp_path, make, client_val_fraction=0.3)
    remote.transport.spoil = spoil
    with pytest.warns(UserWarning, match=words):
        loop = remote.fit(callbacks=[Sees()])
    assert seen[0][1].isnan().all()
    assert seen[0][2].isfinite().any()
    torch.testing.assert_close(seen[1][2], seen[0][2], rtol=0, atol=0, equal_nan=True)
    assert loop.contributions["relevance"][1].isfinite().any()
    assert loop.participations.tolist() == [3, 3, 3]


def test_sites_say_what_the_others_model_is_worth(tmp_path: Path) -> None:
    """FedCE and EverybodyElse, where what sites send is not what they have trained."""

    def make() -> FederatedLoop:
        metrics = {"fedce": ContributionEstimation(), "else": EverybodyElse(performance="negative_loss")}
        return shapfed(aggregator=FedCE(), metrics=metrics, uploads=[TopK(share=0.2)])

    loop, local = both_with_splits(tmp_path, make)
    assert_same(loop, local)
    assert local.contributions["else"].isfinite().all()


garbled = {kind: case for kind, case in ANSWERS.items() if kind != "another shape"}
garbled["another shape"] = (ANSWERS["another shape"][0], "was asked for a number and answered")


@pytest.mark.parametrize("kind", garbled)
def test_who_does_not_say_what_the_others_are_worth(tmp_path: Path, kind: str) -> None:
    """One site is silent in both metrics' questions of round 0, all of them in round 1."""
    what, words = garbled[kind]

    def make() -> FederatedLoop:
        metrics = {"fedce": ContributionEstimation(), "else": EverybodyElse(performance="negative_loss")}
        return shapfed(aggregator=FedCE(), metrics=metrics)

    def spoil(address: int, packet: Packet, reply: Packet) -> Any:
        hit = packet.kind == "ask" and (address == 101 or packet.plain["round"] == 1)
        return what(reply) if hit else reply

    remote = with_splits(tmp_path, make)
    remote.transport.spoil = spoil
    with pytest.warns(UserWarning, match=words):
        loop = remote.fit(rounds=2)
    fedce, other = loop.metrics["fedce"], loop.metrics["else"]
    assert fedce.seen.tolist() == [1, 0, 1]
    assert fedce.rounds == other.rounds == 2
    assert loop.contributions["fedce"].isnan().tolist() == [False, True, False]
    # In round 0 the first and the last each have the other's gain, the silent one both gains' mean.
    assert other.seen.tolist() == [1, 1, 1]
    gain = other.diagnostics()["gain"]
    expected = torch.stack([gain[2], (gain[0] + gain[2]) / 2, gain[0]])
    torch.testing.assert_close(loop.contributions["else"], expected)
    assert gain[0] != gain[2]


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


class Slow:
    """Sites that cannot be reached at first, or do not say who they are when they are first asked."""

    def __init__(self, absent: int, mute: int) -> None:
        self.absent, self.mute = absent, mute

    def present(self) -> list[int]:
        self.absent -= 1
        return [] if self.absent >= 0 else [100]

    def exchange(self, packets: Any, timeout: float) -> dict[int, Any]:
        if any(packet.kind == "hello" for packet in packets.values()):
            self.mute -= 1
            if self.mute >= 0:
                return dict.fromkeys(packets, "the node is not available")
            said = {**agreement(module(), shapfed()), "name": NAMES[0], "sizes": {"train": 3}}
            return {address: Packet("here", said) for address in packets}
        return {address: Packet("answer", {"of": address}) for address in packets}


@pytest.mark.parametrize(("absent", "mute"), [(0, 0), (2, 0), (0, 2)])
def test_the_first_site_is_waited_for(tmp_path: Path, absent: int, mute: int) -> None:
    """As after a restart of the server, while sites are busy or away."""
    directory = Directory(Slow(absent, mute), NAMES, agreement(module(), shapfed()), tmp_path / "book", wait=5)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        replies = directory.exchange({0: Packet("ask"), 1: Packet("ask")})
    assert replies[0].plain == {"of": 100}  # type: ignore[union-attr]
    assert replies[1] == "it is away"
    assert len([each for each in told if "has not said who it is" in str(each.message)]) == min(mute, 1)


def test_a_site_that_is_away_is_not_waited_for_while_others_are_there(tmp_path: Path) -> None:
    directory = Directory(Slow(0, 0), NAMES, agreement(module(), shapfed()), tmp_path / "book", wait=60)
    began = time.monotonic()
    assert directory.exchange({1: Packet("ask")}) == {1: "it is away"}
    assert time.monotonic() - began < 30


def test_nobody_is_waited_for_for_ever(tmp_path: Path) -> None:
    directory = Directory(Slow(10**6, 0), NAMES, agreement(module(), shapfed()), tmp_path / "book", wait=0.1)
    assert directory.exchange({0: Packet("ask")}) == {0: "it is away"}


@pytest.mark.parametrize(
    "reply", [Packet("broken"), Packet("tested", {"accuracy": "good"}), Packet("tested", {"accuracy": 7})]
)
def test_who_does_not_test_its_model_is_named(tmp_path: Path, reply: Packet) -> None:
    remote = with_splits(tmp_path, partial(shapfed, evaluate_clients_every=1))
    remote.transport.spoil = lambda address, packet, good: reply if (address, packet.kind) == (101, "test") else good
    with pytest.warns(UserWarning, match=r"site 'Lyon' \(client 1\) has not tested its model: its"):
        loop = remote.fit(rounds=1)
    assert loop.client_accuracy is not None
    assert loop.client_accuracy.isnan().tolist() == [False, True, False]


def test_sites_lie_as_clients_of_one_process_do(tmp_path: Path) -> None:
    def make() -> FederatedLoop:
        metrics = {"fedce": ContributionEstimation(), "else": EverybodyElse()}
        return shapfed(
            aggregator=FedAvg(), metrics=metrics, attacks=[FalseReports(loss=0.5, score=0.0, gain=-1.0, clients=[1])]
        )

    loop, local = both_with_splits(tmp_path, make)
    assert_same(loop, local)
    gains = loop.metrics["else"].diagnostics()["gain"]
    assert gains[1] == -3  # a round, three times
    assert (gains[[0, 2]] > -1).all()


def test_what_cannot_be_sent_to_sites_is_refused_before_the_first_round(tmp_path: Path) -> None:
    metric = partial(EverybodyElse, performance="val_loss", mode="min")
    with pytest.raises(ConfigurationError, match=r"measure models by .*'val_loss'.*cannot be sent to them"):
        with_splits(tmp_path, lambda: shapfed(metrics={"cssv": ClassSpecificShapley(), "else": metric()})).fit()


SPLITS = {"client_val_fraction": 0.3, "client_test_fraction": 0.2}


def with_splits(tmp_path: Path, make: Make) -> Remotely:
    """Sites with validation and test samples."""
    remote = Remotely(tmp_path / "b", make)
    for address, client in zip(remote.sites, range(3)):
        remote.transport.sites[address] = Site(
            NAMES[client], module, partial(InSplits, client, SPLITS), make, tmp_path / "sites"
        )
    return remote


def both_with_splits(tmp_path: Path, make: Make) -> tuple[FederatedLoop, FederatedLoop]:
    """Sites and one process, with the same splits on both sides: a site's are its own to choose."""
    local = one_process(tmp_path / "a", make, **SPLITS)
    return with_splits(tmp_path, make).fit(), local


class InSplits(FederatedDataModule):
    """One client of :func:`whole`, split as there."""

    def __init__(self, client: int, splits: dict[str, float]) -> None:
        super().__init__("digits", OneClient(), batch_size=16)
        self.whole = whole(**splits)
        self.client = client

    def setup(self, stage: str | None = None) -> None:
        self.whole.setup(stage)
        super().setup(stage)
        assert self._dealt is not None
        clients = [self.whole._data.splits.clients[self.client]]
        counts = self.whole.class_counts[self.client : self.client + 1]
        splits = replace(self.whole._data.splits, clients=clients)
        self._dealt = replace(self.whole._data, splits=splits, class_counts=counts)


def spoiled(kind: str, round_index: int, address: int, what: Any) -> Any:
    """Replaces one site's reply in one round."""

    def spoil(at: int, packet: Packet, reply: Packet) -> Any:
        hit = at == address and packet.kind == kind and packet.plain.get("round") == round_index
        return what(reply) if hit else reply

    return spoil


GARBAGE: dict[str, tuple[Any, str]] = {
    "late": (lambda reply: None, "no reply within 1 s"),
    "failed": (lambda reply: "out of memory (code 100)", "out of memory"),
    "another model": (
        lambda reply: Packet("update", reply.plain, {"vector": torch.zeros(3)}),
        r"its model is \[3\] of torch.float32",
    ),
    "words": (lambda reply: Packet("hm", {"a": "b"}), "lacks or garbles 'vector'"),
    "no samples": (
        lambda reply: Packet("update", {**reply.plain, "samples": 0}, reply.tensors),
        "its numbers cannot be: 0 samples",
    ),
    "another type": (
        lambda reply: Packet("update", reply.plain, {"vector": reply.tensors["vector"].long()}),
        "of torch.int64",
    ),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_who_sends_garbage_is_left_out_of_the_round(tmp_path: Path, kind: str) -> None:
    what, words = GARBAGE[kind]
    remote = Remotely(tmp_path, shapfed)
    remote.transport.spoil = spoiled("train", 1, 101, what)
    with pytest.warns(UserWarning, match=f"site 'Lyon' \\(client 1\\) is left out of round 1: .*{words}"):
        loop = remote.fit()
    assert loop.participations.tolist() == [3, 2, 3]
    assert loop.contributions["cssv"].isfinite().all()


@pytest.mark.parametrize("reports", [{}, {"control_variate_change": torch.zeros(3)}, {"more": torch.zeros(1)}])
def test_the_first_to_report_something_else_is_the_one_left_out(tmp_path: Path, reports: dict[str, Any]) -> None:
    remote = Remotely(tmp_path, CASES["scaffold"][0])
    tensors = {f"report/{name}": value for name, value in reports.items()}
    remote.transport.spoil = spoiled(
        "train", 1, 100, lambda reply: Packet("update", reply.plain, {"vector": reply.tensors["vector"], **tensors})
    )
    with pytest.warns(
        UserWarning, match=r"site 'Boston' \(client 0\) is left out of round 1: it reports .*, the others"
    ):
        loop = remote.fit()
    assert loop.participations.tolist() == [2, 3, 3]


def test_a_memory_that_lacks_what_counted_says_so(tmp_path: Path) -> None:
    memory = SiteMemory(tmp_path, "run")
    for index in range(3):
        memory.write(index, {"visits": torch.tensor(index)})
    assert memory.before(3, counted=1)["visits"] == 1
    with pytest.warns(UserWarning, match="no longer holds what was kept of round 0, .* goes on from nothing"):
        assert memory.before(1, counted=0) == {}
    with pytest.warns(UserWarning, match="kept of round 3, .* goes on from that of round 2"):
        assert memory.before(5, counted=3)["visits"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert memory.before(1, counted=-1) == {}
        assert memory.before(0, counted=0) == {}  # the server has gone back to before it


@pytest.mark.parametrize("why", ["late", "excluded"])
def test_what_did_not_count_leaves_no_trace_at_its_site(tmp_path: Path, why: str) -> None:
    """A site's control variate moves only with the server's, whether its update is lost or excluded. The server is
    killed and goes on from its checkpoint, too."""

    def make() -> FederatedLoop:
        return shapfed(
            aggregator=FedAvg("uniform"), metrics={}, client_algorithm=SCAFFOLD(), exclude_outliers=why == "excluded"
        )

    def huge(reply: Packet) -> Packet:
        return Packet("update", reply.plain, {**reply.tensors, "vector": 1e6 * reply.tensors["vector"]})

    what = {"late": lambda reply: None, "excluded": huge}[why]

    def spoil(address: int, packet: Packet, reply: Packet) -> Any:
        hit = packet.kind == "train" and address == 101 and packet.plain["round"] in (1, 2)
        return what(reply) if hit else reply

    remote = Remotely(tmp_path, make)
    remote.transport.spoil = spoil
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", save_last=True)
    with pytest.warns(UserWarning, match="left out of"):
        remote.fit(rounds=3, callbacks=[checkpoint], enable_checkpointing=True)
    loop = remote.fit(
        rounds=4, callbacks=[checkpoint], enable_checkpointing=True, ckpt_path=tmp_path / "ckpt/last.ckpt"
    )
    assert loop.participations.tolist() == [4, 2, 4]
    kept = [torch.load(tmp_path / "sites" / name / "state.pt", weights_only=True)["rounds"] for name in NAMES]
    assert sorted(kept[1]) == [0, 3]
    own = torch.stack([rounds[3]["state"]["control_variate"] for rounds in kept])
    variate = loop.state_dict()["strategies"]["client_algorithm"]["variate"]
    torch.testing.assert_close(variate, own.mean(0), rtol=1e-5, atol=1e-6)


def test_a_model_that_is_not_finite_is_left_out(tmp_path: Path) -> None:
    def poison(reply: Packet) -> Packet:
        return Packet("update", reply.plain, {**reply.tensors, "vector": reply.tensors["vector"] * float("nan")})

    remote = Remotely(tmp_path, shapfed)
    remote.transport.spoil = spoiled("train", 1, 101, poison)
    with pytest.warns(UserWarning, match=r"client 1 \('Lyon'\) returned a model with NaN .* in round 1"):
        loop = remote.fit()
    assert loop.participations.tolist() == [3, 2, 3]
    assert loop.state.model().isfinite().all()


def test_absence_is_not_a_zero(tmp_path: Path) -> None:
    """A site that is away in a round keeps its value, and its moving average goes on when it is back."""
    remote = Remotely(tmp_path, shapfed)
    away = remote.transport.sites.pop(102)
    seen = {}

    class Comes(L.Callback):
        def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            seen[trainer.current_epoch] = trainer.callbacks[0].contributions["cssv"].clone()  # type: ignore[attr-defined]
            remote.transport.sites[102] = away

    book = '{"Boston": {"train": 1, "val": 0, "test": 0}, "Lyon": {"train": 1, "val": 0, "test": 0}, '
    (tmp_path / "book.json").write_text(book + '"Osaka": {"train": 1, "val": 0, "test": 0}}')
    with pytest.warns(UserWarning, match=r"site 'Osaka' \(client 2\) is left out of round 0: it is away"):
        loop = remote.fit(callbacks=[Comes()])
    assert loop.participations.tolist() == [3, 3, 2]
    assert seen[0][2].isnan().all()
    assert seen[0][:2].isfinite().all()
    assert loop.contributions["cssv"].isfinite().all()


def test_a_killed_server_goes_on_and_sites_begin_where_they_stood(tmp_path: Path) -> None:
    """It dies after its sites have trained a round that it has not saved: they train it again from before it."""
    make = CASES["kept momentum, two of three"][0]
    whole_run = Remotely(tmp_path / "a", make, momentum).fit(4)
    broken = Remotely(tmp_path / "b", make, momentum)
    broken.transport.spoil = lambda address, packet, reply: (
        _die() if packet.plain.get("round") == 2 and address == max(broken.sites) else reply
    )
    saving = ModelCheckpoint(tmp_path / "b", save_last=True)
    with pytest.raises(Killed), pytest.warns(UserWarning, match="round 2 is discarded"):
        broken.fit(4, enable_checkpointing=True, callbacks=[saving])
    broken.transport.spoil = lambda address, packet, reply: reply
    resumed = broken.fit(4, ckpt_path=tmp_path / "b" / "last.ckpt")
    assert_same(resumed, whole_run)


class Killed(Exception):
    pass


def _die() -> Packet:
    raise Killed


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (WassersteinContribution, "asks clients about their samples"),
        (EverybodyElse, "need validation samples at every client"),
    ],
)
def test_what_a_deployment_cannot_give_is_refused_before_the_first_round(
    tmp_path: Path, metric: Any, words: str
) -> None:
    remote = Remotely(tmp_path, lambda: shapfed(metrics={"cssv": ClassSpecificShapley(), "w": metric()}))
    with pytest.raises(ConfigurationError, match=words):
        remote.fit()


def test_what_works_with_class_counts_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="aggregator DivergenceWeighted.*works with the clients' class counts"):
        Remotely(tmp_path, partial(shapfed, aggregator=DivergenceWeighted())).fit()


def test_the_server_cannot_draw_a_sites_noise(tmp_path: Path) -> None:
    """Its noise is of a secret of its own, and the same when a round is asked for again."""
    make = partial(shapfed, privacy=GaussianPrivacy(clip=1.0, noise_multiplier=0.1))
    known = Remotely(tmp_path / "a", make).fit(1).state.model()
    secret = Remotely(tmp_path / "b", make)
    secret.transport.sites.update(
        {100 + i: Site(NAMES[i], module, partial(SiteData, i), make, tmp_path / "sites") for i in range(3)}
    )
    sent: list[torch.Tensor] = []
    secret.transport.spoil = lambda address, packet, reply: sent.append(reply.tensors.get("vector")) or reply
    model = secret.fit(1).state.model()
    assert (model - known).abs().max() > 1e-4
    first = [vector for vector in sent if vector is not None]
    sent.clear()
    (tmp_path / "b" / "book.json").unlink()
    secret.fit(1)
    again = [vector for vector in sent if vector is not None]
    assert len(first) == 3
    for before, now in zip(first, again):
        torch.testing.assert_close(before, now, rtol=0, atol=0)


def test_a_second_node_of_one_name_is_left_alone(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, shapfed)
    remote.transport.sites[200] = remote.transport.sites[101]
    asked: list[int] = []
    remote.transport.spoil = lambda address, packet, reply: asked.append(address) or reply
    with pytest.warns(UserWarning, match="a second node calls itself site 'Lyon'"):
        loop = remote.fit(2)
    assert asked.count(200) == 1  # it was greeted
    assert loop.participations.tolist() == [2, 2, 2]


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"local_epochs": 2}, "training: .*local_epochs=2.* there, .*local_epochs=1"),
        ({"uploads": [TopK(0.5)]}, "at clients: .*TopK"),
    ],
)
def test_sites_with_other_settings_are_refused(tmp_path: Path, other: dict[str, Any], what: str) -> None:
    remote = Remotely(tmp_path, shapfed)
    remote.transport.sites[101] = site(tmp_path, 1, partial(shapfed, **other))
    with pytest.raises(ConfigurationError, match=f"site 'Lyon' and the server differ in {what}"):
        remote.fit()


def test_a_site_answers_no_other_question(tmp_path: Path) -> None:
    answering = site(tmp_path, 0, shapfed)
    packet = Packet("ask", {"question": "os:getcwd", "arguments": {"tuple": []}, "round": 0, "rounds": 1})
    with pytest.raises(PermissionError, match="site 'Boston' does not answer 'os:getcwd'"):
        answering.answer(packet)


def test_who_never_comes_is_named(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, shapfed)
    del remote.transport.sites[101]
    with pytest.raises(RuntimeError, match=r"sites \['Lyon'\] have not come within 0.2 s"):
        remote.fit()


def test_nobody_replies(tmp_path: Path) -> None:
    remote = Remotely(tmp_path, shapfed)
    remote.transport.spoil = lambda address, packet, reply: None if packet.kind == "train" else reply
    with pytest.warns(UserWarning, match="left out"), pytest.raises(RuntimeError, match="no site sent a model"):
        remote.fit()
