"""Checks of contribution metrics on rounds made by hand; :mod:`flsv.testing.fits` has those within a fit."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flsv.errors import ConfigurationError
from flsv.metrics import ContributionMetric
from flsv.participants import Ranks
from flsv.testing import fits
from flsv.testing.checks import expect, refused, same, saved, untouched_rngs
from flsv.testing.common import is_one, settings_are_described
from flsv.testing.games import check_axioms
from flsv.testing.metric_case import EVERY, HALF, MetricCase, expect_said, said
from flsv.testing.rounds import COHORTS, NEVER, NUM_CLIENTS, ORDER, Rounds, on_ranks


def asks_for_what_there_is(case: MetricCase) -> None:
    """``update`` names parts of a round, or what the test gives."""
    expect(case.fields, "update to name what it needs of a round", "Name client_ids, for example.")


def one_row_per_client(case: MetricCase) -> None:
    """``compute`` gives ``[n]`` or ``[n, M]``, ``per_client`` one number each."""
    if not isinstance(case.part, ContributionMetric):
        return
    value = case.whole["value"]
    shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
    expect(
        isinstance(value, Tensor) and value.ndim in (1, 2) and len(value) == NUM_CLIENTS and value.is_floating_point(),
        f"compute() to give floats [{NUM_CLIENTS}] or [{NUM_CLIENTS}, M]; got {shape}",
        "Give one row per client, whether it took part or not.",
    )
    expect(not value.requires_grad, "a value without gradients", "Detach it.")
    expect(
        case.whole["overall"].shape == (NUM_CLIENTS,),
        f"per_client to give [{NUM_CLIENTS}]; got {list(case.whole['overall'].shape)}",
        "Override per_client.",
    )


def never_seen_is_nan(case: MetricCase) -> None:
    """Whoever never took part has no value; whoever did has one."""
    if not isinstance(case.part, ContributionMetric):
        return
    value, overall = case.whole["value"].reshape(NUM_CLIENTS, -1), case.whole["overall"]
    expect(
        value[NEVER].isnan().all() and overall[NEVER].isnan(),
        f"NaN for client {NEVER}, who never took part; got {value[NEVER].tolist()}",
        "Begin the states with NaN: 0 would be a measurement.",
    )
    others = [client for client in range(NUM_CLIENTS) if client != NEVER]
    expect(
        not value[others].isnan().all(1).any() and not overall[others].isnan().any(),
        f"values for clients {others}, who took part; got {overall.tolist()}",
        "Write the values of all client_ids in update.",
    )


def clients_permuted(case: MetricCase) -> None:
    """A value is its client's, whatever number that goes by."""
    if not isinstance(case.part, ContributionMetric):
        return
    value, other = case.whole["value"], case.fed(order=ORDER).compute()[list(ORDER)]
    if case.fields.get("peer_values"):  # whom is a client, too
        other = other[:, list(ORDER)]
    expect(
        same(value, other, rtol=1e-4),
        f"the same values when clients have other numbers, {value.tolist()}; got {other.tolist()}",
        "Index by client_ids, and let nothing depend on the order of the cohort.",
    )


def rounds_are_counted(case: MetricCase) -> None:
    """Every update is a round, counted once."""
    if isinstance(case.part, ContributionMetric):
        rounds = int(case.fed().rounds)
        expect(rounds == len(COHORTS), f"rounds={len(COHORTS)} after as many updates; got {rounds}", "Leave it alone.")


def inputs_stay(case: MetricCase) -> None:
    """``update`` changes nothing of the round, and draws from the round's generator only."""
    rounds = case.rounds()
    arguments = case.arguments(rounds[0])
    tensors = {name: each for name, each in arguments.items() if isinstance(each, Tensor)}
    before = {name: each.clone() for name, each in tensors.items()}
    with untouched_rngs("update"), torch.no_grad():
        case.new().update(**arguments)
    changed = [name for name, each in tensors.items() if not same(each, before[name])]
    expect(not changed, f"update to leave its arguments as they are; it changed {changed}", "Work on copies.")


def reset_forgets(case: MetricCase) -> None:
    """After ``reset`` it is as new."""
    metric = case.fed()
    metric.reset()
    again = said(case.fed(metric=metric))
    advice = "Keep what update learns in states, add_state(...), and nowhere else."
    expect_said(again, case, None, "a metric after reset() to say what a new one says", advice)


def forward_counts_once(case: MetricCase) -> None:
    """``forward`` takes a round in as ``update`` does."""
    metric, rounds = case.new(), case.rounds()
    for index in EVERY:
        if refused(partial(metric, **case.arguments(rounds[index]))):
            return
    expect(
        same(metric.compute(), case.whole["value"], rtol=1e-5),
        f"forward to count as update does, {case.whole['value'].tolist()}; got {metric.compute().tolist()}",
        "A state's dist_reduce_fx has to fold two such states, the later one second; or set full_state_update = True.",
    )


def parts_merge(case: MetricCase) -> None:
    """Parts of a run, the earlier merged into the later, are the whole, whatever follows; or that is refused."""

    def one_round_then_others() -> Any:
        later = case.fed(EVERY[1:-1])
        later.merge_state(case.fed(EVERY[:1]))
        return case.fed(EVERY[-1:], later)

    def three_by_their_states() -> Any:
        parts = [case.fed(EVERY[:1]), case.fed(EVERY[1:HALF]), case.fed(EVERY[HALF:])]
        parts[1].merge_state(parts[0].metric_state)
        parts[2].merge_state(parts[1].metric_state)
        return parts[2]

    def into_a_new_one() -> Any:
        new = case.new()
        new.merge_state(case.half())
        return case.fed(EVERY[HALF:], new)

    advice = "A state's dist_reduce_fx has to fold two such states, the later one second; or refuse in merge_state."
    for merge in (one_round_then_others, three_by_their_states, into_a_new_one) if case.can_merge else ():
        merged: list[Any] = []
        if not refused(lambda merge=merge, merged=merged: merged.append(merge())):  # type: ignore[misc]
            # Blocks of rounds, of which intervals are made, end where the parts meet.
            found = {**said(merged[0]), "intervals": case.whole.get("intervals")}
            expect_said(found, case, 1e-4, f"parts of a run ({merge.__name__}) to merge into the whole", advice)


def copies_go_on(case: MetricCase) -> None:
    """Pickled or copied in the middle, it ends alike."""
    copies: dict[str, Callable[[Any], Any]] = {
        "pickle": lambda metric: pickle.loads(pickle.dumps(metric)),
        "copy": copy.deepcopy,
    }
    for how, copied in copies.items():
        ended = said(case.fed(EVERY[HALF:], copied(case.half())))
        expect_said(ended, case, None, f"a {how} of the middle to end alike", "Keep what update learns in states.")


def resumes_to_the_bit(case: MetricCase) -> None:
    """Saved in the middle and loaded into a new one, it ends alike to the bit."""
    metric = case.new()
    metric.load_state_dict(saved(case.half().state_dict()))
    advice = "Keep what update learns in states, add_state(...): a checkpoint holds nothing else."
    ended = said(case.fed(EVERY[HALF:], metric))
    expect_said(ended, case, None, f"a metric saved after {HALF} of {len(COHORTS)} rounds to end alike", advice)


def processes_agree(case: MetricCase) -> None:
    """Two processes with half of the rounds each agree on the value of all of them, or that is refused."""

    for halves in ((EVERY[:HALF], EVERY[HALF:]), (EVERY[:0], EVERY)):  # the latter as where there are too many

        def process(ranks: Ranks, halves: Sequence[Iterable[int]] = halves) -> Tensor:
            metric = case.fed(halves[ranks.rank])
            metric.dist_sync_fn = lambda tensor, group=None: ranks.everybody(tensor, "a state")
            metric.distributed_available_fn = lambda: True
            return metric.compute()

        found: list[Tensor] = []
        if refused(lambda process=process, found=found: found.extend(on_ranks(process))):  # type: ignore[misc]
            continue
        for value in found:
            expect(
                same(value, case.whole["value"], rtol=1e-4),
                f"processes with rounds {[list(each) for each in halves]} to have the values of all rounds, "
                f"{case.whole['value'].tolist()}; got {value.tolist()}",
                "A state's dist_reduce_fx has to fold the processes' states, in their order.",
            )


def ranks_agree(case: MetricCase) -> None:
    """On ranks, of which each has its own clients, all have the values of one process, to the bit."""

    def play(ranks: Ranks) -> dict[str, Any]:
        return said(case.fed(ranks=ranks))

    advice = "Ask clients within flsv.participants.run_protocol, or all of them on every rank."
    for rank, found in enumerate(on_ranks(play)):
        expect_said(found, case, None, f"rank {rank} of 2 to say what one process says", advice)


def any_precision(case: MetricCase) -> None:
    """Models in double precision are measured, too, and have the same values to rounding."""
    value = case.fed(dtype=torch.float64).compute()
    expect(
        same(value, case.whole["value"], rtol=1e-3),
        f"float64 models to have the same values, {case.whole['value'].tolist()}; got {value.tolist()}",
        "Bring what is computed together to one dtype: x.to(y).",
    )
    value = case.fed(metric=case.new().set_dtype(torch.float64), dtype=torch.float64).compute()
    expect(
        same(value.to(case.whole["value"]), case.whole["value"], rtol=1e-3),
        f"states in float64 to give the same values, {case.whole['value'].tolist()}; got {value.tolist()}",
        "Bring what is computed to the state's dtype: now.to(state).",
    )


def inference_mode_is_no_matter(case: MetricCase) -> None:
    """Rounds within ``torch.inference_mode()``, as in a Lightning validation, and rounds outside of it are one run."""
    metric, rounds = case.new(), case.rounds()
    for index in EVERY[:HALF]:
        arguments = case.arguments(rounds[index])
        with torch.inference_mode():
            metric.update(**arguments)
    ended = said(case.fed(EVERY[HALF:], metric))
    advice = "Leave update as it is wrapped by ContributionMetric, or clone what it keeps."
    expect_said(ended, case, None, "rounds in and outside of torch.inference_mode() to end alike", advice)


def states_move(case: MetricCase) -> None:
    """All tensors go where the metric is moved to; where there is a GPU, values there are the CPU's."""
    metric = case.half().to("meta")
    stay = [name for name, each in vars(metric).items() if isinstance(each, Tensor) and each.device.type != "meta"]
    stay = [name for name in stay if name != "class_counts"]
    expect(not stay, f"metric.to(device) to move all tensors; {stay} stay", "Make them states, or buffers.")
    if torch.cuda.is_available():
        value = case.fed(metric=case.new().to("cuda"), device="cuda").compute().cpu()
        expect(
            same(value, case.whole["value"], rtol=1e-3),
            f"the CPU's values on a GPU, {case.whole['value'].tolist()}; got {value.tolist()}",
            "Bring what is computed together to one device.",
        )


def bad_clients_are_refused(case: MetricCase) -> None:
    """Numbers that no client has, one twice, none at all, and one row for several clients."""
    if case.fields.get("client_ids") != "client_ids":
        return
    arguments = case.arguments(case.rounds()[0])
    for what, ids in (
        ("a client beyond the last", [0, 1, NUM_CLIENTS]),
        ("a negative client", [-1, 1, 2]),
        ("a client twice", [0, 1, 1]),
        ("no client", []),
    ):
        wrong = {**arguments, "client_ids": torch.tensor(ids, dtype=torch.long)}
        expect(
            refused(partial(case.new().update, **wrong)),
            f"update to refuse {what} with a ValueError",
            "Leave update as it is wrapped by ContributionMetric, which checks client_ids.",
        )
    for name, value in arguments.items():
        if isinstance(value, Tensor) and name != "client_ids" and value.shape[:1] == (3,) and _per_client(case, name):
            metric = case.new()
            expect(
                refused(partial(metric.update, **{**arguments, name: value[:1]}))
                or same(metric.compute(), case.fed([0]).compute()),  # it is not used
                f"update to refuse one row of {name} for three clients with a ValueError: it would be taken for "
                "everybody's",
                f"Say self._check_lengths(client_ids, {name}={name}).",
            )


def _per_client(case: MetricCase, name: str) -> bool:
    return case.fields[name] not in ("senders", "reached")


def guide_says_the_unit(case: MetricCase) -> None:
    """``guide`` is what readers of the values are told."""
    if isinstance(case.part, ContributionMetric):
        lines = case.new().guide().lines()
        expect(all(lines.values()), f"guide() to say unit, sign, needs and cost; got {lines}", "Give all four.")


def intervals_are_of_the_rounds(case: MetricCase) -> None:
    """Where ``over_rounds`` says how rounds come together, ``update`` tells each round's values, and they come to the
    metric's own."""
    if not isinstance(case.part, ContributionMetric) or case.part.over_rounds is None:
        return
    metric, note, noted = case.new(), type(case.part).note_round, dict[int, list[float]]()
    plain = True

    def noting(client_ids: Tensor, values: Tensor, factor: Any = 1.0, keep: Any = 1.0) -> None:
        nonlocal plain
        plain &= isinstance(factor, float) and factor == keep == 1.0
        for client, value in zip(client_ids.tolist(), values.tolist()):
            noted.setdefault(client, []).append(value)
        note(metric, client_ids, values, factor, keep)

    metric.note_round = noting
    case.fed(metric=metric)
    overall, how = metric.per_client(metric.compute()).tolist(), case.part.over_rounds
    silent = [client for client, value in enumerate(overall) if value == value and client not in noted]
    advice = "Say self.note_round(client_ids, values) in update, with the cohort's values [k] of this round."
    expect(not silent, f"over_rounds={how!r} to have the rounds' values; clients {silent} have none", advice)
    for client, values in noted.items() if plain and how in ("sum", "mean") else ():
        total = sum(values) / (len(values) if how == "mean" else 1)
        expect(
            same(torch.tensor(overall[client]), torch.tensor(total), rtol=1e-3),
            f"client {client}'s value to be the {how} of its rounds, {total:.6g}; got {overall[client]:.6g}",
            "Give in over_rounds how compute folds the values that note_round is told.",
        )


def axioms_hold(case: MetricCase) -> None:
    """The axioms that were asked for, on games with known values."""
    if not case.axioms:
        return
    if "utility" not in case.fields:
        raise ConfigurationError(f"axioms={case.axioms}: {case.name} plays no game: its update names no utility.")

    def values(game: Callable[[Tensor], Tensor]) -> Tensor:
        metric = case.new()
        everybody = Rounds(case.given, cohorts=[range(NUM_CLIENTS)])[0]
        metric.update(**{**case.arguments(everybody), "utility": game})
        return metric.compute()

    check_axioms(case.axioms, values, NUM_CLIENTS)


def appears_in_a_fit(case: MetricCase) -> None:
    """In a loop its value is there after every round."""
    if case.in_a_loop:
        value = case.uninterrupted.loop.contributions.get("mine")
        expect(value is not None, "a value in loop.contributions after a fit", "See what update asks for.")


MetricCase.checks = (
    is_one,
    asks_for_what_there_is,
    one_row_per_client,
    never_seen_is_nan,
    clients_permuted,
    rounds_are_counted,
    inputs_stay,
    reset_forgets,
    forward_counts_once,
    parts_merge,
    copies_go_on,
    resumes_to_the_bit,
    processes_agree,
    ranks_agree,
    any_precision,
    inference_mode_is_no_matter,
    states_move,
    bad_clients_are_refused,
    guide_says_the_unit,
    intervals_are_of_the_rounds,
    settings_are_described,
    axioms_hold,
    appears_in_a_fit,
    fits.resumes_in_a_fit,
    fits.vmap_is_equal,
    fits.remote_is_equal,
)
