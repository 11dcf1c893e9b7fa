"""Notes what happens to a personalizer in a fit."""

from flsv.personalization import Personalizer


def nothing(*_):
    return None


def record_calls(part: Personalizer, read_arguments=nothing, read_round=nothing):
    """Return a list that gets an entry of each round of a fit.

    An entry holds the round, what ``read_arguments`` makes of the arguments of ``personalize``, the result of
    ``personalize``, and what ``read_round`` makes of the round at its end.
    """
    entries = []
    personalize = part.personalize
    end_round = part.end_round

    def noted(round, contributions, models):
        arguments_read = read_arguments(round, contributions, models)
        result = personalize(round, contributions, models)
        if isinstance(result, dict):
            result = dict(result)

        entries.append([arguments_read, result])
        return result

    def ended(round):
        end_round(round)
        whole_round = round._round  # also what a personalizer does not read
        arguments_read, result = entries[-1]
        round_read = read_round(whole_round)
        entries[-1] = (whole_round, arguments_read, result, round_read)

    part.personalize = noted
    part.end_round = ended
    return entries
