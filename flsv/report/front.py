"""Page one of the report for the operator: who contributed what, by one set of values, and whether one may pay by it.

:class:`State` holds everything that decides which sentences stand on the page, and :data:`SENTENCES` lists each
sentence with its condition. Sentences that answer the same question exclude each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from flsv.report.basis import RETRAINED, Basis
from flsv.report.reading import Run
from flsv.results.text import WORDS, percent

#: Fraction of the validation set in one class from which on accuracy says little about each client's contribution.
MOSTLY = 0.7
#: Where the values of a page come from.
Source = Literal["nothing", "rounds", "unsuitable", "metric", "ranking", "one seed", "seeds"]
#: Sources whose values may become a basis for payment.
PAYABLE = ("metric", "one seed", "seeds")


@dataclass(frozen=True)
class State:
    """State of a run and of its clients' values; it decides which sentences page one has.

    Args:
        source: where the values come from: ``"nothing"`` if nothing was measured; ``"rounds"`` if another framework
            trained the rounds; ``"unsuitable"`` for a metric whose documentation advises against payment; ``"ranking"``
            for too few trained coalitions for more than a ranking; ``"metric"`` for a metric that trains no coalitions;
            ``"one seed"`` or ``"seeds"`` for coalitions trained with one or with several seeds.
        retrained: whether the values are of ``flsv retrain`` rather than of the run itself.
        anybody: whether any client has taken part.
        ended: whether the run has ended.
        one_class: whether the values distribute the accuracy on validation samples that are mostly of one class.
        judged: whether models were scored on the clients' own validation samples.
        brackets: whether the values have intervals.
        spread: whether it is known which fraction of a payment would go to other clients with other seeds.
        budget: whether a budget is shared out.
        progress: whether the performances at the start and at the end of the training are known.
        adds_up: whether the values sum to the difference between these two performances.
        missing: whether any client lacks a value.
        faulty: whether any client's updates were not finite or far too large.
        flagged: whether there were such faulty updates, or copies of updates.
    """

    source: Source = "seeds"
    retrained: bool = False
    anybody: bool = True
    ended: bool = True
    one_class: bool = False
    judged: bool = False
    brackets: bool = False
    spread: bool = False
    budget: bool = False
    progress: bool = False
    adds_up: bool = False
    missing: bool = False
    faulty: bool = False
    flagged: bool = False

    @property
    def fitness(self) -> str:
        """Return the name of the sentence that says whether the values are a basis for payment; "" if there are no
        values. If several things speak against payment, the sentence names the first of them."""
        if self.source == "nothing":
            return ""
        obstacles = {
            self.source: self.source not in PAYABLE,
            "unfinished": not self.ended and not self.retrained,
            "metric": self.source == "metric",
            "one_class": self.one_class,
            "one_seed": self.source == "one seed",
            "judged": self.judged,
        }
        return next((name for name, here in obstacles.items() if here), "seeds")

    @property
    def payable(self) -> bool:
        """Return whether shares are shown beside the values: always if there is a budget; otherwise only if ``source``
        is in :data:`PAYABLE`."""
        return self.budget or self.source in PAYABLE

    @property
    def warns(self) -> bool:
        """Return whether the sentence on payment is set off as a warning."""
        return self.budget and self.fitness in ("rounds", "unsuitable", "metric", "one_class")


class Sentence(NamedTuple):
    """Sentence of page one: its key in ``words.yaml``, the question that it answers, and the condition on the page's
    :class:`State` under which it is shown. At most one of the sentences on the same question is shown."""

    name: str
    question: str
    when: Callable[[State], bool]


def _fitness(name: str) -> Sentence:
    return Sentence(name, "fitness", lambda state: state.fitness == name)


SENTENCES = (
    Sentence("together", "who", lambda s: s.anybody),
    Sentence("nobody", "who", lambda s: not s.anybody),
    Sentence("not_ended", "end", lambda s: not s.ended and s.anybody and not s.retrained),
    Sentence("not_ended_retrained", "end", lambda s: not s.ended and s.anybody and s.retrained),
    Sentence("faulty", "faults", lambda s: s.faulty and not s.retrained),
    Sentence("faulty_retrained", "faults", lambda s: s.faulty and s.retrained),
    *map(
        _fitness,
        (
            *("rounds", "unsuitable", "ranking", "unfinished", "metric", "one_class", "one_seed"),
            *("judged", "seeds"),
        ),
    ),
    Sentence("other_seeds", "certainty", lambda s: s.source in PAYABLE and s.spread),
    Sentence("trials_metric", "certainty", lambda s: s.source == "metric" and not s.spread),
    Sentence("trials_seeds", "certainty", lambda s: s.source in ("one seed", "seeds") and not s.spread),
    Sentence("values_of", "source", lambda s: s.source != "nothing"),
    Sentence("no_metric", "source", lambda s: s.source == "nothing"),
    Sentence("brackets", "brackets", lambda s: s.brackets),
    Sentence("no_brackets", "brackets", lambda s: s.source in PAYABLE and not s.brackets),
    Sentence("bracket_shares", "bracketed shares", lambda s: s.brackets and s.budget),
    Sentence("missing", "missing", lambda s: s.missing and s.source != "nothing" and not s.payable),
    Sentence("missing_share", "missing", lambda s: s.missing and s.source != "nothing" and s.payable),
    Sentence("flagged", "flagged", lambda s: s.flagged and s.budget),
    Sentence("waterfall", "progress", lambda s: s.progress and s.adds_up),
    Sentence("learned", "progress", lambda s: s.progress and not s.adds_up),
)


def sentences(state: State) -> dict[str, str]:
    """Return ``{question: name of its sentence}`` for page one.

    Example:
        >>> sentences(State("metric"))["fitness"], sentences(State("seeds", ended=False, retrained=True))["fitness"]
        ('metric', 'seeds')
    """
    return {each.question: each.name for each in SENTENCES if each.when(state)}


def source_of(run: Run, basis: Basis | None) -> Source:
    """Return where the values of a page come from, see :class:`State`."""
    if basis is None:
        return "nothing"
    if "of_rounds" in run.record:
        return "rounds"
    if not basis.to_pay_by:
        return "unsuitable"
    if basis.ranks_only:
        return "ranking"
    if not basis.trained:
        return "metric"
    return "seeds" if basis.seeds > 1 else "one seed"


def state_of(run: Run, basis: Basis | None, **known: bool) -> State:
    """Return the :class:`State` of a run whose page one shows ``basis``; ``known`` are the fields of the state that do
    not follow from these two."""
    source = source_of(run, basis)
    return State(
        source,
        retrained=basis is not None and basis.key == RETRAINED,
        anybody=bool(run.rounds),
        ended=run.ended,
        one_class=basis is not None and basis.majority >= MOSTLY,
        judged=basis is not None and basis.judged,
        brackets=basis is not None and basis.brackets,
        missing=basis is not None and any(value != value for value in basis.values),
        faulty=bool(run.named),
        flagged=bool(run.named or run.copies),
        **known,
    )


def fitness(run: Run, basis: Basis) -> str:
    """Return a sentence on whether the values of ``basis`` are suitable as a basis for payment."""
    name = state_of(run, basis).fitness
    facts = {
        "rounds": run.record.get("of_rounds"),
        "unsuitable": basis.key,
        "one_class": percent(basis.majority),
    }
    return WORDS["fitness"][name].format(facts.get(name, basis.seeds))
