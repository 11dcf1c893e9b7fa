"""Records the calls of a personalizer in a fit."""

from typing import Any, NamedTuple


class RecordedRound(NamedTuple):
    round: Any
    arguments_read: Any
    result: Any
    round_read: Any


def nothing(*_):
    return None


def record_calls(part, read_arguments=nothing, read_round=nothing):
    """Return a list that gets a :class:`RecordedRound` in each round of a fit.

    It holds the round, what ``read_arguments`` makes of the arguments of ``personalize``, the result of
    ``personalize``, and what ``read_round`` makes of the round at its end.
    """
    entries = []
    calls_of_personalize = []  # what was read of its arguments, and its result
    personalize = part.personalize
    end_round = part.end_round

    def personalize_and_record(round, contributions, models):
        arguments_read = read_arguments(round, contributions, models)
        result = personalize(round, contributions, models)
        if isinstance(result, dict):
            result = dict(result)  # a later change does not reach the record

        calls_of_personalize.append((arguments_read, result))
        return result

    def end_round_and_record(round):
        end_round(round)
        whole_round = round._round  # also what a personalizer does not read
        arguments_read, result = calls_of_personalize[-1]
        entries.append(RecordedRound(whole_round, arguments_read, result, read_round(whole_round)))

    part.personalize = personalize_and_record
    part.end_round = end_round_and_record
    return entries
