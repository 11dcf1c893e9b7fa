"""The attributes of a Round: their meanings, the stage after which they are known, and what the server needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

Stage = Literal["training", "aggregation", "personalization", "exchange"]
#: The stages of a round in their order. Each attribute is known after one of them.
STAGES: tuple[Stage, ...] = get_args(Stage)

#: What the server must have or receive for a part, ``{keyword for tables: description}``, in the order of display.
REQUIREMENTS = {
    "validation": "the server has validation data",
    "updates": "the server sees every single update",
    "head": "the updates' classifier head",
    "classes": "samples have classes",
    "losses": "clients report their training loss",
    "counts": "clients report their numbers of samples of each class",
    "responses": "clients respond to requests about their samples",
    "reports": "clients report values that their client algorithm computes",
    "client validation": "every client has validation samples",
}
#: Requirements that a private client does not meet, since it sends only its noised update.
REPORTED_BY_CLIENTS = frozenset({"losses", "counts", "responses", "reports", "client validation"})


#: The attributes of a :class:`flsv.Round`. k is the cohort's size, n the number of clients, P the length of a model's
#: vector, p that of its parameters, M the number of classes, D the number of weights per class in the classifier head.
#: :class:`Attribute` explains the columns. A mark sets one of its flags: "loop" means that ``outside`` is False,
#: "internal" that ``is_argument`` is False. The requirement "updates" implies the mark "of updates".
TABLE = """
attribute | what it is | shape | known after | requires | marks
round_index | the round's number, from 0 | number | training | |
client_ids | the clients that took part | int64 [k] | training | | per client
num_samples | their numbers of training samples | int64 [k] | training | | per client
num_steps | their numbers of optimizer steps | int64 [k] | training | | per client, loop
losses | their mean training losses | [k] | training | losses | per client, loop
senders | the clients that sent an update, excluded ones last | int64 [s] | training | |
inclusion_probabilities | the probabilities with which they were drawn | [k] | training | | per client
global_vector | the global model at the start of the round | [P] | training | |
client_vectors | the clients' models | [k, P] | training | updates | per client
client_updates | the parameters minus the initial parameters | [k, p] | training | updates | per client, of starts
state_updates | the same with buffers (BatchNorm's statistics) | [k, P] | training | updates | per client, of starts
client_heads | the updates' classifier heads | [k, M, D+1] | training | updates, head | per client, of starts
client_head_weights | the models' classifier heads | [k, M, D+1] | training | updates, head | per client
matrix | the updates, for norms and products | ClientMatrix | training | updates | of starts
utility | the game by accuracy, of uniform averages | game | training | validation, updates | scores, of starts
server_data | the server's validation set | LocalData | training | validation | loop
clients | the cohort's clients, for requests | Client | training | responses | per client, loop
all_clients | the federation's clients, for requests | Client | training | responses | loop
server_vector | the next global model | [P] | aggregation | | of updates
server_update | the next global model minus this one | [P] | aggregation | | of updates
server_head | the weighted mean of client_heads | [M, D+1] | aggregation | updates, head | of starts
server_head_weights | the weighted mean of client_head_weights | [M, D+1] | aggregation | updates, head |
aggregation_weights | the clients' weights in the next model | [k] | aggregation | | per client, of updates
peer_values | clients' values of others | [k, n] | personalization | client validation | per client, of updates, loop
reached | the clients with messages, the cohort first | int64 [r] | exchange | | loop
uploaded | elements that each of them has sent | int64 [r] | exchange | | loop
downloaded | elements that each of them has received | int64 [r] | exchange | | loop
uploaded_bytes | bytes that each of them has sent | float64 [r] | exchange | | loop
downloaded_bytes | bytes that each of them has received | float64 [r] | exchange | | loop
game | a coalition game | game(performance, weighting) | training | validation, updates | scores, internal, of starts
slopes | the loss's slopes along the updates | slopes() | training | validation, updates | scores, internal, of starts
games | all coalition games of the round | CoalitionGames | training | validation, updates | scores, internal, of starts
generator | a generator of random numbers by a name | generator(name) | training | | internal
combine | a weighted mean of the models | combine(weights) | training | updates | internal
head | the place of the classifier head in a vector | Head | training | head | internal
space | the map between vectors and modules | ParameterSpace | training | | internal
seed | the seed of the round's random choices | number | training | | internal
starts | the clients' initial models, or clients that have them | list | training | | per client, internal, of starts
reports | the reports that strategies declare | {name: [k, ...]} | training | | internal
drawing_probabilities | the probabilities of all clients to be drawn | drawing_probabilities() | training | | internal
excluded | clients whose update was excluded | list | training | | internal
unmeasured | clients that metrics do not see | list | training | | internal
channel | the count of the messages | Channel | exchange | | loop, internal
"""


@dataclass(frozen=True)
class Attribute:
    """One attribute of a :class:`flsv.Round`, a row of the vocabulary.

    Args:
        meaning: what it is, in words.
        shape: its shape or type.
        stage: the stage of a round after which it is known.
        requires: what the server must have or receive for it, as keys of :data:`REQUIREMENTS`.
        per_client: whether it has a row for each of the k clients.
        of_updates: whether it depends on the clients' updates.
        of_starts: whether it depends on the models from which the clients started.
        needs_utilities: whether models are scored on the server's validation set for it.
        outside: whether rounds of other loops have it, too (:func:`flsv.value_round`, a strategy of Flower).
        is_argument: whether a metric's ``update`` may take it as an argument. Otherwise a function in ``round_fields``
            reads it.
    """

    meaning: str
    shape: str
    stage: Stage
    requires: tuple[str, ...]
    per_client: bool
    of_updates: bool
    of_starts: bool
    needs_utilities: bool
    outside: bool
    is_argument: bool


def _parse_table(table: str) -> dict[str, Attribute]:
    attributes = {}
    _, *lines = table.strip().splitlines()  # the first line has the titles
    for line in lines:
        cells = [cell.strip() for cell in line.split("|")]
        name, meaning, shape, stage, requires_cell, marks_cell = cells
        requires = tuple(keyword for keyword in requires_cell.split(", ") if keyword)
        marks = marks_cell.split(", ")
        attributes[name] = Attribute(
            meaning=meaning,
            shape=shape,
            stage=cast(Stage, stage),
            requires=requires,
            per_client="per client" in marks,
            of_updates="of updates" in marks or "updates" in requires,
            of_starts="of starts" in marks,
            needs_utilities="scores" in marks,
            outside="loop" not in marks,
            is_argument="internal" not in marks,
        )
    return attributes


#: ``{name: row}``, the attributes of a :class:`flsv.Round`.
VOCABULARY = _parse_table(TABLE)
#: The names that a metric's ``update`` may take as arguments.
ARGUMENTS = frozenset(name for name, row in VOCABULARY.items() if row.is_argument)


def stage_of(names: Iterable[Any]) -> Stage:
    """Return the latest stage after which the named attributes of a round are known. A metric that reads them is
    updated then.

    Example:
        >>> stage_of(["client_ids", "server_vector"])
        'aggregation'
    """
    stages: list[Stage] = ["training"]
    for name in names:
        if name in VOCABULARY:
            stages.append(VOCABULARY[name].stage)
    return max(stages, key=STAGES.index)
