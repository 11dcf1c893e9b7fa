"""Notes what happens to a personalizer in a fit."""

from collections.abc import Callable
from typing import Any

from flsv.personalization import Personalizer


def watched(
    part: Personalizer,
    before: Callable[[Any, Any, Any], Any] = lambda round, contributions, models: None,
    after: Callable[[Any], Any] = lambda round: None,
) -> list[tuple[Any, Any, Any, Any]]:
    """Of every round: the round, what ``before`` gives of what ``personalize`` is called with, what it gives, and what
    ``after`` gives of the round at its end."""
    seen: list[Any] = []
    personalize, end_round = part.personalize, part.end_round

    def noted(round: Any, contributions: Any, models: Any) -> Any:
        had = before(round, contributions, models)
        own = personalize(round, contributions, models)
        seen.append((round, had, dict(own) if isinstance(own, dict) else own, None))
        return own

    def ended(round: Any) -> None:
        end_round(round)
        seen[-1] = (round, *seen[-1][1:3], after(round))

    part.personalize, part.end_round = noted, ended  # type: ignore[method-assign]
    return seen
