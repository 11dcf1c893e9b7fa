"""ShadowShapley: every coalition's model against a plain loop that trains this coalition alone."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from resuming import assert_resumes
from torch import Tensor, nn
from toys import Plain, adam, fit, network, sgd, toy_data, vector

from flsv import FederatedLoop, Reporting
from flsv.aggregation import FedAvg, ShapFedWA
from flsv.attacks import Alignment, ALittleIsEnough, FreeRider, Scaling, SignFlip
from flsv.clients.algorithms import FedProx, ShadowTraining
from flsv.data import FederatedDataModule
from flsv.errors import ConfigurationError
from flsv.filters import NormCap
from flsv.functional import exact_shapley, few_coalitions, few_coalitions_shapley
from flsv.metrics import ClassSpecificShapley, ShadowShapley
from flsv.metrics.shadow import coalition_masks
from flsv.personalization import Standalone
from flsv.privacy import GaussianPrivacy
from flsv.round import Round, TrainedCoalitions
from flsv.sampling import FixedCohort, UniformSampler
from flsv.seeding import generator_for, seed_global_rngs
from flsv.testing.fits import Turns

SEED, ROUNDS = 5, 3


def data(proportions: Sequence[int] = (4, 1, 2)) -> FederatedDataModule:
    return toy_data(tuple(proportions), server_val=0.3)


class Kept(ShadowShapley):
    """Keeps the coalitions' models of the last round."""

    models: dict[tuple[bool, ...], Tensor]

    @property
    def round_fields(self) -> dict[str, Any]:
        def game(round: Round) -> Callable[[Tensor], Tensor]:
            assert round.trained is not None
            vars(self)["models"] = models_of(round.trained, len(round.global_vector), round.global_vector.dtype)
            return self._game(round)

        return {"utility": game}


def models_of(trained: TrainedCoalitions, size: int, dtype: torch.dtype) -> dict[tuple[bool, ...], Tensor]:
    found = {}
    for place, mask in enumerate(trained.masks.tolist()):
        found[tuple(mask)] = torch.empty(size, dtype=dtype)
        trained.build(place, found[tuple(mask)])
    return found


def loop(metric: ShadowShapley | None = None, **options: Any) -> FederatedLoop:
    metrics = {"shadow": metric or Kept(coalitions="all"), **options.pop("metrics", {})}
    return FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False), **options)


def by_a_plain_loop(
    module: Plain,
    members: Sequence[int],
    cohorts: Sequence[Sequence[int]],
    weighting: str = "samples",
    rate: float = 1.0,
) -> Tensor:
    """FedAvg of these clients alone, ``[P]``."""
    module, dealt = copy.deepcopy(module).train(), data()
    dealt.setup("fit")
    names = [name for name, _ in module.named_parameters()]
    for index, cohort in enumerate(cohorts):
        start, sent, weights = copy.deepcopy(module.state_dict()), [], []
        for client in (client for client in cohort if client in members):
            module.load_state_dict(start)
            seed_global_rngs(SEED, "train", index, client)
            optimizer = module.configure_optimizers()
            stream = generator_for(SEED, "shuffle", index, client, 0)
            for batch in dealt.client_loader(client, "train", generator=stream):
                optimizer.zero_grad()
                x, y = batch
                module.training_step((x.to(module.net[0].weight.dtype), y), 0).backward()
                optimizer.step()
            sent.append(copy.deepcopy(module.state_dict()))
            weights.append(float(dealt.num_samples[client]) if weighting == "samples" else 1.0)
        if not sent:
            continue
        state = {}
        for name, before in start.items():
            if not before.is_floating_point():
                state[name] = sent[0][name]
                continue
            mean = sum(w * each[name] for w, each in zip(weights, sent)) / sum(weights)
            state[name] = before + rate * (mean - before) if name in names else mean
        module.load_state_dict(state)
    return vector(module)


EVERYBODY = [[0, 1, 2]] * ROUNDS
KINDS: dict[str, Any] = {
    "momentum": lambda: Plain(network(batch_norm=False)),
    "Adam": lambda: Plain(network(batch_norm=False), adam),
    "batch norm": lambda: Plain(network()).double(),  # which makes rounding large
    "dropout": lambda: Plain(network(batch_norm=False, dropout=0.4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_coalitions_are_what_a_plain_loop_makes_of_them(tmp_path: Path, kind: str) -> None:
    module, federation = KINDS[kind](), loop()
    start = copy.deepcopy(module)
    options = {"precision": "64-true"} if kind == "batch norm" else {}
    trained = fit(federation, tmp_path, module, data(), rounds=ROUNDS, **options)
    models = federation.metrics["shadow"].models
    assert len(models) == 8
    for mask, found in models.items():
        members = [client for client in range(3) if mask[client]]
        expected = by_a_plain_loop(start, members, EVERYBODY)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(models[True, True, True].double(), vector(trained), rtol=0, atol=0)
    assert torch.stack(list(models.values())).unique(dim=0).shape[0] == 8


@pytest.mark.parametrize(("weighting", "rate"), [("uniform", 1.0), ("samples", 0.5)])
def test_servers_weights_and_rate(tmp_path: Path, weighting: Any, rate: float) -> None:
    module = Plain().double()
    start = copy.deepcopy(module)
    federation = loop(aggregator=FedAvg(weighting, server_lr=rate))
    fit(federation, tmp_path, module, data(), rounds=ROUNDS, precision="64-true")
    for mask, found in federation.metrics["shadow"].models.items():
        members = [client for client in range(3) if mask[client]]
        expected = by_a_plain_loop(start, members, EVERYBODY, weighting, rate)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_who_is_absent_trains_in_no_coalition(tmp_path: Path) -> None:
    cohorts = [[0, 2], [1], [0, 1]]
    module = Plain(network(batch_norm=False))
    start, federation = copy.deepcopy(module), loop(sampler=Turns(cohorts))
    fit(federation, tmp_path, module, data(), rounds=ROUNDS)
    for mask, found in federation.metrics["shadow"].models.items():
        members = [client for client in range(3) if mask[client]]
        expected = by_a_plain_loop(start, members, cohorts)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_clients_who_attack_do_so_in_every_coalition(tmp_path: Path) -> None:
    """As in runs of a coalition; also an attack that keeps something between rounds, which is another per model."""
    attacks = [Scaling(2.0, clients=[0]), FreeRider("noise", clients=[1]), Alignment(0.7, clients=[2])]
    module = Plain(network(batch_norm=False))
    start, federation = copy.deepcopy(module), loop(uploads=attacks)
    fit(federation, tmp_path, module, data(), rounds=ROUNDS)
    models = federation.metrics["shadow"].models
    for mask, found in models.items():
        members = [client for client in range(3) if mask[client]]
        if members:
            alone = FederatedLoop(
                sampler=FixedCohort(members), uploads=attacks, seed=SEED, reporting=Reporting(table=False)
            )
            expected = vector(fit(alone, tmp_path, copy.deepcopy(start), data(), rounds=ROUNDS))
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_who_never_came_has_no_value(tmp_path: Path) -> None:
    federation = loop(sampler=Turns([[0, 2]]))
    fit(federation, tmp_path, Plain(network(batch_norm=False)), data(), rounds=1)
    assert federation.contributions["shadow"].isnan().tolist() == [False, True, False]


def test_values_are_the_games(tmp_path: Path) -> None:
    metrics = {
        "few": Kept(coalitions="all", performance="negative_loss"),
        "classes": Kept(coalitions="all", per_class=True),
    }
    federation = FederatedLoop(metrics=metrics, seed=SEED, reporting=Reporting(table=False))
    module, dealt = Plain(network(batch_norm=False)), data()
    fit(federation, tmp_path, module, dealt, rounds=ROUNDS)
    x, y = (torch.cat(parts) for parts in zip(*dealt.val_dataloader()))
    models = federation.metrics["few"].models

    def logits(mask: Tensor) -> Tensor:
        federation.space.write(module, models[tuple(mask.tolist())])
        with torch.no_grad():
            return module.eval()(x)

    def loss(masks: Tensor) -> Tensor:
        return torch.stack([-nn.functional.cross_entropy(logits(mask).double(), y) for mask in masks])

    def per_class(masks: Tensor) -> Tensor:
        hits = [logits(mask).argmax(1) == y for mask in masks]
        return torch.stack([torch.stack([hit[y == c].double().mean() for c in range(3)]) for hit in hits])

    found = federation.contributions
    torch.testing.assert_close(found["few"].double(), exact_shapley(loss, 3).values, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found["classes"].double(), exact_shapley(per_class, 3).values, rtol=1e-5, atol=1e-6)
    assert federation.metrics["few"].intervals() is None  # nothing is left open


def test_few_coalitions_have_the_kernels_values_and_intervals(tmp_path: Path) -> None:
    federation = loop(ShadowShapley(coalitions="pairs", performance="negative_loss"))
    whole = loop(ShadowShapley(coalitions="all", performance="negative_loss"))
    for each in (federation, whole):
        fit(each, tmp_path, Plain(network(batch_norm=False)), data((2, 2, 1, 3)), rounds=2)
    metric = federation.metrics["shadow"]
    low, high = metric.intervals(0.9)
    value = metric.compute()
    assert ((low < value) & (value < high)).all()
    torch.testing.assert_close((high - low) / 2, 1.6448536 * metric.diagnostics()["stderr"], rtol=1e-5, atol=0)
    assert int(metric.diagnostics()["evaluations"]) == 2 * 12
    # Everybody's gain is shared out in both.
    torch.testing.assert_close(value.sum(), whole.contributions["shadow"].sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("coalitions", ["singles", "pairs", "leave-one-out", "both", "all", [[0], [1, 2]]])
def test_any_coalitions(tmp_path: Path, coalitions: Any) -> None:
    federation = loop(Kept(coalitions=coalitions))
    fit(federation, tmp_path, Plain(network(batch_norm=False)), data(), rounds=2)
    whole = loop(Kept(coalitions="all"))
    fit(whole, tmp_path, Plain(network(batch_norm=False)), data(), rounds=2)
    models, every = federation.metrics["shadow"].models, whole.metrics["shadow"].models
    assert [list(mask) for mask in models] == coalition_masks(coalitions, 3).tolist()
    for mask, model in models.items():
        torch.testing.assert_close(model, every[mask], rtol=1e-5, atol=1e-6)


def test_the_federation_trains_as_without(tmp_path: Path) -> None:
    plain = FederatedLoop(seed=SEED, reporting=Reporting(table=False))
    without = fit(plain, tmp_path, Plain(), data())
    for metric in (ShadowShapley(), ShadowShapley(part="head"), ShadowShapley(one_by_one=True)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            beside = fit(loop(metric), tmp_path, Plain(), data())
        assert torch.equal(vector(beside), vector(without))


@pytest.mark.parametrize("metric", [ShadowShapley, lambda: ShadowShapley(part="head")])
def test_resumes_to_the_bit(tmp_path: Path, metric: Any) -> None:
    whole = assert_resumes(lambda: loop(metric(), sampler=UniformSampler(2)), tmp_path, Plain, data)
    rows = whole.state_dict()["strategies"]["client_algorithm"]["rows"]
    assert rows.shape[0] == 6
    assert rows.unique(dim=0).shape[0] == 6


def test_models_cross_and_are_counted(tmp_path: Path) -> None:
    federation = loop(ShadowShapley(coalitions="pairs"))
    fit(federation, tmp_path, Plain(), data(), rounds=1)
    size = federation.space.size
    assert federation.channel.numbers([0], "down").tolist() == [size + 3 * size]
    assert federation.channel.numbers([0], "up").tolist() == [size + 3 * (size + 1)]


def test_a_model_that_diverges_keeps_its_client_out_of_the_coalition(tmp_path: Path) -> None:
    """It stays what it was, and the run goes on, as a federation whose only client sends nothing finite would."""
    federation = loop(Kept(coalitions="all"))
    algorithm = federation.client_algorithm
    assert isinstance(algorithm, ShadowTraining)
    module = Plain(network(batch_norm=False))

    class Breaks(ShadowTraining):
        def end_client(self, context: Any) -> Any:
            told = super().end_client(context)["trained_coalition_models"]
            if context.instruction.client_id == 1:
                told = told.clone()
                told[:, 0] = 0
            return {"trained_coalition_models": told}

    algorithm.__class__ = Breaks
    start = copy.deepcopy(module)
    fit(federation, tmp_path, module, data(), rounds=2)
    models = federation.metrics["shadow"].models
    torch.testing.assert_close(models[False, True, False].double(), vector(start), rtol=0, atol=0)
    expected = by_a_plain_loop(start, [0], EVERYBODY[:2])
    torch.testing.assert_close(models[True, True, False].double(), expected, rtol=1e-5, atol=1e-5)


class Reads(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss) < 1e9 else 0 * loss


class Draws(Plain):
    """Random numbers that are not torch's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * random.uniform(0.5, 1.5)


class Twice(Plain):
    """Steps by something that batched training does not know."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            parameter.grad *= 2


def refused(folder: Path, match: str, module: L.LightningModule | None = None, **options: Any) -> None:
    def attempt() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(loop(**options), folder, module or Plain(network(batch_norm=False)), data(), rounds=1)

    with pytest.raises(ConfigurationError, match=match):
        attempt()


REFUSED: dict[str, tuple[str, Any]] = {
    "personaliser": ("gives each client a start point", lambda: {"personalizer": Standalone()}),
    "aggregator": ("does more than to average", lambda: {
        "aggregator": ShapFedWA("cssv"), "metrics": {"cssv": ClassSpecificShapley()}}),
    "noise": ("noise would be spent", lambda: {"uploads": [GaussianPrivacy(1.0, 0.1)]}),
    "colluders": ("colluders would meet", lambda: {"uploads": [ALittleIsEnough(clients=[0, 1])]}),
    "attack on a part": ("change whole updates", lambda: {
        "uploads": [SignFlip(clients=[1])], "metric": ShadowShapley(part=["net.4.*"])}),
    "filter": ("change a cohort's updates", lambda: {"filters": [NormCap(1.0)]}),
    "share": ("stay at their clients", lambda: {"share": ["!net.4.*"]}),
    "optimizer": ("keep", lambda: {"client_optimizer": "keep"}),
    "engine": ("vmap", lambda: {"engine": "vmap"}),
    "two sets": ("different coalitions", lambda: {"metrics": {"other": ShadowShapley(coalitions="singles")}}),
    "algorithm": ("client_algorithm=FedProx", lambda: {"client_algorithm": FedProx(0.1)}),
    "no such client": ("names clients", lambda: {"metric": ShadowShapley(coalitions=[[7]])}),
    "no such part": ("matches no parameter", lambda: {"metric": ShadowShapley(part=["head.*"])}),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_refused_before_training(tmp_path: Path, what: str) -> None:
    match, options = REFUSED[what]
    refused(tmp_path, match, **options())


@pytest.mark.parametrize(
    ("module", "match"),
    [
        (lambda: Draws(network(batch_norm=False)), "one_by_one=True"),
        (lambda: Reads(network(batch_norm=False)), "reads values off tensors.*one_by_one=True"),
        (lambda: Twice(network(batch_norm=False)), "on_after_backward"),
        (lambda: Plain(network(batch_norm=False), lambda p: torch.optim.LBFGS(p)), "LBFGS"),
    ],
)
def test_modules_that_cannot_be_batched(tmp_path: Path, module: Any, match: str) -> None:
    refused(tmp_path, match, module())


def test_a_row_that_is_not_the_clients_own_model_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both began alike and saw the same: here rows step twice as far."""
    from flsv.clients.batched import StackedOptimizer

    step = StackedOptimizer.step

    def twice(self: Any, *args: Any) -> None:
        step(self, *args)
        step(self, *args)

    monkeypatch.setattr(StackedOptimizer, "step", twice)
    refused(tmp_path, "model of a coalition differs by")


@pytest.mark.parametrize(
    ("module", "options", "match"),
    [
        (Twice, {}, "on_after_backward"),
        (Plain, {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"}, "Clip by norm"),
        (Plain, {"accumulate_grad_batches": 2}, "accumulated"),
    ],
)
def test_one_by_one_is_refused_what_it_would_do_otherwise(
    tmp_path: Path, module: Any, options: dict[str, Any], match: str
) -> None:
    federation = loop(ShadowShapley(one_by_one=True))
    with pytest.raises(ConfigurationError, match=match):
        fit(federation, tmp_path, module(network(batch_norm=False)), data(), rounds=1, **options)


@pytest.mark.parametrize(
    "arguments",
    [
        {"coalitions": "some"},
        {"part": "tail"},
        {"part": "head", "one_by_one": True},
        {"per_class": True, "performance": "f1"},
    ],
)
def test_wrong_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError):
        ShadowShapley(**arguments)


def test_a_loop_of_other_metrics_has_no_shadows() -> None:
    federation = loop()
    assert isinstance(federation.client_algorithm, ShadowTraining)
    assert federation.replace(seed=1).client_algorithm is federation.client_algorithm
    assert federation.replace(metrics=None).client_algorithm is None
    assert (
        federation.replace(metrics={"s": ShadowShapley(coalitions="singles")}).client_algorithm.coalitions == "singles"
    )


def test_one_by_one_is_the_same(tmp_path: Path) -> None:
    federation = loop(Kept(coalitions="all", one_by_one=True))
    whole = loop()
    with pytest.warns(UserWarning, match="about 4 times as long"):
        fit(federation, tmp_path, Plain(), data(), rounds=2)
    fit(whole, tmp_path, Plain(), data(), rounds=2)
    models, every = federation.metrics["shadow"].models, whole.metrics["shadow"].models
    for mask, model in models.items():
        torch.testing.assert_close(model, every[mask], rtol=1e-4, atol=1e-5)


def test_one_by_one_takes_what_cannot_be_batched(tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in (Draws(network(dropout=0.5)), Reads(network())):
            federation = loop(Kept(coalitions="pairs", one_by_one=True))
            fit(federation, tmp_path, module, data(), rounds=2)
            assert federation.contributions["shadow"].isfinite().all()


def test_estimates_are_those_of_few_coalitions() -> None:
    masks = few_coalitions(5, "pairs")
    assert len(masks) == 17
    assert masks.sum(1).tolist() == [0, 5] + [1] * 5 + [2] * 10

    def game(masks: Tensor) -> Tensor:
        return masks.double().sum(1).sqrt() + masks[:, 0]

    metric = ShadowShapley(num_clients=5)
    metric.update(torch.arange(5), masks, game)
    torch.testing.assert_close(
        metric.compute().double(), few_coalitions_shapley(masks, game(masks)).values, rtol=1e-6, atol=1e-6
    )


def head_by_a_plain_loop(module: Plain, members: Sequence[int]) -> Tensor:
    """Heads of a coalition on the federation's trunk, by hand: ``[P]``."""
    module, dealt = copy.deepcopy(module).train(), data()
    dealt.setup("fit")
    head = copy.deepcopy(module.net[4])
    for index in range(ROUNDS):
        start, sent, heads, weights, theirs = copy.deepcopy(module.state_dict()), [], [], [], []
        for client in range(3):
            module.load_state_dict(start)
            mine = copy.deepcopy(head)
            own, of_head = module.configure_optimizers(), sgd(mine.parameters())
            for x, y in dealt.client_loader(
                client, "train", generator=generator_for(SEED, "shuffle", index, client, 0)
            ):
                own.zero_grad()
                of_head.zero_grad()
                features = module.net[:4](x)
                nn.functional.cross_entropy(module.net[4](features), y).backward()
                nn.functional.cross_entropy(mine(features.detach()), y).backward()
                own.step()
                of_head.step()
            sent.append(copy.deepcopy(module.state_dict()))
            weights.append(float(dealt.num_samples[client]))
            if client in members:
                heads.append(mine.state_dict())
                theirs.append(weights[-1])
        floating = [n for n, t in start.items() if t.is_floating_point()]
        mean = {n: sum(w * s[n] for w, s in zip(weights, sent)) / sum(weights) for n in floating}
        module.load_state_dict({**start, **mean})
        head.load_state_dict({n: sum(w * h[n] for w, h in zip(theirs, heads)) / sum(theirs) for n in heads[0]})
    module.net[4].load_state_dict(head.state_dict())
    return vector(module)


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("part", ["head", ["net.4.*"]])
def test_heads_are_trained_on_the_federations_features(tmp_path: Path, batch_norm: bool, part: Any) -> None:
    module, federation = Plain(network(batch_norm)), loop(Kept(coalitions="all", part=part))
    start = copy.deepcopy(module)
    fit(federation, tmp_path, module, data(), rounds=ROUNDS)
    models = federation.metrics["shadow"].models
    torch.testing.assert_close(models[False, False, False].double(), vector(start), rtol=0, atol=0)
    for mask, found in models.items():
        members = [client for client in range(3) if mask[client]]
        if members:
            torch.testing.assert_close(found.double(), head_by_a_plain_loop(start, members), rtol=1e-5, atol=1e-5)
    assert torch.stack(list(models.values())).unique(dim=0).shape[0] == 8


def test_heads_of_features_that_draw_and_cannot_be_batched(tmp_path: Path) -> None:
    """Dropout and a recurrent layer before the head are not done twice."""

    class Recurrent(Plain):
        def __init__(self) -> None:
            torch.manual_seed(0)
            super().__init__(nn.Linear(8, 3))
            self.gru, self.drop = nn.GRU(6, 8, batch_first=True), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Tensor:
            return self.net(self.drop(self.gru(x[:, None])[0][:, -1]))

    federation = loop(Kept(coalitions="all", part=["net.*"]))
    without = fit(FederatedLoop(seed=SEED, reporting=Reporting(table=False)), tmp_path, Recurrent(), data())
    beside = fit(federation, tmp_path, Recurrent(), data())
    assert torch.equal(vector(beside), vector(without))
    assert federation.contributions["shadow"].isfinite().all()


def test_layers_after_the_part_are_not_reused(tmp_path: Path) -> None:
    """What comes after the first layer of the part depends on it: dropout and another layer in between."""
    federation = loop(Kept(coalitions="all", part=["net.0.*", "net.4.*"]))
    whole = loop(Kept(coalitions="all"))
    for each in (federation, whole):
        fit(each, tmp_path, Plain(network(batch_norm=False, dropout=0.4)), data())
    # Of this network the part is the whole.
    every = whole.metrics["shadow"].models
    for mask, model in federation.metrics["shadow"].models.items():
        torch.testing.assert_close(model, every[mask], rtol=1e-5, atol=1e-5)


class Between(Plain):
    """A layer that no part has between two that it has."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        super().__init__(
            nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), nn.Linear(8, 3))
        )


def test_a_layer_between_two_of_the_part_sees_the_coalitions_own(tmp_path: Path) -> None:
    """Against the gradient of the part by hand, in the second round's first step, where coalitions differ."""
    steps: list[tuple[dict[str, Tensor], dict[str, Tensor], Any, dict[str, Tensor], Tensor]] = []
    from flsv.clients.rows import RowTraining

    class Watched(RowTraining):
        def gradients(self, batch: Any) -> dict[str, Tensor]:
            before = {name: tensor.clone() for name, tensor in self.states.items()}
            own = {name: tensor.detach().clone() for name, tensor in module.named_parameters()}
            drawn = torch.get_rng_state()
            found = super().gradients(batch)
            steps.append((before, {n: g.clone() for n, g in found.items()}, batch, own, drawn))
            return found

    federation, module = loop(ShadowShapley(coalitions="all", part=["net.0.*", "net.2.*"])), Between()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flsv.clients.algorithms.shadow_rows.RowTraining", Watched)
        fit(federation, tmp_path, module, data(), rounds=2)
    rows, gradients, batch, own, drawn = steps[-1]
    assert rows["net.0.weight"].unique(dim=0).shape[0] == 3
    for row in range(3):
        copied = copy.deepcopy(module).train()
        state = {**own, **{name: tensor[row] for name, tensor in rows.items()}}
        copied.load_state_dict(state)
        torch.set_rng_state(drawn)
        copied.training_step(batch, 0).backward()
        for name, parameter in copied.named_parameters():
            if name in gradients:
                torch.testing.assert_close(gradients[name][row], parameter.grad, rtol=1e-4, atol=1e-6)


def test_values_every_so_many_rounds_and_at_the_end(tmp_path: Path) -> None:
    whole, some = loop(ShadowShapley(coalitions="all")), loop(ShadowShapley(coalitions="all", every=2))
    for each in (whole, some):
        fit(each, tmp_path, Plain(network(batch_norm=False)), data(), rounds=3)
    assert torch.equal(whole.contributions["shadow"], some.contributions["shadow"])
    assert int(some.metrics["shadow"].evaluations) == 2 * 8
    assert int(whole.metrics["shadow"].evaluations) == 3 * 8
