"""What a site's owner forbids does not happen, whatever the server and its app ask for."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flsv import FederatedLoop
from flsv.aggregation import FedAvg
from flsv.engines.remote import Packet, SitePolicy
from flsv.engines.remote.messages import Refused
from flsv.engines.remote.site import LEDGER
from flsv.metrics import ContributionEstimation
from flsv.privacy import GaussianPrivacy, gaussian_epsilon
from flsv.utilities.errors import ConfigurationError
from helpers.sites import SPLITS, Remotely, shapfed, site


def private() -> FederatedLoop:
    return shapfed(uploads=[GaussianPrivacy(clip=1.0, noise_multiplier=2.0)], aggregator=FedAvg(), metrics=None)


def with_policy(tmp_path: Path, make: Any, policy: SitePolicy, **data: Any) -> Remotely:
    """Boston has a policy, the others have none."""
    remote = Remotely(tmp_path, make, **data)
    remote.transport.sites[100] = site(tmp_path, 0, make, policy=policy, **data)
    return remote


def test_site_policy_file_allows_the_listed_questions_only(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text('questions = ["flsv.metrics.leave_self_out:leave_self_out"]\nmax_epsilon = 8.0\n')
    policy = SitePolicy.read(path)
    assert policy == SitePolicy(["flsv.metrics.leave_self_out:leave_self_out"], 8.0)
    policy.check_question("flsv.metrics.leave_self_out:leave_self_out")
    SitePolicy(["flsv.metrics.peers:leave_self_out"]).check_question("flsv.metrics.leave_self_out:leave_self_out")
    with pytest.raises(Refused, match="does not let it answer 'os:system'"):
        policy.check_question("os:system")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("least_sites = 3", r"'least_sites'. It may have \['questions', 'max_epsilon', 'delta'\]"),
        ('questions = "all"', "Say a list of names"),
        ("questions = [", "cannot be read"),
    ],
)
def test_site_policy_file_with_wrong_entries_is_refused(tmp_path: Path, text: str, match: str) -> None:
    (tmp_path / "site.toml").write_text(text)
    with pytest.raises(ConfigurationError, match=match):
        SitePolicy.read(tmp_path / "site.toml")


def test_server_without_noise_is_refused_by_a_site_whose_policy_has_max_epsilon(tmp_path: Path) -> None:
    remote = with_policy(tmp_path, shapfed, SitePolicy(max_epsilon=8.0))
    with pytest.raises(ConfigurationError, match="site 'Boston' cannot take part: its policy wants max_epsilon=8, "):
        remote.fit()


def test_a_question_that_is_not_allowed_is_not_answered(tmp_path: Path) -> None:
    def make() -> FederatedLoop:
        return shapfed(aggregator=FedAvg(), metrics={"fedce": ContributionEstimation()})

    def keep(address: int, packet: Packet, reply: Packet) -> Packet:
        if packet.kind == "ask":
            replies.append((address, reply.kind))
        return reply

    remote = with_policy(tmp_path, make, SitePolicy(questions=[]), **SPLITS)
    replies: list[tuple[int, str]] = []
    remote.transport.spoil = keep
    with pytest.warns(UserWarning, match="'Boston'.*its policy does not let it answer 'flsv.metrics.leave_self_out:"):
        remote.fit(rounds=1)
    assert set(replies) == {(100, "failed"), (101, "answer"), (102, "answer")}


def test_sites_max_epsilon_bounds_its_updates_over_all_runs(tmp_path: Path) -> None:
    """Two rounds are within the bound, three are not, be it in one run or in the next one."""
    two, three = (gaussian_epsilon(2.0, rounds) for rounds in (2, 3))
    policy = SitePolicy(max_epsilon=(two + three) / 2)
    remote = with_policy(tmp_path, private, policy)
    with pytest.warns(UserWarning, match=r"'Boston'.*left out of round 3.*with one more update after 2 it would be"):
        loop = remote.fit(rounds=3)
    assert loop.participations.tolist() == [2, 3, 3]
    kept = json.loads((tmp_path / "sites" / "Boston" / LEDGER).read_text())
    assert kept["updates"] == 2
    assert kept["epsilon"] == pytest.approx(two)
    again = with_policy(tmp_path, private, policy)
    with pytest.warns(UserWarning, match="'Boston'.*left out of round 1"):
        assert again.fit(rounds=1).participations.tolist() == [0, 1, 1]


def test_privacy_loss_of_updates_with_different_noise_is_summed(tmp_path: Path) -> None:
    policy, ledger = SitePolicy(max_epsilon=100.0), tmp_path / LEDGER
    for multiplier in (1.0, 2.0, 2.0):
        policy.spend([GaussianPrivacy(1.0, multiplier)], ledger)
    assert json.loads(ledger.read_text())["epsilon"] == pytest.approx(gaussian_epsilon(1.5**-0.5, 1))
    with pytest.raises(Refused, match="without noise"):
        policy.spend([GaussianPrivacy(1.0, 0.0)], ledger)
    for damaged in ('{"updates": 3', "[]", '{"updates": 3, "squares": -1.0}', '{"updates": 3, "squares": NaN}'):
        ledger.write_text(damaged)
        with pytest.raises(Refused, match=r"privacy.json cannot be read.*a backup forgets what came after it"):
            policy.spend([GaussianPrivacy(1.0, 1.0)], ledger)


def test_max_epsilon_counts_what_was_spent_before_it_was_set(tmp_path: Path) -> None:
    """Without a limit, noised updates are counted; one without noise exceeds every later limit."""
    noise, free, limited = [GaussianPrivacy(1.0, 1.0)], SitePolicy(), SitePolicy(max_epsilon=10.0)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        free.spend(noise, tmp_path / folder / LEDGER)
        free.spend(noise, tmp_path / folder / LEDGER)
    limited.spend(noise, tmp_path / "a" / LEDGER)
    kept = json.loads((tmp_path / "a" / LEDGER).read_text())
    assert (kept["updates"], kept["epsilon"]) == (3, pytest.approx(gaussian_epsilon(1.0, 3)))
    free.spend([], tmp_path / "b" / LEDGER)
    with pytest.raises(Refused, match="with one more update after 3 it would be inf"):
        limited.spend(noise, tmp_path / "b" / LEDGER)


SPENDS = """
import sys
from pathlib import Path
from flsv.engines.remote import SitePolicy
from flsv.privacy import GaussianPrivacy
for _ in range(40):
    SitePolicy().spend([GaussianPrivacy(1.0, 1.0)], Path(sys.argv[1]))
"""


def test_two_processes_on_one_ledger_lose_no_count(tmp_path: Path) -> None:
    ledger = tmp_path / LEDGER
    both = [subprocess.Popen([sys.executable, "-c", SPENDS, str(ledger)]) for _ in range(2)]
    assert [each.wait(timeout=600) for each in both] == [0, 0]
    assert json.loads(ledger.read_text())["updates"] == 80
