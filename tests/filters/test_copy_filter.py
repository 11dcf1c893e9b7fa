"""Copies: similarities and groups against NumPy and trying all groups, and the filter in federations."""

import itertools
import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flsv.attacks import Alignment, Attack
from flsv.core import ClientUpdate
from flsv.federation import FederatedLoop
from flsv.filters import Cohort, CopyFilter, OutlierFilter
from flsv.filters.copies import (
    groups_of,
    isolated_groups,
    last_step_similarity,
    similarities,
)
from flsv.metrics import CosineGradientShapley
from flsv.report import open_run, write_report
from flsv.uploads import UploadContext
from helpers.data import toy_data
from helpers.fits import fit
from helpers.pages import text_of_page


@pytest.mark.parametrize("bad", [0.0, 1e30])
def test_centered_cosine_similarities_equal_numpys_and_are_0_without_a_direction(
    bad,
):
    """Updates without a direction are no part of it."""
    updates = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    centered = updates[:4].double().numpy()
    centered /= np.linalg.norm(centered, axis=1, keepdims=True)
    centered -= centered.mean(0)
    centered /= np.linalg.norm(centered, axis=1, keepdims=True)
    expected = centered @ centered.T
    updates[4] = bad

    cosines = similarities(updates @ updates.T)

    np.testing.assert_allclose(
        cosines[:4, :4].numpy(),
        expected,
        atol=1e-6,
    )
    assert not cosines[4].any()


def similarities_by_hand(
    updates: np.ndarray,
    step: np.ndarray,
    samples: np.ndarray,
) -> np.ndarray:
    """For each of the two means, of the updates' directions and the step's."""
    count = len(updates)
    lengths = np.linalg.norm(updates, axis=1)
    directions = updates / lengths[:, None]
    step_direction = step / np.linalg.norm(step)
    equal_weights = np.full(count, 1 / count)
    weights_of_sum = samples * lengths / (samples * lengths).sum()

    similarities = []
    for weights in (equal_weights, weights_of_sum):
        center = (count * weights @ directions + step_direction) / (count + 1)
        to_step = step_direction - center
        cosines = []
        for direction in directions:
            offset = direction - center
            product_of_lengths = np.linalg.norm(offset) * np.linalg.norm(to_step)
            cosines.append(offset @ to_step / product_of_lengths)
        similarities.append(cosines)

    return np.min(similarities, axis=0)


def test_last_step_similarity_equals_the_formula_written_out():
    draw = np.random.default_rng(0)
    updates = draw.normal(size=(5, 9))
    step = draw.normal(size=9)
    samples = draw.integers(1, 50, 5)
    updates[2] = 0.3 * step

    similarity = last_step_similarity(
        torch.from_numpy(updates @ updates.T),
        torch.from_numpy(updates @ step),
        float(step @ step),
        torch.from_numpy(samples),
    ).numpy()

    np.testing.assert_allclose(similarity, similarities_by_hand(updates, step, samples), atol=1e-12)
    assert similarity[2] == pytest.approx(1)
    assert similarity.argmax() == 2


def groups_by_trying_all(similar: np.ndarray, gap: float) -> np.ndarray:
    """Every subset of two to k / 2 clients."""
    k = len(similar)
    in_one_group = np.zeros((k, k), dtype=bool)
    for size in range(2, k // 2 + 1):
        for members in itertools.combinations(range(k), size):
            outsiders = [client for client in range(k) if client not in members]
            pairs = list(itertools.permutations(members, 2))
            least_inside = min(similar[pair] for pair in pairs)
            most_across = max(similar[pair] for pair in itertools.product(members, outsiders))
            if least_inside - most_across >= gap:
                for pair in pairs:
                    in_one_group[pair] = True

    return in_one_group


@pytest.mark.parametrize("num_copies", range(4))
def test_isolated_groups_equal_those_of_trying_all_groups(num_copies):
    generator = np.random.default_rng(num_copies)
    directions = generator.normal(size=(8, 30))
    for copy in range(num_copies):  # of the first client, by the last ones
        noise = generator.normal(size=30)
        directions[7 - copy] = directions[0] + 0.3 * noise

    similar = np.corrcoef(directions)

    for gap in (0.1, 0.3, 0.6):
        groups = isolated_groups(torch.from_numpy(similar), gap).numpy()
        np.testing.assert_array_equal(groups, groups_by_trying_all(similar, gap))


def test_fewer_than_six_clients_have_no_isolated_group():
    similar = torch.full((6, 6), -0.5)
    similar[:2, :2] = 0.9  # clients 0 and 1
    similar.fill_diagonal_(1)

    isolated_of_six = isolated_groups(similar, 0.4)
    isolated_of_five = isolated_groups(similar[:5, :5], 0.4)

    assert groups_of(isolated_of_six) == [[0, 1]]
    assert not isolated_of_five.any()


class Sybil(Attack):
    """What its clients send differs by little."""

    def attack(self, update: Tensor, context: UploadContext, generator: torch.Generator) -> Tensor:
        common_noise = torch.Generator().manual_seed(context.round_index)
        common = torch.randn(len(update), generator=common_noise)
        noise = torch.randn(len(update), generator=generator)
        return update.norm() * (common + 0.1 * noise) / len(update) ** 0.5


def make_seven_clients() -> Any:
    return toy_data((4, 3, 4, 3, 4, 3, 4))


def fit_and_collect_warnings(
    loop: FederatedLoop,
    folder: Path,
    words: str,
    rounds: int,
) -> list[str]:
    """Fit, and return the warnings with these words."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(loop, folder, data=make_seven_clients(), rounds=rounds)
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if words in message]


def make_sybil_loop(**options: Any) -> FederatedLoop:
    return FederatedLoop(uploads=[Sybil(clients=[3, 1])], seed=1, **options)


def make_watching_filters() -> dict[str, Any]:
    return {"filters": [OutlierFilter(), CopyFilter(0.7, gap=None)]}


def test_copies_are_reported_together_and_still_aggregated(tmp_path):
    loop = make_sybil_loop(metrics={"cgsv": CosineGradientShapley()}, **make_watching_filters())
    unwatched = make_sybil_loop()

    messages = fit_and_collect_warnings(loop, tmp_path / "run", "almost the same updates", rounds=5)
    messages_if_unwatched = fit_and_collect_warnings(
        unwatched, tmp_path / "silent", "almost the same updates", rounds=5
    )

    assert messages[0].startswith(
        "clients 1, 3 sent almost the same updates as each other, in several rounds, "
    )
    assert "round 3 (similarity 0.9" in messages[0]
    assert "Look into it before you pay anything" in messages[0]
    assert len(messages) == 2  # when the copies were seen, and at the end
    assert loop.participations.tolist() == [5] * 7
    rounds_by_client = {event.client: event.times for event in loop.events}
    assert rounds_by_client == {1: 3, 3: 3}
    assert {event.what for event in loop.events} == {"copy"}
    assert loop.copies == [[1, 3]]
    assert loop.contributions["cgsv"].isfinite().all()
    assert messages_if_unwatched == []
    assert unwatched.copies == []
    assert torch.equal(loop.state.model(), unwatched.state.model())


def make_gram_matrix(similar: float, k: int = 6) -> Tensor:
    """Products of updates of which the first two are alike by so much, and the others by nothing."""
    gram = torch.eye(k, dtype=torch.float64)
    gram[0, 1] = gram[1, 0] = similar
    return gram


def make_cohort(gram: Tensor, index: int) -> Cohort:
    """A cohort whose updates have these inner products."""
    # gram = V diag(e) V', so that the rows of V diag(e)^(1/2) have these products.
    eigenvalues, eigenvectors = torch.linalg.eigh(gram)
    rows = eigenvectors * eigenvalues.clamp_min(0).sqrt()
    updates = tuple(
        ClientUpdate(client_id=client, num_samples=1, vector=row, num_steps=1)
        for client, row in enumerate(rows)
    )
    common_start = torch.zeros_like(rows[0])

    return Cohort(
        round_index=index,
        updates=updates,
        matrix=rows,
        starts=(common_start,) * len(gram),
        num_samples=torch.ones(len(gram)),
        num_parameters=rows.shape[1],
    )


def count_rounds_as_copies(
    rounds: list[Tensor], threshold: float | None = None, gap: float | None = None
) -> dict[int, int]:
    """In how many rounds each client was noticed as a copy."""
    watch = CopyFilter(threshold, gap)
    watch.begin(SimpleNamespace(num_clients=6, client_names=()))  # type: ignore[arg-type]
    for index, gram in enumerate(rounds):
        watch.apply(make_cohort(gram, index))
    return watch.notices.state_dict()["copy"]


#: The first two clients are more similar to each other than to others, by more and by less than the gap of the tests.
GAP = 0.45
ISOLATED_PAIR = make_gram_matrix(similar=0.65)
CLOSE_PAIR = make_gram_matrix(similar=0.2)


def test_isolated_group_in_the_first_three_rounds_counts_as_copies():
    after_two_rounds = count_rounds_as_copies([ISOLATED_PAIR] * 2, gap=GAP)
    after_three_rounds = count_rounds_as_copies([ISOLATED_PAIR] * 3, gap=GAP)
    without_gap = count_rounds_as_copies([ISOLATED_PAIR] * 6, threshold=0.7)

    assert after_two_rounds == {}
    assert after_three_rounds == {0: 1, 1: 1}  # of both clients: the third
    assert without_gap == {}


def test_isolated_group_stays_noticed_and_none_is_noticed_after_the_third_round():
    isolated_first = [ISOLATED_PAIR] * 3 + [CLOSE_PAIR] * 2
    isolated_late = [CLOSE_PAIR] * 3 + [ISOLATED_PAIR] * 6

    rounds_if_first = count_rounds_as_copies(isolated_first, gap=GAP)
    rounds_if_late = count_rounds_as_copies(isolated_late, gap=GAP)

    assert rounds_if_first[1] == 3  # the third to the fifth
    assert rounds_if_late == {}


def test_copy_in_a_single_round_is_not_enough_for_an_isolated_group():
    copy_of_a_round = make_gram_matrix(1.0)
    close = make_gram_matrix(0.2)

    assert count_rounds_as_copies([copy_of_a_round, close, close], gap=0.45) == {}


def test_sum_of_two_other_clients_updates_is_not_a_copy():
    generator = torch.Generator().manual_seed(0)
    rounds, clients, parameters = 3, 6, 4000
    updates = torch.randn(rounds, clients, parameters, generator=generator, dtype=torch.float64)
    with_sum = updates.clone()
    with_sum[:, 2] = updates[:, 0] + updates[:, 1]
    with_copy = updates.clone()
    with_copy[:, 2] = updates[:, 0]
    grams_with_sum = list(with_sum @ with_sum.mT)
    grams_with_copy = list(with_copy @ with_copy.mT)

    rounds_with_sum = count_rounds_as_copies(grams_with_sum, threshold=0.7, gap=GAP)
    rounds_with_copy = count_rounds_as_copies(grams_with_copy, threshold=0.7)

    assert rounds_with_sum == {}
    assert rounds_with_copy == {0: 1, 2: 1}  # of both clients: the third


def fit_with_echo(
    folder: Path, mix: float = 1.0, rounds: int = 6
) -> tuple[FederatedLoop, list[str]]:
    """A run in which client 2 sends the server's last step back, and the warnings about it."""
    loop = FederatedLoop(
        uploads=[Alignment(mix, clients=[2])],
        metrics={"cgsv": CosineGradientShapley()},
        filters=[OutlierFilter(), CopyFilter(threshold=None, gap=None)],  # echoes only
        seed=1,
    )
    return loop, fit_and_collect_warnings(loop, folder, "last step back", rounds)


def test_client_that_sends_back_the_servers_last_step_is_reported_alone(tmp_path):
    loop, messages = fit_with_echo(tmp_path, mix=1.0, rounds=6)

    # Before the first round is no step. Rounds 2 to 4 have to speak before it is said, rounds 4 to 6 are counted.
    assert messages[0].startswith(
        "client 2 sent the server's own last step back, in several rounds, up to round 4 ("
    )
    assert "(similarity 1.00): still aggregated and measured. Look into it" in messages[0]
    (event,) = loop.events
    assert event.what == "echo"
    assert event.client == 2
    assert event.times == 3

    run = open_run(tmp_path)
    assert loop.copies == [[2]]
    assert run.copies == [[2]]

    front = text_of_page(write_report(tmp_path)).partition("\nAppendix\n")[0]
    assert re.search(r"\| client 2 \|.*\| sent the model's last step back \|", front)


@pytest.mark.parametrize(
    ("mix", "rounds"),
    [
        (0.5, 6),
        (1.0, 3),
    ],
)
def test_partial_or_two_round_copies_of_the_server_are_not_reported(tmp_path, mix, rounds):
    loop, messages = fit_with_echo(tmp_path, mix, rounds)

    assert messages == []
    assert loop.copies == []
    assert loop.events == []
