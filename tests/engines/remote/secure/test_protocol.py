"""The protocol by itself: what the server gets is the sum, whoever goes away, and no site helps it to more."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

pytest.importorskip("cryptography", reason="needs pip install 'flsv[secure]'")

from flsv.engines.remote.policy import Refused
from flsv.engines.remote.secure import SecureSums, primitives
from flsv.engines.remote.secure.protocol import Session, unmasked

RUN, ROUND, TOLD = "0123456789abcdef", 3, ["start", "abc"]
SIZE = 501


def stored(session: Session) -> Session:
    """Through a file, as between two messages."""
    return Session(**json.loads(json.dumps(asdict(session))))


class Sites:
    """k sites, and what the server has of their sum.

    Args:
        count: k.
        sums: what they agree on.
    """

    def __init__(self, count: int, sums: SecureSums | None = None) -> None:
        self.sums = SecureSums() if sums is None else sums
        draw = np.random.default_rng(count)
        low = self.sums.top
        self.values = {i: draw.integers(-low, low, SIZE) for i in range(count)}
        self.identities = {i: bytes([i + 1]) * 32 for i in range(count)}
        self.sessions = {i: Session(RUN, ROUND, i) for i in range(count)}
        self.announced: dict[str, Any] = {}
        self.sealed: dict[int, dict[str, str]] = {}
        self.masked: dict[int, Any] = {}

    @property
    def peers(self) -> dict[str, str]:
        return {f"site {i}": primitives.identity_of(key) for i, key in self.identities.items()}

    def share(self, sites: Sequence[int] | None = None, **options: Any) -> None:
        sites = list(self.sessions) if sites is None else sites
        self.announced = {str(i): self.sessions[i].announce(f"site {i}", self.identities[i]) for i in sites}
        for i in sites:
            self.sealed[i] = self.sessions[i].share(self.announced, self.sums, **options)
            self.sessions[i] = stored(self.sessions[i])

    def mask(self, sites: Sequence[int] | None = None, told: Any = None) -> None:
        for i in self.sealed if sites is None else sites:
            for_it = {str(j): texts[str(i)] for j, texts in self.sealed.items() if j != i}
            said = TOLD if told is None else told.get(i, TOLD)
            self.masked[i] = self.sessions[i].mask(for_it, self.values[i], self.sums, said)
            self.sessions[i] = stored(self.sessions[i])

    def unmask(self, helpers: Sequence[int] | None = None, **options: Any) -> Any:
        helpers = list(self.masked) if helpers is None else helpers
        shares = {i: self.sessions[i].unmask(sorted(self.masked), self.sums, **options) for i in helpers}
        return unmasked(self.masked, self.announced, list(self.sealed), shares, self.sums, (RUN, ROUND), TOLD)

    def exact(self, sites: Sequence[int] | None = None) -> list[int]:
        return sum(self.values[i] for i in (self.masked if sites is None else sites)).tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("sums", [SecureSums(), SecureSums(bits=16)], ids=["64 bits", "32 bits"])
@pytest.mark.parametrize("count", [3, 5])
def test_the_sum_is_exact(count: int, sums: SecureSums) -> None:
    sites = Sites(count, sums)
    sites.share(peers=sites.peers)
    sites.mask()
    assert sites.unmask().tolist() == sites.exact()


@pytest.mark.parametrize("lost", [[0], [4], [2], [1, 3]])
def test_who_goes_away_after_sharing_keys_is_taken_out(lost: list[int]) -> None:
    sites = Sites(7)
    sites.share()
    left = [i for i in range(7) if i not in lost]
    sites.mask(left)
    assert sites.unmask(left[-5:]).tolist() == sites.exact(left)


def test_who_goes_away_before_sharing_keys_is_not_there() -> None:
    sites = Sites(6)
    sites.announced = {str(i): sites.sessions[i].announce(f"site {i}", sites.identities[i]) for i in range(6)}
    for i in range(5):
        sites.sealed[i] = sites.sessions[i].share(sites.announced, sites.sums)
    sites.mask()
    assert sites.unmask().tolist() == sites.exact(range(5))


def test_masked_values_look_random() -> None:
    """Of all zeros, each byte value is as frequent as another, and two sites' masks have nothing in common."""
    sites = Sites(3)
    sites.values = dict.fromkeys(range(3), np.zeros(100_000, dtype=np.int64))
    sites.share()
    sites.mask()
    for masked in sites.masked.values():
        counts = np.bincount(masked.view(np.uint8), minlength=256)
        expected = masked.nbytes / 256
        assert ((counts - expected) ** 2 / expected).sum() < 255 + 6 * (2 * 255) ** 0.5  # chi square
    floats = [masked.astype(np.float64) for masked in sites.masked.values()]
    assert np.abs(np.corrcoef(floats) - np.eye(3)).max() < 0.02
    assert sites.unmask().tolist() == [0] * 100_000


def test_masks_are_new_in_every_sum() -> None:
    first, second = Sites(3), Sites(3)
    for sites in (first, second):
        sites.share()
        sites.mask()
    assert not (first.masked[0] == second.masked[0]).any()
    with pytest.raises(Refused, match="stands after 'masked', not after 'shares'"):
        first.mask([0])


def test_a_server_that_asks_for_both_secrets_of_a_site_is_refused() -> None:
    """It says first that site 4 is there, and then that it is not."""
    sites = Sites(5)
    sites.share()
    sites.mask()
    session = sites.sessions[0]
    told = session.unmask([0, 1, 2, 3, 4], sites.sums)
    assert {which for which, _ in told.values()} == {"seed"}
    session = stored(session)
    with pytest.raises(Refused, match=r"has told its shares for sites \['site 0', .*and tells no others"):
        session.unmask([0, 1, 2, 3], sites.sums)
    assert session.unmask([0, 1, 2, 3, 4], sites.sums) == told  # the reply was lost on the way
    assert not any((session.seed, session.masking, session.sealing))


def test_two_halves_that_are_told_different_things_do_not_do_either() -> None:
    """Sites 0 to 2 are told that site 4 is there, sites 1 to 3 cannot be told otherwise by then: of 5, 4 are needed."""
    sites = Sites(5)
    sites.share()
    sites.mask()
    for_seed = {i: sites.sessions[i].unmask([0, 1, 2, 3, 4], sites.sums) for i in (0, 1, 4)}
    for_mask = {i: sites.sessions[i].unmask([0, 1, 2, 3], sites.sums) for i in (2, 3)}
    shares = {**for_seed, **for_mask}
    with pytest.raises(ValueError, match="shares of 4"):
        unmasked(sites.masked, sites.announced, list(sites.sealed), shares, sites.sums, (RUN, ROUND), TOLD)


@pytest.mark.parametrize(
    ("survivors", "match"),
    [
        ([0, 1], "a sum over 2 sites tells too much: it wants 4"),
        ([0, 1, 2], "a sum over 3 sites tells too much: it wants 4"),
        ([1, 2, 3, 4], "are not this sum's"),
        ([0, 1, 2, 9], "are not this sum's"),
        ([0, 0, 1, 2, 3], "are not this sum's"),
    ],
)
def test_sums_of_too_few_are_refused(survivors: list[int], match: str) -> None:
    sites = Sites(5)
    sites.share()
    sites.mask()
    with pytest.raises(Refused, match=match):
        sites.sessions[0].unmask(survivors, sites.sums)


def test_a_site_that_wants_more_of_them() -> None:
    sites = Sites(5)
    with pytest.raises(Refused, match="it sums with 6 sites or more, and there are 5"):
        sites.share(least=6)
    sites = Sites(5)
    sites.share(least=5)
    sites.mask(range(4))
    with pytest.raises(Refused, match="it wants 5 or more"):
        sites.unmask(least=5)


def test_the_same_round_is_not_summed_over_others() -> None:
    """The difference of two sums of one round would be what site 4 has sent."""
    sites = Sites(5)
    sites.share()
    sites.mask(range(4))
    with pytest.raises(Refused, match=r"told before; the difference would tell of \['site 4'\]. Start them"):
        sites.unmask(before=[0, 1, 2, 3, 4])
    assert sites.unmask(before=[3, 2, 1, 0]).tolist() == sites.exact(range(4))


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_do_not_begin(count: int) -> None:
    with pytest.raises(Refused, match="3 sites or more"):
        Sites(count).share()


def test_a_server_that_plays_the_other_sites() -> None:
    """It puts keys of its own in the place of site 1's, whose mask it would know then."""
    sites = Sites(3)
    known = sites.peers
    sites.identities[1] = b"m" * 32
    with pytest.raises(Refused, match="'site 1' is none of its peers, or has another identity"):
        sites.share(peers=known)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"keys": [primitives.public_of("7" * 64)] * 3}, "keys of site 'site 1' are not signed by it"),
        ({"signature": "00" * 64}, "not signed"),
        ({"name": "site 2"}, "names a site twice"),
    ],
)
def test_changed_announcements(change: dict[str, Any], match: str) -> None:
    sites = Sites(3)
    sites.announced = {str(i): sites.sessions[i].announce(f"site {i}", sites.identities[i]) for i in range(3)}
    sites.announced["1"] |= change
    with pytest.raises(Refused, match=match):
        sites.sessions[0].share(sites.announced, sites.sums)


def test_a_site_whose_own_keys_are_not_the_rounds() -> None:
    sites = Sites(3)
    sites.announced = {str(i): sites.sessions[i].announce(f"site {i}", sites.identities[i]) for i in range(3)}
    other = Session(RUN, ROUND, 0).announce("site 0", sites.identities[0])
    with pytest.raises(Refused, match="does not name its keys"):
        sites.sessions[0].share({**sites.announced, "0": other}, sites.sums)


def test_sites_that_are_told_of_different_cohorts_cannot_open_each_others_shares() -> None:
    sites = Sites(4)
    every = {str(i): sites.sessions[i].announce(f"site {i}", sites.identities[i]) for i in range(4)}
    fewer = {number: said for number, said in every.items() if number != "3"}
    sealed = {
        0: sites.sessions[0].share(fewer, sites.sums),
        **{i: sites.sessions[i].share(every, sites.sums) for i in (1, 2)},
    }
    for_it = {str(j): sealed[j]["0"] for j in (1, 2)}
    with pytest.raises(Refused, match="do not open"):
        sites.sessions[0].mask(for_it, sites.values[0], sites.sums, TOLD)


def test_a_start_point_of_its_own_tells_nothing_of_a_site() -> None:
    """Sites 0, 1, 2 and 4 are sent a model that learns nothing, site 3 the real one: the sum would be its update."""
    sites = Sites(5)
    sites.share()
    sites.values |= {i: np.zeros(SIZE, dtype=np.int64) for i in (0, 1, 2, 4)}
    sites.mask(told={3: ["start", "another"]})
    got = sites.unmask()
    assert (np.abs(got - sites.values[3]) > 2**48).mean() > 0.99
    assert abs(np.corrcoef(got.astype(float), sites.values[3])[0, 1]) < 0.2


@pytest.mark.parametrize("by", [1, 2**300])
@pytest.mark.parametrize("wrong", ["seed", "mask"])
def test_a_wrong_share_is_no_sum(wrong: str, by: int) -> None:
    sites = Sites(5)
    sites.share()
    sites.mask(range(5) if wrong == "seed" else range(4))
    shares = {i: sites.sessions[i].unmask(sorted(sites.masked), sites.sums) for i in sites.masked}
    number = "0" if wrong == "seed" else "4"
    shares[1][number] = [shares[1][number][0], f"{int(shares[1][number][1], 16) + by:x}"]
    with pytest.raises(ValueError, match="do not tell .*one (of them )?is wrong"):
        unmasked(sites.masked, sites.announced, list(sites.sealed), shares, sites.sums, (RUN, ROUND), TOLD)


def test_shares_for_others_do_not_open() -> None:
    sites = Sites(3)
    sites.share()
    swapped = {"1": sites.sealed[1]["2"], "2": sites.sealed[2]["0"]}
    with pytest.raises(Refused, match="shares of site 'site 1' do not open"):
        sites.sessions[0].mask(swapped, sites.values[0], sites.sums, TOLD)


def test_primitives_are_the_standards() -> None:
    """Public keys of RFC 7748, section 6.1; a first block of AES-256 under a key of zeros (NIST's AESAVS)."""
    alice = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
    assert primitives.public_of(alice) == "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
    assert primitives.mask(bytes(32), 2, 64).tobytes().hex() == "dc95c078a2408989ad48a21492842087"
    a, b = (primitives.new_secret() for _ in range(2))
    assert primitives.agreed(a, primitives.public_of(b), "x") == primitives.agreed(b, primitives.public_of(a), "x")
    assert primitives.agreed(a, primitives.public_of(b), "x") != primitives.agreed(a, primitives.public_of(b), "y")
    key = bytes(range(32))
    whole = primitives.mask(key, 1000, 64)
    assert (primitives.mask(key, 100, 64) == whole[:100]).all()
    assert (primitives.mask(key, 100, 32) == whole[:50].view(np.uint32)).all()
    with pytest.raises(ValueError, match="does not fit"):
        primitives.unseal(key, primitives.seal(key, "text", 1, 2), 1, 3)
