"""Values of groups under secure sums: those of the same run without them, and no sum over fewer than three sites."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from lightning.pytorch.callbacks import ModelCheckpoint
from remote_federation import Remotely, ServerData, shapfed, site
from remote_sites import NAMES

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.engines.remote import Packet, SecureSums, SitePolicy
from flsv.engines.remote.secure.payload import groups_of
from flsv.engines.remote.waiting import Waiting
from flsv.errors import ConfigurationError
from flsv.metrics import EverybodyElse, ShadowShapley
from flsv.sampling import UniformSampler

SPLITS = {"client_val": 0.3, "client_test": 0.2}
SIX = [*NAMES, "Quito", "Perth", "Turin"]
EIGHT = [*SIX, "Delhi", "Cairo"]
HALVES = [[0, 2, 4], [1, 3, 5]]
FOURS = [[0, 1, 2, 3], [4, 5, 6, 7]]


def loop(groups: Any = HALVES, coalitions: Any = "all", metrics: Any = None, **options: Any) -> FederatedLoop:
    shadow = ShadowShapley(coalitions=coalitions, performance="negative_loss", groups=groups)
    return shapfed(**{"aggregator": FedAvg(), "metrics": {"shadow": shadow, **(metrics or {})}, **options})


def remotely(folder: Path, secure: Any = True, make: Any = loop, names: Any = SIX) -> Remotely:
    return Remotely(folder, make, secure=secure, names=names, **SPLITS)


def fit(remote: Remotely, rounds: int = 3) -> FederatedLoop:
    return remote.fit(rounds, own=ServerData())


def rows_of(loop: FederatedLoop) -> torch.Tensor:
    return loop.config.strategies["client_algorithm"].state_dict()["rows"]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"metrics": {"else": EverybodyElse(performance="negative_loss")}}, id="two groups"),
        pytest.param({"aggregator": FedAvg("uniform", server_lr=0.5)}, id="uniform weights", marks=pytest.mark.slow),
        pytest.param(
            {"groups": [[0, 1, 2], [3, 4, 5], [6, 7, 8]], "coalitions": "singles"},
            id="three alone",
            marks=pytest.mark.slow,
        ),
        pytest.param({"groups": [list(range(6))]}, id="one group", marks=pytest.mark.slow),
    ],
)
def test_it_is_the_unmasked_run_to_rounding(tmp_path: Path, options: dict[str, Any]) -> None:
    make = partial(loop, **options)
    names = [*EIGHT, "Accra"][: sum(map(len, options.get("groups", HALVES)))]
    plain, masked = (
        fit(remotely(tmp_path / name, secure, make, names)) for name, secure in (("a", False), ("b", True))
    )
    torch.testing.assert_close(rows_of(masked), rows_of(plain), rtol=0, atol=5e-6)
    values = plain.contributions["shadow"]
    assert values.isfinite().all()
    assert values.abs().min() > 1e-3
    for name, value in plain.contributions.items():
        torch.testing.assert_close(masked.contributions[name], value, rtol=0, atol=1e-4)


def test_a_groups_models_are_its_own_federations(tmp_path: Path) -> None:
    """Of which the other group's sites are away, and nothing else is trained: to rounding."""
    masked = fit(remotely(tmp_path / "a"))
    for place, group in enumerate(HALVES):
        alone = remotely(tmp_path / str(place), False, partial(shapfed, aggregator=FedAvg(), metrics={}))
        alone.transport.spoil = lambda address, packet, reply, group=group: (  # type: ignore[misc]
            reply if packet.kind == "hello" or address - 100 in group else None
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = alone.fit(3).state.model()
        torch.testing.assert_close(rows_of(masked)[place], model, rtol=0, atol=2e-5)


@pytest.mark.slow
def test_a_run_that_is_resumed_goes_on_to_the_bit(tmp_path: Path) -> None:
    """The masks are others; the sums, of coalitions' models too, are not."""
    whole = fit(remotely(tmp_path / "a"), 4)
    remote = remotely(tmp_path / "b")
    saving = ModelCheckpoint(tmp_path / "b" / "checkpoints", save_last=True)
    remote.fit(2, own=ServerData(), enable_checkpointing=True, callbacks=[saving])
    last = tmp_path / "b" / "checkpoints" / "last.ckpt"
    resumed = remote.fit(4, own=ServerData(), enable_checkpointing=True, ckpt_path=last)
    assert torch.equal(rows_of(resumed), rows_of(whole))
    assert torch.equal(resumed.contributions["shadow"], whole.contributions["shadow"])


def test_groups_are_who_is_in_the_same_sums() -> None:
    members = torch.tensor([[1, 1, 0, 0, 1], [1, 1, 1, 0, 0]]).bool()
    assert groups_of(members) == [[0, 1], [2], [3], [4]]
    # By brute force: what sums tell of the sites are the vectors in the row space of these sets and of everybody.
    draw = np.random.default_rng(0)
    for _ in range(20):
        sets = draw.integers(0, 2, (3, 6))
        space = np.concatenate([sets, np.ones((1, 6))])
        for group in groups_of(torch.from_numpy(sets).bool()):
            for part in range(1, len(group)):  # no vector of the space tells two members of a group apart
                assert (space[:, group[0]] == space[:, group[part]]).all()


def kinds(remote: Remotely) -> list[tuple[int, Packet, Packet]]:
    sent: list[tuple[int, Packet, Packet]] = []

    def keep(address: int, packet: Packet, reply: Packet) -> Packet:
        sent.append((address, packet, reply))
        return reply

    remote.transport.spoil = keep
    return sent


def trained_rows(folder: Path, names: Any) -> dict[str, Any]:
    """Each site's own models of its coalitions, as a run without secure sums has them on the wire."""
    remote = remotely(folder, False, names=names)
    sent = kinds(remote)
    fit(remote, 1)
    return {names[a - 100]: r.tensors["report/trained_coalition_models"] for a, _, r in sent if r.kind == "update"}


def test_no_row_of_a_site_is_on_the_wire(tmp_path: Path) -> None:
    """Each site's steps are looked for in all that it sends, at all places; without secure sums they are there."""
    rows = trained_rows(tmp_path / "a", SIX)
    remote = remotely(tmp_path / "b")
    sent = kinds(remote)
    fit(remote, 1)
    start = torch.cat([p.detach().flatten() for p in remote.make_module().parameters()])
    steps = [row[1:].double() - start.double() for row in torch.cat(list(rows.values()))]
    assert all(0.1 < float(step.norm()) < 100 for step in steps)
    masked = [reply.tensors["masked"] for _, packet, reply in sent if packet.kind == "train"]
    assert {len(each) for each in masked} == {3 + len(start) + 2 * (2 + len(start))}
    for each in masked:
        for begin in (3, 3 + len(start) + 2, 3 + 2 * len(start) + 4):
            there = each[begin : begin + len(start)].double()
            for step in steps:
                assert torch.nn.functional.cosine_similarity(step, there, dim=0).abs() < 0.03
    # Rows of coalitions that a site is not in are zeros before they are masked, and nobody can see which they are.
    bits = [(each[3:] >> place & 1).double().mean() for each in masked for place in (0, 40, 62)]
    assert all(abs(float(bit) - 0.5) < 0.01 for bit in bits)
    assert not [t for _, _, reply in sent for t in reply.tensors.values() if t.is_floating_point() and t.numel() > 1]


def test_all_sites_are_sent_the_same(tmp_path: Path) -> None:
    """A server that sends one site another model of a coalition learns nothing: it refuses."""
    remote = remotely(tmp_path)
    answer = remote.sites[103].answer

    def other(packet: Packet) -> Packet:
        if packet.kind == "train":
            tensors = {n: t + 1 if n.endswith("coalition_models") else t for n, t in packet.tensors.items()}
            packet = Packet(packet.kind, packet.plain, tensors)
        return answer(packet)

    remote.sites[103].answer = other
    with (
        pytest.warns(UserWarning, match="'Quito'.*what it is sent to start from is not what the server says"),
        pytest.raises(RuntimeError, match="tells too much of each"),
    ):
        fit(remote, 1)


def test_who_goes_away_is_left_out_of_its_groups_sums(tmp_path: Path) -> None:
    """Of eight sites in two groups one is away in the second round; without secure sums the same happens to it."""
    runs = []
    for folder, secure in (("a", False), ("b", True)):
        remote = remotely(tmp_path / folder, secure, partial(loop, groups=FOURS), EIGHT)
        remote.transport.spoil = lambda address, packet, reply: (
            None if address == 106 and packet.kind == "train" and packet.plain["round"] == 1 else reply
        )
        with pytest.warns(UserWarning, match="'Delhi' .client 6. is left out"):
            runs.append(fit(remote))
    torch.testing.assert_close(rows_of(runs[1]), rows_of(runs[0]), rtol=0, atol=5e-6)
    torch.testing.assert_close(runs[1].contributions["shadow"], runs[0].contributions["shadow"], rtol=0, atol=1e-4)


def test_a_group_of_which_two_are_left_is_left_out(tmp_path: Path) -> None:
    """Of eight sites in groups of three and five; five are enough for a sum."""
    make = partial(loop, groups=[[0, 1, 2], [3, 4, 5, 6, 7]])
    remote = remotely(tmp_path, SecureSums(threshold=5), make, EIGHT)
    asked: list[Any] = []

    def spoil(address: int, packet: Packet, reply: Packet) -> Packet | None:
        if packet.kind == "unmask":
            asked.append(packet.plain["survivors"])
        return None if address == 102 and packet.kind == "train" and packet.plain["round"] == 1 else reply

    remote.transport.spoil = spoil
    with pytest.warns(UserWarning, match="'Boston' .*of its group .'Osaka'. are missing, and a sum over 2 tells too"):
        masked = fit(remote)
    assert set(map(tuple, asked)) == {tuple(range(3, 8)), tuple(range(8))}
    assert masked.participations.tolist() == [2, 2, 2, 3, 3, 3, 3, 3]
    assert masked.contributions["shadow"].isfinite().all()


def test_a_server_that_asks_for_two_of_a_group_is_refused(tmp_path: Path) -> None:
    """Whatever the server's code is: sites look at the groups themselves."""
    remote = remotely(tmp_path, SecureSums(threshold=5), partial(loop, groups=[[0, 1, 2], [3, 4, 5, 6, 7]]), EIGHT)
    for address, answering in remote.sites.items():

        def other(packet: Packet, answer: Any = answering.answer) -> Packet:
            if packet.kind == "unmask":
                without = [site for site in packet.plain["survivors"] if site != 2]
                packet = Packet("unmask", {**packet.plain, "survivors": without})
            return answer(packet)

        remote.sites[address].answer = other
    with (
        pytest.warns(UserWarning, match=r"of sites \['Boston', 'Lyon', 'Osaka'\] too few are left"),
        pytest.raises(RuntimeError, match="there is no sum of sites"),
    ):
        fit(remote, 1)


def test_a_coalitions_model_that_is_not_finite_leaves_its_site_out(tmp_path: Path) -> None:
    """A sum over the others of its group would tell too much: here all of the group go, and nothing is unmasked."""
    remote = remotely(tmp_path)
    visit = remote.sites[100]
    masked = visit._sums.masked  # type: ignore[union-attr]

    def spoiled(memory: Any, packet: Packet, update: Any, lost: bool) -> Packet:
        update.reports["trained_coalition_models"][0, 0] = 0
        return masked(memory, packet, update, lost)

    visit._sums.masked = spoiled  # type: ignore[union-attr, method-assign]
    with (
        pytest.warns(UserWarning, match="'Boston'.*a model that is not finite"),
        pytest.raises(RuntimeError, match="Nothing was unmasked"),
    ):
        fit(remote, 1)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"groups": [[0, 1], [2, 3, 4, 5]]}, r"has sums over \[\[0, 1\]\]: of a sum of two.*Make each group 3"),
        ({"sampler": UniformSampler(5)}, r"sampler UniformSampler\(cohort_size=5\) draws.*Take FullParticipation"),
        ({"groups": None}, r"ShadowTraining.*needs single ones.*ShadowShapley\(groups"),
        ({"groups": [[0, 1, 2], [3, 4, 5, 6]]}, "expected each of the clients 0 to 5 in one group"),
    ],
)
def test_what_would_tell_more_is_refused_before_training(tmp_path: Path, options: Any, match: str) -> None:
    with pytest.raises(ConfigurationError, match=match):
        fit(remotely(tmp_path, make=partial(loop, **options)))


def test_a_quorum_that_leaves_too_few_of_a_group_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flsv.engines.remote.transport.Waiting", partial(Waiting, quorum=0.8))
    with pytest.raises(ConfigurationError, match="can leave 1 sites of a group in a secure sum"):
        fit(remotely(tmp_path))


def test_a_site_that_wants_larger_groups_says_so(tmp_path: Path) -> None:
    remote = remotely(tmp_path)
    options: Any = {"secure": True, "names": SIX, **SPLITS}
    remote.sites[101] = site(tmp_path, 1, loop, policy=SitePolicy(secure=True, least_sites=4), **options)
    remote.transport.sites = remote.sites
    with pytest.raises(ConfigurationError, match="'Lyon' cannot take part.*a group of 3 sites, and it wants 4 or more"):
        fit(remote)
