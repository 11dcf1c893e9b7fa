from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from toys import fit, toy_data

from flsv import ClientEvaluation
from flsv.data import ClosedSetLabelNoise
from flsv.loop import FederatedLoop
from flsv.participants import LocalData
from flsv.personalization import Personalizer
from flsv.round import FederationState, Round
from flsv.sampling import UniformSampler
from flsv.strategy import Federation


class Asking(Personalizer):
    """Asks every client something after each round."""

    def __init__(self, question: Any) -> None:
        self.question, self.answers = question, list[list[Any]]()

    def personalize(self, round: Round, contributions: Any, models: Any) -> dict[int, torch.Tensor]:
        assert round.clients is not None
        self.answers.append([client.ask(self.question, round) for client in round.clients])
        return {}


def ask(question: Any, folder: Path, data: Any = None, **kwargs: Any) -> tuple[list[Any], FederatedLoop]:
    asking = Asking(question)
    loop = FederatedLoop(personalizer=asking, **kwargs)
    fit(loop, folder, data=data, rounds=1)
    return asking.answers[0], loop


def test_the_samples_are_those_that_the_client_trains_on(tmp_path: Path) -> None:
    data = toy_data(corruptions=[ClosedSetLabelNoise(clients=[1])])
    answers, _ = ask(lambda local, round: local.samples(), tmp_path, data)
    for client, (x, y) in enumerate(answers):
        indices = data.client_indices(client)
        clean = data.source[0].tensors  # type: ignore[index]
        torch.testing.assert_close(x, clean[0][indices])
        assert torch.equal(y, (clean[1][indices] + (client == 1)) % 3)


def test_models_are_evaluated_on_each_clients_own_samples(tmp_path: Path) -> None:
    def question(local: LocalData, round: Round) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y = local.samples("test")
        accuracy = [(local.module(vector)(x).argmax(-1) == y).double().mean() for vector in round.client_vectors]
        return local.evaluate(round.client_vectors, "test").value("accuracy"), torch.stack(accuracy), len(y)

    answers, _ = ask(question, tmp_path)
    assert len({size for *_, size in answers}) == 3  # three sets, of different sizes
    for given, expected, _ in answers:
        torch.testing.assert_close(given, expected)


def test_what_a_client_holds(tmp_path: Path) -> None:
    data = toy_data()
    answers, _ = ask(
        lambda local, round: (local.class_counts, local.population, local.num_classes, local.model), tmp_path, data
    )
    for client, (counts, population, classes, model) in enumerate(answers):
        assert torch.equal(counts, data.class_counts[client])
        assert torch.equal(population, data.class_counts.sum(0))
        assert classes == 3
        assert model.ndim == 1


def test_nobody_reads_the_data_outside_of_a_question(tmp_path: Path) -> None:
    leaked, loop = ask(lambda local, round: local, tmp_path)
    for read in (
        lambda local: local.samples(),
        lambda local: local.class_counts,
        lambda local: local.model,
        lambda local: local.evaluate(torch.zeros(1, 9)),
        lambda local: local.module(torch.zeros(9)),
    ):
        with pytest.raises(PermissionError, match="client 1 .* outside"):
            read(leaked[1])

    def curious(local: LocalData, round: Round) -> None:
        leaked[0].samples()  # another client's

    with pytest.raises(PermissionError, match="client 0"):
        ask(curious, tmp_path)

    def meanwhile(local: LocalData, round: Round) -> None:
        errors: list[BaseException] = []

        def elsewhere() -> None:
            try:
                local.samples()
            except PermissionError as error:
                errors.append(error)

        thread = Thread(target=elsewhere)
        thread.start()
        thread.join()
        assert len(errors) == 1  # a thread of somebody else's

    ask(meanwhile, tmp_path)


def test_an_empty_split_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="client 0 has no val samples"):
        ask(lambda local, round: local.samples("val"), tmp_path, toy_data(client_val=0.0))


def accuracy(local: LocalData, models: torch.Tensor) -> torch.Tensor:
    return local.evaluate(models, "test").value("accuracy")


class Starting(Personalizer):
    """Everybody starts from zero, whoever asks."""

    def start(self, client: int, state: FederationState) -> torch.Tensor:
        return torch.zeros_like(state.model())

    def personalize(self, round: Round, contributions: Any, models: Any) -> dict[int, torch.Tensor]:
        assert round.start_vectors is not None
        assert not round.start_vectors.any()
        return {}


def test_a_personalizer_says_where_clients_start(tmp_path: Path) -> None:
    loop, data = FederatedLoop(personalizer=Starting(), evaluation=ClientEvaluation(every=1)), toy_data()
    fit(loop, tmp_path, data=data, rounds=2)
    assert not loop.state.starts
    # Logits of zero are class 0 for everybody.
    tests = [torch.cat([y for _, y in data.client_loader(client, "test")]) for client in range(3)]
    assert loop.client_accuracy is not None
    torch.testing.assert_close(loop.client_accuracy, torch.stack([(y == 0).float().mean() for y in tests]))


def test_the_trained_models_can_be_evaluated_instead(tmp_path: Path) -> None:
    received = FederatedLoop(evaluation=ClientEvaluation(every=1), seed=0)
    trained = FederatedLoop(evaluation=ClientEvaluation(every=1, models="trained"), seed=0)
    for loop in (received, trained):
        fit(loop, tmp_path, rounds=2)
    assert not received.trained
    assert sorted(trained.trained) == [0, 1, 2]
    assert not torch.equal(trained.trained[0], trained.trained[1])
    with pytest.raises(ValueError, match=r"ClientEvaluation\(models='own'\)"):
        FederatedLoop(evaluation=ClientEvaluation(models="own"))  # type: ignore[arg-type]


class Prepared(UniformSampler):
    """Counts on being told of the federation before it draws."""

    def begin(self, federation: Federation) -> None:
        self.clients = federation.num_clients

    def sample(
        self, num_clients: int, contributions: Any, generator: torch.Generator, round_index: int = 0
    ) -> torch.Tensor:
        assert self.clients == num_clients
        return super().sample(num_clients, contributions, generator, round_index)


def test_every_strategy_begins_before_the_first_cohort_is_drawn(tmp_path: Path) -> None:
    loop = FederatedLoop(sampler=Prepared(2), seed=0)
    fit(loop, tmp_path, rounds=2)
    assert loop.round_index == 2
