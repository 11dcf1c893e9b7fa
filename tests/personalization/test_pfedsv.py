"""PFedSV: one client's game by hand, the rules of downloading, what crosses, and whole federations."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from resume_run import Stop
from torch import Tensor, nn
from toys import FEATURES, Plain, fit, toy_data

from flsv import FederatedDataModule
from flsv.data import PathologicalPartitioner
from flsv.errors import ConfigurationError
from flsv.functional import label_overlap
from flsv.local_data import Client, LocalData
from flsv.loop import FederatedLoop
from flsv.metrics import CommunicationCost, DomainRelevance
from flsv.parameters import ParameterSpace
from flsv.personalization import PFedSV
from flsv.personalization.pfedsv import collaborate
from flsv.round import Round
from flsv.sampling import ClientSampler, UniformSampler
from flsv.strategy import Federation

nan = float("nan")


class Judged:
    """A client whose accuracy of a model is whatever a function of its vector says."""

    def __init__(self, id: int, accuracy: Any, model: Tensor | None = None) -> None:
        self.asked: list[Tensor] = []
        self.accuracy, self.model = accuracy, model
        counts = torch.tensor([1, 1])
        data = LocalData(f"client {id}", lambda split: [], counts, counts, lambda batches: self, lambda: self.model)
        self.client = Client(id, data)

    def __call__(self, vectors: Tensor) -> Any:
        self.asked.append(vectors.clone())
        values = torch.tensor([float(self.accuracy(vector)) for vector in vectors], dtype=torch.float64)
        return type("Scores", (), {"value": staticmethod(lambda measure: {"accuracy": values}[measure])})


NETWORK = nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 2))  # 3 + 4 parameters, the last 4 are the head
SPACE = ParameterSpace(NETWORK)


def begun(n: int, method: PFedSV, val: Tensor | None = None, space: ParameterSpace = SPACE) -> PFedSV:
    some = torch.ones(n, dtype=torch.long)
    sizes = {"train": some, "val": some if val is None else val, "test": some}
    method.begin(Federation(torch.zeros(space.size), space, n, 2, sizes, 0))
    return method


def play(
    method: PFedSV, clients: list[Judged], vectors: Tensor, relevance: Tensor | None = None, index: int = 0
) -> Any:
    ids = [each.client.id for each in clients]
    round = Round(
        index,
        torch.tensor(ids),
        torch.ones(len(ids), dtype=torch.long),
        torch.zeros(SPACE.size),
        vectors,
        SPACE,
        clients=tuple(each.client for each in clients),
        server_vector=vectors.mean(0),
        aggregation_weights=torch.full((len(ids),), 1 / len(ids)),
    )
    contributions = {} if relevance is None else {"relevance": relevance}
    models = method.personalize(round, contributions, {})
    return models, method.exchanged(round)


def exact_values(vectors: np.ndarray, accuracy: Any) -> np.ndarray:
    """Equation 2: the mean over all orders."""
    count = len(vectors)

    def worth(members: tuple[int, ...]) -> float:
        return float(accuracy(vectors[list(members)].mean(0))) if members else 0.0

    values = np.zeros(count)
    orders = list(itertools.permutations(range(count)))
    for order in orders:
        for place, player in enumerate(order):
            values[player] += worth(order[: place + 1]) - worth(order[:place])
    return values / len(orders)


def random_models(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, SPACE.size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def closeness(target: Any) -> Any:
    """An accuracy: 1 at ``target``, falling with the distance."""
    return lambda vector: np.exp(-np.linalg.norm(np.asarray(vector) - np.asarray(target)) / 3)


@pytest.mark.parametrize("self_weight", ["mean", "exclude", "min"])
def test_a_pair_of_clients_by_hand(self_weight: Any) -> None:
    vectors = random_models(2)
    accuracy = closeness(vectors[1])
    models, exchange = play(begun(2, PFedSV(self_weight=self_weight)), [Judged(0, accuracy)], vectors[:1])
    assert exchange.client_values.isnan().tolist() == [[False, True]]  # nobody else has uploaded yet
    method = begun(2, PFedSV(self_weight=self_weight))
    models, exchange = play(method, [Judged(0, accuracy), Judged(1, lambda vector: 0)], vectors)
    values = exact_values(vectors.numpy(), accuracy)
    np.testing.assert_allclose(exchange.client_values[0], values, atol=1e-6)
    mean = (torch.as_tensor(values) @ vectors) / values.sum()  # the one distance that there is, for both
    torch.testing.assert_close(models[0], vectors[1] if self_weight == "exclude" else mean)


def test_four_clients_against_all_orders() -> None:
    vectors = random_models(4, seed=1)
    accuracy = closeness(vectors[[0, 2]].mean(0))
    everybody = [Judged(0, accuracy), *[Judged(i, lambda vector: 0) for i in (1, 2, 3)]]
    models, exchange = play(begun(4, PFedSV()), everybody, vectors)
    values = exact_values(vectors.numpy(), accuracy)
    np.testing.assert_allclose(exchange.client_values[0], values, atol=1e-6)
    distances = np.linalg.norm(vectors.numpy() - vectors[0].numpy(), axis=1)
    distances[0] = distances[1:].mean()
    weights = np.maximum(values, 0) / distances
    np.testing.assert_allclose(models[0], weights / weights.sum() @ vectors.numpy(), atol=1e-6)
    # Every coalition but the empty one, once, in one call.
    (asked,) = everybody[0].asked
    assert len(asked) == len(asked.unique(dim=0)) == 15


def test_nine_players_are_sampled_within_the_budget_of_the_paper() -> None:
    vectors = random_models(9, seed=2)
    target = vectors[:4].mean(0)
    game = closeness(target)
    first, *others = [Judged(i, game if i == 0 else lambda vector: 0) for i in range(9)]
    _, exchange = play(begun(9, PFedSV(k=8)), [first, *others], vectors)
    found = exchange.client_values[0].double()
    asked = torch.cat(first.asked)
    assert len(asked) == len(asked.unique(dim=0)) <= 27 * 8 + 2
    assert len(first.asked) < 10
    assert found.sum().item() == pytest.approx(float(game(vectors.mean(0))), abs=1e-5)  # efficiency
    # The exact value from all 2^9 coalitions.
    worth = {
        m: float(game(vectors[list(m)].mean(0))) for k in range(1, 10) for m in itertools.combinations(range(9), k)
    }
    worth[()] = 0.0
    exact = np.zeros(9)
    for members, value in worth.items():
        for i in set(range(9)) - set(members):
            weight = 1 / (9 * math.comb(8, len(members)))
            exact[i] += weight * (worth[tuple(sorted((*members, i)))] - value)
    assert np.corrcoef(found, exact)[0, 1] > 0.8


def test_all_values_negative_keeps_the_own_model_as_it_was_before_noise() -> None:
    vectors = random_models(3)
    own = vectors[0] + 7
    models, exchange = play(
        begun(3, PFedSV()),
        [Judged(0, lambda vector: -1 - len(vector), own), Judged(1, lambda vector: 0), Judged(2, lambda vector: 0)],
        vectors,
    )
    assert (exchange.client_values[0] < 0).all()
    assert torch.equal(models[0], own)
    # What others download is what it has uploaded.
    assert torch.equal(torch.stack([models[1], models[2]]), vectors[1:])


def test_the_own_player_is_the_model_before_noise() -> None:
    vectors = random_models(2)
    own = vectors[0] + 0.5
    client = Judged(0, closeness(own), own)
    _, exchange = play(begun(2, PFedSV()), [client, Judged(1, lambda vector: 0)], vectors)
    pair = torch.stack([own, vectors[1]]).numpy()
    np.testing.assert_allclose(exchange.client_values[0], exact_values(pair, closeness(own)), atol=1e-6)


@pytest.mark.parametrize("better", [True, False])
def test_the_safeguard_refuses_a_mixture_that_is_worse(better: bool) -> None:
    vectors = random_models(2)
    # The other model is worth something to client 0 by itself, and the mixture less, or more, than its own model.
    target = vectors.mean(0) if better else vectors[0]
    clients = [Judged(0, closeness(target)), Judged(1, closeness(target))]
    free, _ = play(begun(2, PFedSV()), clients, vectors)
    careful, exchange = play(begun(2, PFedSV(safeguard=True)), clients, vectors)
    assert exchange.client_values is not None
    assert (exchange.client_values[0] > 0).all()
    assert not torch.equal(free[0], vectors[0])
    assert torch.equal(careful[0], free[0] if better else vectors[0])


def test_identical_models() -> None:
    vectors = random_models(1).expand(3, -1).clone()
    models, _ = play(begun(3, PFedSV()), [Judged(i, closeness(vectors[0])) for i in range(3)], vectors)
    for model in models.values():
        torch.testing.assert_close(model, vectors[0])


def test_k_larger_than_the_federation() -> None:
    _, exchange = play(begun(3, PFedSV(k=99)), [Judged(i, lambda v: 0.5) for i in range(3)], random_models(3))
    assert exchange.downloaded.tolist() == [2 * SPACE.size] * 3
    assert not exchange.client_values.isnan().any()


def test_who_is_absent_is_downloaded_as_it_was_and_who_never_came_is_not() -> None:
    method = begun(4, PFedSV())
    vectors = random_models(3)
    play(method, [Judged(1, lambda v: 0.5), Judged(2, lambda v: 0.5)], vectors[1:])
    late = Judged(0, lambda v: 0.5)  # appears first in a later round
    _, exchange = play(method, [late], vectors[:1], torch.full((4, 4), nan), index=7)
    assert exchange.client_values.isnan().tolist() == [[False, False, False, True]]
    assert exchange.downloaded.tolist() == [2 * SPACE.size]
    pairs = torch.cat(late.asked)
    for stale in vectors:
        assert (pairs == stale).all(1).any()


def test_a_negative_score_is_never_downloaded_again() -> None:
    relevance = torch.full((4, 4), nan)
    relevance[0] = torch.tensor([0.5, -0.1, 0.2, 0.0])
    method, clients = begun(4, PFedSV()), [Judged(i, lambda v: 0.5) for i in range(4)]
    _, exchange = play(method, clients, random_models(4), relevance, index=1)
    assert exchange.client_values[0].isnan().tolist() == [False, True, False, True]
    assert exchange.downloaded.tolist() == [SPACE.size, *[3 * SPACE.size] * 3]
    relevance[0] = torch.tensor([0.5, -0.1, -0.2, -0.3])
    models, exchange = play(method, clients, random_models(4), relevance, index=2)
    assert exchange.downloaded[0] == 0
    torch.testing.assert_close(models[0], random_models(4)[0])


def test_a_shared_extractor() -> None:
    vectors = random_models(3)
    method, clients = begun(3, PFedSV(mode="extractor")), [Judged(i, closeness(vectors[1])) for i in range(3)]
    models, exchange = play(method, clients, vectors)
    server = vectors.mean(0)
    asked = torch.cat(clients[0].asked)
    assert (asked[:, :3] == server[:3]).all()
    for model in models.values():
        assert torch.equal(model[:3], server[:3])
    # Shapley values and distances are those of heads on the common extractor.
    whole = torch.cat([server[:3].expand(3, -1), vectors[:, 3:]], dim=1)
    values = exchange.client_values[0].double()
    np.testing.assert_allclose(values, exact_values(whole.numpy(), closeness(vectors[1])), atol=1e-6)
    distances = (vectors[:, 3:] - vectors[0, 3:]).norm(dim=1)
    distances[0] = distances[1:].mean()
    weights = values.clamp_min(0) / distances
    torch.testing.assert_close(models[0][3:], weights / weights.sum() @ vectors[:, 3:], atol=1e-6, rtol=0)
    # Up: a model. Down: the extractor, 3 parameters, and two heads of 4.
    assert exchange.uploaded.tolist() == [7] * 3
    assert exchange.downloaded.tolist() == [3 + 2 * 4] * 3
    # A client that was away fetches the extractor before it trains, too.
    _, exchange = play(method, clients[:2], vectors[:2], index=1)
    assert exchange.downloaded.tolist() == [3 + 2 * 4] * 2
    _, exchange = play(method, clients, vectors, index=2)
    assert exchange.downloaded.tolist() == [3 + 2 * 4, 3 + 2 * 4, 2 * 3 + 2 * 4]


def test_start_points() -> None:
    vector, own = torch.arange(7.0), torch.full((7,), -1.0)
    client = Judged(1, lambda v: 0).client
    whole, shared = begun(2, PFedSV()), begun(2, PFedSV(mode="extractor"))
    # A newcomer: the initial model, which begun() sets to zeros, on the extractor that there is.
    assert whole.start(client, vector, {}).tolist() == [0] * 7
    assert shared.start(client, vector, {}).tolist() == [0, 1, 2, 0, 0, 0, 0]
    assert whole.start(client, vector, {1: own}).tolist() == [-1] * 7
    assert shared.start(client, vector, {1: own}).tolist() == [0, 1, 2, -1, -1, -1, -1]
    assert vector.tolist() == list(range(7))


def test_the_classifier_may_be_several_layers() -> None:
    method = begun(2, PFedSV(mode="extractor", classifier=["0", "1"]))
    assert method.start(Judged(1, lambda v: 0).client, torch.ones(7), {}).tolist() == [0] * 7
    for layers in (["2"], ["1", "fc"], []):
        with pytest.raises(ConfigurationError, match="classifier"):
            begun(2, PFedSV(mode="extractor", classifier=layers))
    bare = nn.Sequential(nn.Conv2d(1, 2, 3))
    with pytest.raises(ConfigurationError, match="linear"):
        begun(2, PFedSV(mode="extractor"), space=ParameterSpace(bare))


def test_batch_norms_statistics_are_averaged_but_do_not_count_as_distance() -> None:
    network = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))  # 4 + 3 parameters, 4 statistics
    space = ParameterSpace(network)
    vectors = torch.randn(3, space.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    vectors[:, 7:] = 1 + 1000 * torch.rand(3, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    clients = [Judged(i, lambda v: 0.5 + 0.01 * float(v[0])) for i in range(3)]
    method = begun(3, PFedSV(), space=space)
    ids = torch.arange(3)
    round = Round(
        0, ids, ids + 1, vectors[0], vectors, space, clients=[c.client for c in clients], server_vector=vectors[0]
    )
    models = method.personalize(round, {}, {})
    values = method.exchanged(round).client_values[0].double()
    distances = (vectors - vectors[0])[:, :7].norm(dim=1)
    distances[0] = distances[1:].mean()
    weights = values.clamp_min(0) / distances
    torch.testing.assert_close(models[0], weights / weights.sum() @ vectors, atol=1e-4, rtol=0)


def test_state_is_saved_and_every_upload_on_its_own() -> None:
    method, clients = begun(3, PFedSV()), [Judged(i, closeness(torch.zeros(7))) for i in range(3)]
    vectors = random_models(3)
    play(method, clients, vectors)
    state = method.state_dict()
    assert all(upload.untyped_storage().nbytes() == 7 * 8 for upload in state["uploads"].values())
    resumed = PFedSV()
    resumed.load_state_dict(state)
    sizes = {"val": torch.ones(3, dtype=torch.long)}
    resumed.resume(Federation(torch.ones(7), SPACE, 3, 2, sizes, 0))
    for each in (method, resumed):
        assert each.start(clients[0].client, torch.ones(7), {}).tolist() == [0] * 7
    ((first, one), (second, two)) = (play(each, clients[:1], vectors[:1] + 1, index=1) for each in (method, resumed))
    assert torch.equal(first[0], second[0])
    assert torch.equal(one.client_values, two.client_values)
    assert not one.client_values.isnan().any()


@pytest.mark.parametrize(
    "arguments",
    [
        {"k": 0},
        {"permutations_factor": 0},
        {"self_weight": "max"},
        {"mode": "head"},
        {"explore": "all"},
        {"classifier": ["0"]},
    ],
)
def test_wrong_arguments(arguments: Any) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(arguments))):
        PFedSV(**arguments)


def test_a_metric_of_another_kind() -> None:
    with pytest.raises(ConfigurationError, match="DomainRelevance"):
        play(begun(2, PFedSV()), [Judged(0, lambda v: 0)], random_models(1), torch.zeros(2))


# Whole federations


class Careful(Plain):
    """Fails as soon as it is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise AssertionError("training has begun")


def federation(**kwargs: Any) -> FederatedLoop:
    kwargs.setdefault("metrics", {"relevance": DomainRelevance(), "cost": CommunicationCost()})
    kwargs.setdefault("personalizer", PFedSV(k=2))
    return FederatedLoop(seed=4, **kwargs)


def test_an_empty_validation_set_is_an_error_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"clients \[0, 1, 2\] have none.*client_val_fraction"):
        fit(federation(), tmp_path, module=Careful())
    with pytest.raises(ConfigurationError, match=r"clients \[1\]"):
        begun(3, PFedSV(), val=torch.tensor([4, 0, 1]))


def pathological(clients: int, **kwargs: Any) -> FederatedDataModule:
    fractions = {"client_val_fraction": 0.25, "client_test_fraction": 0.25}
    return FederatedDataModule(
        "digits", PathologicalPartitioner(clients, 2), **{"batch_size": 8, **fractions, **kwargs}
    )


def digits_net() -> Plain:
    torch.manual_seed(0)
    return Plain(nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.ReLU(), nn.Linear(24, 10)))


@pytest.mark.parametrize("mode", ["model", "extractor"])
def test_relevant_clients_are_found_on_digits(tmp_path: Path, mode: Any) -> None:
    data = pathological(10)
    data.setup("fit")
    loop = federation(personalizer=PFedSV(mode=mode), evaluate_clients_every=6, local_epochs=2)
    loop.metrics["relevance"] = loop.board.metrics["relevance"] = DomainRelevance(
        truth=label_overlap(data.class_counts)
    )
    fit(loop, tmp_path, digits_net(), data, rounds=6)
    said = loop.metrics["relevance"].diagnostics()
    assert said["found"] == 1
    assert said["auroc"] > 0.9
    assert loop.client_accuracy is not None
    assert loop.client_accuracy.mean() > 0.7
    cost = loop.contributions["cost"]
    size = loop.space.size
    assert (cost[:, 0] == 6 * size).all()
    if mode == "model":
        assert (cost[:, 1] % size == 0).all()
        assert ((cost[:, 1] // size) < 6 * 5).all()
    else:
        assert ((cost[:, 1] - 6 * (size - 250)) % 250 == 0).all()


def test_a_hundred_clients_of_which_ten_take_part(tmp_path: Path) -> None:
    loop = federation(sampler=UniformSampler(10), evaluate_clients_every=8, personalizer=PFedSV())
    data = pathological(100, server_val_fraction=0.0)
    fit(loop, tmp_path, digits_net(), data, rounds=8, limit_val_batches=0)
    relevance = loop.contributions["relevance"]
    seen = loop.contributions["cost"][:, 0] > 0
    assert 10 < seen.sum() < 80
    assert relevance[~seen].isnan().all()
    assert relevance[:, ~seen].isnan().all()  # who never uploaded cannot be judged
    absent = [i for i in loop.models if i not in set(loop.weights.nan_to_num(-1).ge(0).nonzero().flatten().tolist())]
    assert absent
    assert not torch.equal(loop.models[absent[0]], loop.models[next(i for i in loop.models if i not in absent)])


class Late(ClientSampler):
    """Client 2 comes in the third round only."""

    def sample(self, num_clients: int, contributions: Any, generator: Any) -> Tensor:
        self.rounds = getattr(self, "rounds", 0) + 1
        return torch.arange(2 if self.rounds < 3 else 3)

    def inclusion_probabilities(self, num_clients: int, contributions: Any) -> Tensor:
        return torch.ones(num_clients)


def test_a_client_that_appears_first_in_a_late_round(tmp_path: Path) -> None:
    starts: list[Tensor] = []

    class Watched(PFedSV):
        def personalize(self, round: Any, contributions: Any, models: Any) -> Any:
            if len(round) == 3:
                starts.append(round.start_vectors[2])
            return super().personalize(round, contributions, models)

    loop = federation(personalizer=Watched(k=2), sampler=Late())
    module = Plain()
    first = ParameterSpace(module).read(module)
    fit(loop, tmp_path, module, toy_data(drop_last=True, client_val_fraction=0.2))
    assert torch.equal(starts[0], first)
    assert not loop.contributions["relevance"][2].isnan().any()
    assert loop.contributions["relevance"][:2, 2].isnan().tolist() == [False, False]


def run(folder: Path, ckpt_path: Any = None, callbacks: Any = ()) -> FederatedLoop:
    loop = federation(sampler=UniformSampler(3), evaluate_clients_every=2, personalizer=PFedSV(mode="extractor"))
    fit(
        loop,
        folder,
        data=toy_data((4, 2, 3, 3, 2), client_val_fraction=0.2),
        rounds=5,
        ckpt_path=ckpt_path,
        enable_checkpointing=True,
        callbacks=[*callbacks, ModelCheckpoint(folder / "saved", filename="last", enable_version_counter=False)],
    )
    return loop


def test_a_resumed_run_is_the_same_to_the_bit(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="stopped by the test"):
        run(tmp_path / "parts", callbacks=[Stop(3, 1, RuntimeError)])
    resumed = run(tmp_path / "parts", ckpt_path=tmp_path / "parts/saved/last.ckpt")
    for name, value in whole.contributions.items():
        assert torch.equal(resumed.contributions[name].nan_to_num(9), value.nan_to_num(9))
    assert resumed.models.keys() == whole.models.keys()
    assert all(torch.equal(resumed.models[i], model) for i, model in whole.models.items())
    assert torch.equal(resumed.client_accuracy, whole.client_accuracy)
    states = [loop.personalizer.state_dict() for loop in (whole, resumed)]
    assert states[0]["cohort"] == states[1]["cohort"]
    assert all(torch.equal(states[1]["uploads"][i], upload) for i, upload in states[0]["uploads"].items())
    csv = [(tmp_path / part / "contributions.csv").read_text() for part in ("whole", "parts")]
    assert csv[0] == csv[1]


def test_a_second_fit_begins_anew(tmp_path: Path) -> None:
    loop, results = federation(), []
    for _ in range(2):
        fit(loop, tmp_path, data=toy_data(drop_last=True, client_val_fraction=0.2))
        results.append(loop.models)
    assert all(torch.equal(results[1][i], model) for i, model in results[0].items())


def test_no_sample_leaves_a_client(tmp_path: Path) -> None:
    """What a question returns is two tensors, and neither has the size of the data."""
    crossed: list[Any] = []
    ask = Client.ask

    def watched(self: Client, question: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ask(self, question, *args, **kwargs)
        if question is collaborate:
            crossed.append(answer)
        else:
            assert not answer  # nobody asks for a report, and pictures are written at the client
        return answer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Client, "ask", watched)
        loop = federation()
        fit(loop, tmp_path, data=toy_data(drop_last=True, client_val_fraction=0.2), rounds=2)
    assert len(crossed) == 6
    for values, model in crossed:
        assert 1 <= len(values) <= 3
        assert model.shape == (loop.space.size,)
    assert FEATURES not in {len(model) for _, model in crossed}
