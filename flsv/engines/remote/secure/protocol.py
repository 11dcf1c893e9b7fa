"""A sum over sites that tells its server nothing else, even if sites go away before its end.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, figure 4. For the
sites U of a round:

1. *Keys.* A site draws two key pairs, one to seal shares and one for masks, and a seed b.
2. *Shares.* It splits b and its mask key into shares for all sites of U (Shamir, threshold t), and seals each for its
   holder.
3. *Masked input.* With m_ij the mask that sites i and j have in common and m_i the mask of the seed b_i, it sends
   y_i = x_i + m_i + sum_{j > i} m_ij - sum_{j < i} m_ij.
4. *Unmasking.* Of those whose y_i has come, sites tell their shares of b; of those who went away in between, their
   shares of the mask key. With t shares each the server takes off m_i of the former and m_ij of the latter; all other
   m_ij cancel. A site tells one of the two of any other site, once.

All sites share with all: with k sites that is k^2 short messages, which at tens of sites is nothing beside the updates.
(Bell et al., CCS 2020, have each share with O(log k) others, for thousands.)

Beyond the figure:

- What the server has told of the round (whose keys, which start point) is in the keys of all masks and seals. If it
  tells two sites different things, seals do not open or masks do not cancel: it learns nothing. So nobody's update can
  be singled out by a start point of its own (Pasquini, Francati and Ateniese, "Eluding Secure Aggregation in Federated
  Learning via Model Inconsistency", CCS 2022).
- A site signs its keys. Who has been told the others' identities by other ways than the server checks them, and a
  server cannot play the other sites.
- Two thresholds are more than all sites, so that no server can ask one half for b and the other for the mask key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flsv.engines.remote.policy import Refused
from flsv.engines.remote.secure import primitives
from flsv.engines.remote.secure.settings import LEAST, SecureSums, Whole
from flsv.engines.remote.secure.shamir import SECRET_BYTES, join_shares, split_secret

MASK, SEED = "mask", "seed"
Keys = Sequence[str]
"""What a site makes known: its public keys, to seal shares and for masks, and the hash of its seed."""


@dataclass
class Session:
    """A site's part of one sum. Its fields are plain values: between two messages it lies in a file.

    Args:
        run: the run's name.
        round: its number.
        own: the site's number.
        names: of all sites that take part, by their numbers in words, as JSON has them.
        sealing, masking, seed: the site's secrets.
        publics: by number, everybody's :data:`Keys`.
        held: by number, the shares of others that this site holds, of the mask key and of the seed.
        stage: the last message that was answered.
        survivors: whom the sum was unmasked for.
    """

    run: str
    round: int
    own: int
    sealing: str = field(default_factory=primitives.new_secret)
    masking: str = field(default_factory=primitives.new_secret)
    seed: str = field(default_factory=primitives.new_secret)
    names: dict[str, str] = field(default_factory=dict)
    publics: dict[str, list[str]] = field(default_factory=dict)
    held: dict[str, dict[str, str]] = field(default_factory=dict)
    stage: str = "keys"
    survivors: list[int] = field(default_factory=list)

    def announce(self, name: str, identity: bytes) -> dict[str, Any]:
        """The first message: public keys, signed."""
        keys = self._keys()
        signed = primitives.sign(identity, *self._about(self.own, name, keys))
        return {"name": name, "keys": keys, "identity": primitives.identity_of(identity), "signature": signed}

    def share(
        self,
        announced: Mapping[str, Mapping[str, Any]],
        sums: SecureSums,
        least: int = LEAST,
        peers: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """The second message: for every other site, its shares of this one's secrets, sealed.

        Args:
            announced: by number, what each site's first message was, as the server says.
            sums: what the federation agrees on.
            least: how many sites this one wants, at least.
            peers: by name, the identity of every site that this one knows; None: it takes the server's word.

        Raises:
            Refused: these are not sites that it sums with.
        """
        self._expect("keys")
        if len(announced) < max(least, LEAST):
            raise Refused(f"it sums with {max(least, LEAST)} sites or more, and there are {len(announced)}")
        self.names = {number: str(said["name"]) for number, said in announced.items()}
        self.publics = {number: [str(key) for key in said["keys"]] for number, said in announced.items()}
        if self.publics.get(str(self.own)) != self._keys():
            raise Refused("the server does not name its keys among those of the round")
        if len(set(self.names.values())) < len(self.names):
            raise Refused(f"the server names a site twice: {sorted(self.names.values())}")
        for number, said in announced.items():
            identity, name = str(said["identity"]), self.names[number]
            if peers is not None and peers.get(name) != identity:
                raise Refused(f"site {name!r:.80} is none of its peers, or has another identity than its policy says")
            if not primitives.is_signed(identity, said["signature"], *self._about(int(number), name, said["keys"])):
                raise Refused(f"the keys of site {name!r:.80} are not signed by it")
        threshold = sums.threshold_of(len(announced))
        places = {number: int(number) + 1 for number in announced}
        parts = {
            which: split_secret(int(secret, 16), places.values(), threshold)
            for which, secret in ((MASK, self.masking), (SEED, self.seed))
        }
        mine = {n: {which: f"{parts[which][place]:x}" for which in parts} for n, place in places.items()}
        self.held, self.stage = {str(self.own): mine.pop(str(self.own))}, "shares"
        about = self.agreement(sums)
        return {
            number: primitives.seal(
                self._sealing_key(number, about), f"{shares[MASK]} {shares[SEED]}", self.own, number
            )
            for number, shares in mine.items()
        }

    def mask(self, sealed: Mapping[str, str], values: np.ndarray, sums: SecureSums, told: Sequence[Any]) -> Whole:
        """The third message: the masked values. There is no second one with the same masks.

        Args:
            sealed: by number, what each other site that has shared its secrets sealed for this one.
            values: whole numbers, within what ``sums`` allows.
            sums: what the federation agrees on.
            told: what the server has told all sites alike, the start point's hash among it.

        Raises:
            Refused: a seal does not open: the server has told the sites different things.
        """
        self._expect("shares")
        about = self.agreement(sums)
        if not {*sealed, str(self.own)} <= set(self.publics) or str(self.own) in sealed:
            raise Refused("the server sends shares of sites that have announced no keys")
        if len(sealed) + 1 < sums.threshold_of(len(self.publics)):
            raise Refused(f"only {len(sealed) + 1} of {len(self.publics)} sites have shared their keys")
        for number, text in sealed.items():
            try:
                opened = primitives.unseal(self._sealing_key(number, about), text, int(number), str(self.own))
            except ValueError as error:
                raise Refused(f"the shares of site {self.names[number]!r:.80} do not open: {error}") from error
            self.held[number] = dict(zip((MASK, SEED), opened.split()))
        masked = sums.in_ring(values) + primitives.mask(_self_key(self.seed), len(values), sums.ring)
        for number in sealed:
            mask = _common_mask(self.masking, self.publics[number][1], about, told, len(values), sums)
            masked = masked + mask if int(number) > self.own else masked - mask
        self.stage = "masked"
        return masked

    def unmask(
        self,
        survivors: Sequence[int],
        sums: SecureSums,
        least: int = LEAST,
        before: Sequence[int] | None = None,
        groups: Sequence[Sequence[int]] = (),
    ) -> dict[str, list[str]]:
        """The fourth message: by number, which share and the share: of who is left the seed's, of who went the key's.

        Args:
            survivors: whose masked values the server says it has.
            sums: what the federation agrees on.
            least: how many of them this site wants, at least.
            before: whom the sum of the same round was unmasked for earlier, if it was: its difference to another one
                is what some sites have sent.
            groups: of sites over which there are sums, too: of each there have to be ``least`` left, or nobody.

        Raises:
            Refused: the sum would be of too few, or is asked for a second time for others.
        """
        if self.stage == "unmasked" and sorted(survivors) != self.survivors:
            raise Refused(f"it has told its shares for sites {self._called(self.survivors)}, and tells no others")
        if self.stage != "unmasked":
            self._expect("masked")
        if before is not None and sorted(survivors) != sorted(before):
            others = self._called(set(before) ^ set(survivors))
            raise Refused(f"its sum was told before; the difference would tell of {others}. Start them, or a new run")
        left, wanted = set(survivors), max(least, sums.threshold_of(len(self.publics)))
        if len(left) < len(survivors) or not {*map(str, left)} <= set(self.held) or self.own not in left:
            raise Refused(f"it is asked for the shares of sites {list(survivors)!r:.80}, and they are not this sum's")
        if len(left) < wanted:
            raise Refused(f"a sum over {len(left)} sites tells too much: it wants {wanted} or more")
        for group in groups:
            if 0 < len(left.intersection(group)) < least:
                raise Refused(
                    f"of sites {self._called(group)} too few are left: a sum over these wants {least} or more"
                )
        which = {number: SEED if int(number) in left else MASK for number in self.held}
        told = {number: [which[number], self.held[number][which[number]]] for number in self.held}
        self.stage, self.survivors = "unmasked", sorted(left)
        self.sealing = self.masking = self.seed = ""
        self.held = {number: {which[number]: share} for number, (_, share) in told.items()}
        return told

    def agreement(self, sums: SecureSums) -> str:
        """What all sites of the round have to have been told alike, hashed."""
        return _agreement(self.run, self.round, self.names, self.publics, sums)

    def _keys(self) -> list[str]:
        return [primitives.public_of(self.sealing), primitives.public_of(self.masking), _hash_of(self.seed)]

    def _about(self, number: int, name: str, keys: Keys) -> list[Any]:
        return ["keys", self.run, self.round, number, name, list(keys)]

    def _sealing_key(self, number: str, about: str) -> bytes:
        return primitives.agreed(self.sealing, self.publics[number][0], "seal", about)

    def _expect(self, stage: str) -> None:
        if self.stage != stage:
            raise Refused(f"the sum of round {self.round} stands after {self.stage!r}, not after {stage!r}")

    def _called(self, numbers: Any) -> list[str]:
        return [self.names.get(str(number), f"client {number}") for number in sorted(numbers)]


def unmasked(
    masked: Mapping[int, Whole],
    announced: Mapping[str, Mapping[str, Any]],
    sharing: Sequence[int],
    shares: Mapping[int, Mapping[str, Sequence[str]]],
    sums: SecureSums,
    about: tuple[str, int],
    told: Sequence[Any],
) -> Whole:
    """At the server: the sum of the values of all whose masked ones there are, with a sign.

    Args:
        masked: by number, the masked values.
        announced: by number, what each site's first message was.
        sharing: the numbers of all who have shared their secrets.
        shares: by number of who tells, its fourth message.
        sums: what the federation agrees on.
        about: the run's name, the round.
        told: what all sites were told alike.

    Raises:
        ValueError: too few shares, or they tell no secret.
    """
    names = {number: str(said["name"]) for number, said in announced.items()}
    publics = {number: list(said["keys"]) for number, said in announced.items()}
    agreement, threshold = _agreement(*about, names, publics, sums), sums.threshold_of(len(announced))
    first = next(iter(masked.values()))
    total = np.zeros_like(first)
    for values in masked.values():
        total = total + values
    for number in sharing:
        which = SEED if number in masked else MASK
        parts = {teller + 1: said.get(str(number), ("", ""))[1] for teller, said in shares.items()
                 if said.get(str(number), ("",))[0] == which}  # fmt: skip
        if len(parts) < threshold:
            raise ValueError(f"{len(parts)} shares of {threshold} for what site {names[str(number)]!r} has masked with")
        some = dict(sorted(parts.items())[:threshold])
        secret = _secret({place: int(share, 16) for place, share in some.items()})
        known, found = (2, _hash_of(secret)) if which == SEED else (1, primitives.public_of(secret))
        if publics[str(number)][known] != found:
            raise ValueError(f"the shares do not tell what site {names[str(number)]!r} has masked with: one is wrong")
        if which == SEED:
            total = total - primitives.mask(_self_key(secret), len(total), sums.ring)
            continue
        for other in masked:
            mask = _common_mask(secret, publics[str(other)][1], agreement, told, len(total), sums)
            # As the other has put it on: added if the lost one's number is larger.
            total = total - mask if number > other else total + mask
    return sums.signed(total)


def _agreement(run: str, round: int, names: Mapping[str, str], publics: Mapping[str, Keys], sums: SecureSums) -> str:
    return primitives.digest(run, round, dict(names), {n: list(k) for n, k in publics.items()}, repr(sums)).hex()


def _common_mask(private: str, public: str, agreement: str, told: Sequence[Any], count: int, sums: SecureSums) -> Whole:
    return primitives.mask(primitives.agreed(private, public, "mask", agreement, list(told)), count, sums.ring)


def _hash_of(seed: str) -> str:
    return primitives.digest("seed", seed).hex()


def _self_key(seed: str) -> bytes:
    return primitives.derived(bytes.fromhex(seed), "self")


def _secret(shares: Mapping[int, int]) -> str:
    secret = join_shares(shares)
    if secret >= 2 ** (8 * SECRET_BYTES):
        raise ValueError("the shares do not tell a secret: one of them is wrong")
    return f"{secret:0{2 * SECRET_BYTES}x}"
