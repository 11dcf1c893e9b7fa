"""The sections of page one of the report for the operator, and the numbers that stand on it, for ``report.csv``."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup
from pandas import DataFrame

from flsv.functional.shapley.one_seed import BRACKETS
from flsv.report import drawing, facts
from flsv.report.basis import ALL_TAKE_PART, RETRAINED, Basis
from flsv.report.certainty import other_scores, other_seeds
from flsv.report.fitness import misallocated
from flsv.report.front import MOSTLY, PAYABLE, fitness, small_gain_of, verdict
from flsv.report.html import section, table, warning
from flsv.report.reading import Run
from flsv.report.shares import AMOUNTS, Shares
from flsv.results.text import (
    NONE,
    WORDS,
    beside,
    by_value,
    ends_of,
    joined,
    percent,
    performance,
    ranking,
    shares_in,
    titled,
    with_intervals,
)
from flsv.utilities.csv_files import NAN

#: Number of the waterfall's steps; of more clients, those with the highest and the lowest values are shown.
MOST_STEPS = 12
#: Letters of a label that fit beside the waterfall.
MOST_LETTERS = 24
#: Smallest and largest fraction of a payment that went to the wrong clients in trials of metrics for which no coalition
#: is trained (docs/benchmark.md).
BY_METRIC = (0.17, 0.32)
#: Verdicts that are set off as warnings if a budget is shared out.
WARNED = ("rounds", "unsuitable", "metric", "one_class")
#: The sampler's name in a record if all clients take part in every round.
EVERYBODY = "FullParticipation()"
#: Columns of the file with the page's numbers.
NUMBERS = ("what", "client", "client_name", "number")
#: The sentences of page one.
SAY: Mapping[str, str] = WORDS["front"]


class FirstPage:
    """Page one of a run's report.

    Args:
        run: the run.
        basis: the values that the page is about; None if nothing was measured.
        shares: the shares of a budget by these values; None if there is no budget.
        shown: the numbers of the clients on the page, in order.

    Attributes:
        numbers: the numbers on the page, ``(what, client or "", number)``.
    """

    def __init__(self, run: Run, basis: Basis | None, shares: Shares | None, shown: Sequence[int]) -> None:
        self.run, self.basis, self.shares, self.shown = run, basis, shares, shown
        self.names = [run.label(client) for client in shown]
        self.numbers: list[tuple[str, int | str, float]] = []
        self.verdict = "" if basis is None else verdict(run, basis)
        self.payable = shares is not None or self.verdict in PAYABLE
        self.retrained = basis is not None and basis.key == RETRAINED

    def sections(self) -> list[Markup]:
        """Return the page's sections."""
        return [self._opening(), self._contributions(), self._learned(), self._rests_on()]

    def frame(self) -> DataFrame:
        """Return the numbers on the page as a table with the columns :data:`NUMBERS`."""
        names = self.run.client_names
        rows = [
            (what, who, "" if who == "" else names[int(who)], f"{x:.10g}") for what, who, x in self.numbers if x == x
        ]
        return DataFrame(rows, columns=[*NUMBERS])

    def _note(self, what: str, value: float, client: int | str = "") -> float:
        """Store a number of the page under the name ``what``, and return it."""
        self.numbers.append((what, client, value))
        return value

    # ---- what it is about, and what speaks against relying on it

    def _opening(self) -> Markup:
        run, state = self.run, facts.state_of(self.run)
        names = [run.label(client) for client in range(run.num_clients)]
        partners = joined(names) if 0 < len(names) <= MOST_STEPS else f"{len(names)} partners"
        if run.client_names[:1] == ("0",):  # clients without names
            partners = partners[0].upper() + partners[1:]
        self._note("partners", run.num_clients)
        self._note("rounds", run.rounds)
        self._note("planned rounds", run.record["rounds"] or NAN)
        opening = SAY["together"].format(partners, state) if run.rounds else SAY["nobody"].format(state)
        return section("", opening, *map(warning, self._warnings()))

    def _warnings(self) -> list[str]:
        """Return the warnings that a reader has to know before using the values."""
        run, lines = self.run, []
        if not run.ended and run.rounds:
            lines.append(SAY["not_ended_retrained" if self.retrained else "not_ended"])
        named = [f"{run.label(who)} ({times} of {of} rounds)" for who, (times, of) in run.named.items()]
        for client, (times, of) in run.named.items():
            self._note("rounds with a faulty update", times, client)
            self._note("rounds with an update", of, client)
        if named:
            lines.append(SAY["faulty_retrained" if self.retrained else "faulty"].format(", ".join(named)))
        for group in run.copies:
            lines.append(SAY["copying" if len(group) > 1 else "echoing"].format(", ".join(map(run.label, group))))
        return [*lines, *([WORDS["judged"]] if self.basis is not None and self.basis.judged else [])]

    # ---- who contributed what

    def _contributions(self) -> Markup:
        basis = self.basis
        title = "What each contributed" if self.shares is None else f"Shares of {self.shares.title}"
        if basis is None:
            return section(title, WORDS["no_metric"])
        if basis.majority >= MOSTLY:
            self._note("largest class's part of the validation set", basis.majority)
        if basis.seeds > 1:
            self._note("seeds", basis.seeds)
        fit = fitness(self.run, basis)
        return section(
            title,
            warning(fit) if self.shares and self.verdict in WARNED else fit,
            self._certainty(),
            *self._by_scores(),
            self._table(basis),
            *self._notes(basis),
            self._not_all(),
            *self._order(basis),
            None if self._adds_up else self._bars(basis),
        )

    def _notes(self, basis: Basis) -> list[str]:
        """Return sentences below the table: what its values are, how they are paid, and which are missing."""
        run, notes = self.run, [SAY["values_of"].format(self._source(basis), basis.of)]
        if basis.brackets:
            notes.append(BRACKETS if self.shares is None else f"{BRACKETS} {SAY['bracket_shares']}")
        elif self.verdict in PAYABLE:
            notes.append(SAY["no_brackets"])
        if self.shares is not None:
            notes.append(WORDS["rules"][self.shares.budget.rule])
        unknown = [client for client in range(run.num_clients) if basis.values[client] != basis.values[client]]
        if unknown:
            notes.append(SAY["missing_share" if self.payable else "missing"].format(run.labels(unknown)))
        return [*notes, SAY["flagged"]] if self.shares is not None and (run.named or run.copies) else notes

    @staticmethod
    def _source(basis: Basis) -> str:
        return basis.title if basis.key == RETRAINED else f"metric {basis.title}"

    def _amount(self, fraction: float, what: str, digits: int = 2) -> str:
        """Format a fraction of a payment with ``digits`` significant digits: as an amount of the budget, or in percent
        if there is no budget. Store the fraction and the amount among the page's numbers, named after ``what``."""
        fraction = self._note(what, float(f"{fraction:.{digits}g}"))
        if self.shares is None:
            return SAY["of_payment"].format(f"{100 * fraction:.{digits}g} %")
        budget = self.shares.budget
        amount = self._note(f"{what}, amount", float(f"{fraction * budget.amount:.{digits}g}"))
        places = 0 if amount >= 10 or amount == int(amount) else budget.decimals
        return SAY["of_budget"].format(f"{amount:,.{places}f}", re.sub(r"\.0+(?!\d)", "", self.shares.title))

    def _certainty(self) -> str | None:
        """Return a sentence on how much of a payment other seeds would give to other clients or, if that is unknown, on
        how much went to the wrong clients in trials; None if the page has neither."""
        basis = self.basis
        if basis is None or self.verdict not in PAYABLE:
            return None
        spread = other_seeds(self.run, basis, self.shares.budget.rule if self.shares else "zero")
        if spread == spread:
            return SAY["other_seeds"].format(self._amount(spread, "to others with other seeds"))
        if not basis.trained:
            return SAY["trials_metric"].format(self._in_trials(BY_METRIC))
        if small_gain_of(basis):
            return None
        fraction, trials = misallocated(self.run.num_clients, self._drawn, basis.seeds)
        seeds = "one seed" if basis.seeds == 1 else "three seeds"
        return SAY["trials_seeds"].format(trials, seeds, f"{100 * fraction:.0f}", self._in_trials([fraction]))

    def _in_trials(self, fractions: Sequence[float]) -> str:
        """Return a clause that states ``fractions`` of a payment, as measured in trials, as amounts of the budget; ""
        if there is no budget."""
        if self.shares is None:
            return ""
        amounts = [self._amount(fraction, "to others in trials") for fraction in fractions]
        return SAY["which_is"].format(" to ".join([*(each.partition(" ")[0] for each in amounts[:-1]), amounts[-1]]))

    @property
    def _drawn(self) -> bool:
        """Return whether only some clients, chosen by a sampler, took part in each round of the trainings from which
        the values come."""
        sampler = self.run.record["settings"].get("sampler", EVERYBODY)
        return bool(sampler != EVERYBODY and self.basis is not None and ALL_TAKE_PART not in self.basis.of)

    def _by_scores(self) -> list[str]:
        """Return one sentence for each score other than the one that measured the models: how much of the payment that
        score would give to other clients."""
        if self.basis is None or not self.payable:
            return []
        found = other_scores(self.run, self.basis)
        return [
            SAY["other_score"].format(titled(by), titled(self.basis.by), self._amount(part, f"to others by {by}", 3))
            for by, part in found.items()
            if part == part
        ]

    def _table(self, basis: Basis) -> Markup:
        """Return the table of the clients' values: with shares and amounts if there is a budget, with shares alone if
        there is none and the values may become a basis for payment."""
        value, low, high = self._of_shown(basis.values, basis.low, basis.high)
        columns = {"value": with_intervals(value, low, high, between=" to ")}
        for client in self.shown:
            for what, of in (("value", basis.values), ("low", basis.low), ("high", basis.high)):
                self._note(what, of[client], client)
        if self.shares is not None:
            cells = [self.shares.cells(client) for client in self.shown]
            columns |= {head: [cell[place] for cell in cells] for place, head in enumerate(("share", "amount"))}
            for client in self.shown:
                for what in AMOUNTS:
                    self._note(what, float(self.shares.table.loc[client, what]), client)
            finding = self.shares.table["finding"]
            if finding.any():
                columns["finding"] = [finding[client] or NONE for client in self.shown]
        elif self.payable:
            shares = shares_in(basis.values)
            columns["share"] = [percent(self._note("share", shares[client], client)) for client in self.shown]
        return table(["partner", *columns], [list(row) for row in zip(self.names, *columns.values())])

    def _of_shown(self, *numbers: Sequence[float]) -> list[list[float]]:
        return [[of[client] for client in self.shown] for of in numbers]

    def _not_all(self) -> str | None:
        if len(self.shown) == self.run.num_clients:
            return None
        self._note("partners in the table", len(self.shown))
        file = "contributions.csv" if self.shares is None else "shares.csv"
        return SAY["shown"].format(len(self.shown), self.run.num_clients, file)

    def _order(self, basis: Basis) -> list[str]:
        """Return sentences on who contributed most and least."""
        names = [self.run.label(client) for client in range(self.run.num_clients)]
        return ranking(names, (basis.values, basis.low, basis.high), basis.name)

    def _bars(self, basis: Basis) -> Markup:
        values, low, high = self._of_shown(basis.values, basis.low, basis.high)
        return drawing.bars(self.names, values, (low, high), SAY["bars"].format(self._source(basis)), basis.seeds > 1)

    # ---- what the model has learned

    def _game(self) -> Mapping[str, Any] | None:
        """Return the entry in ``run.json`` of the performance whose change is distributed among the clients, with its
        values at the start and end of training; None if these are not known."""
        games = self.run.record.get("paid_in", {})
        of = games.get(self.basis.key) if self.basis is not None else None
        by = "" if self.basis is None else self.basis.by
        found = [of] if of else [game for game in games.values() if game["by"] == by] or list(games.values())
        return next((game for game in found if game and None not in (game["start"], game["end"])), None)

    def _learned(self) -> Markup:
        """Return the change of the model's performance over the run: a waterfall if the values add up to it, else
        text."""
        game = self._game()
        if game is None:
            return Markup("")
        by = titled(game["by"])
        start, end = (performance(game["by"], self._note(f"{by} at the {x}", game[x])) for x in ("start", "end"))
        end += beside(game)
        plain = titled(game["by"], "plain")
        if self.basis is not None and self._adds_up:
            caption = SAY["waterfall"].format(plain, start, end, self.basis.key, self.run.source)
            return section("What the model has learned", self._waterfall(self.basis, game, caption))
        others = SAY["other_trainings"] if self.retrained else None
        return section("What the model has learned", SAY["learned"].format(plain, start, end), others)

    @property
    def _adds_up(self) -> bool:
        """Return whether the values add up to what the model has learned."""
        return self.basis is not None and self.basis.key in facts.adding_up(self.run) and self._game() is not None

    def _waterfall(self, basis: Basis, game: Mapping[str, Any], caption: str) -> Markup:
        """Return a waterfall with the clients of the highest and lowest values as steps, and all others in one step."""
        values = basis.values
        known = [client for client in by_value(values) if values[client] == values[client]]
        order = ends_of(known, MOST_STEPS, MOST_STEPS // 2)
        names, heights = [self.run.label(client) for client in order], [values[client] for client in order]
        start, end, less = game["start"], game["end"], facts.direction(self.run, basis.key) < 0
        if game["by"] == "negative_loss":  # shown as a loss
            start, end, less = -start, -end, True
        whole = start - end if less else end - start
        rest = whole - math.fsum(heights)
        if len(order) < self.run.num_clients and abs(rest) > facts.TOLERANCE * abs(whole):
            names, heights = [*names, "all others"], [*heights, rest]
        if less:  # clients that raise it come first, or the waterfall could fall below 0 in between
            names, heights = names[::-1], [-height for height in heights[::-1]]
        unit = titled(game["by"], "plain")
        return drawing.steps(names, heights, start, end, caption, unit if len(unit) <= MOST_LETTERS else "", less)

    # ---- what this rests on

    def _rests_on(self) -> Markup:
        judged, logged = self.run.record["validation"], self.run.record.get("logged", {})
        known = {name: value for name in WORDS["logged"] if (value := logged.get(name)) is not None}
        said = ", ".join(
            WORDS["logged"][name].format(performance(name, self._note(f"logged {name}", value)))
            for name, value in known.items()
        )
        lines = [SAY["partners_judged"]] if self.basis is not None and self.basis.judged else []
        if judged:
            rows = judged["rows"]
            cases = "cases" if rows is None else f"{self._note('validation cases', rows):,} cases"
            lines.append(SAY["judged_on"].format(cases, judged["of"]))
        lines += [SAY["logged"].format(said)] if said else []
        samples = sum(self.run.record["samples"])
        lines += [SAY["cases"].format(self._note("training cases", samples))] if samples else []
        return section("What this rests on", [*lines, SAY["others"], SAY["appendix"]])
