"""What is told of trained coalitions beside the values: their utilities, and which have none."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flsv.functional.shapley.halvings import has_halvings
from flsv.games.members import members_of


def are_singles_only(masks: Tensor) -> bool:
    """Return whether coalitions ``[K, n]`` are each a client alone, beside the empty one and the full one."""
    is_single = masks.sum(1) == 1
    return len(masks) == 2 + int(is_single.sum())


def coalitions_not_finite(
    masks: Tensor,
    utilities: Tensor,
    outputs: Tensor | None,
) -> list[list[int]]:
    """Return the members of each coalition ``[K, n]`` with a utility or an output that is not finite."""
    rows = utilities.reshape(len(masks), -1)
    is_finite = rows.isfinite().all(1).cpu()
    if outputs is not None:
        is_finite &= outputs.flatten(1).isfinite().all(1)
    return [list(members) for members in members_of(masks[~is_finite])]


def evidence_of(
    masks: Tensor,
    utilities: Tensor,
    source: str,
    per_class: bool,
    design: str,
) -> dict[str, Any]:
    """Return where the utilities of coalitions ``[K, n]`` come from, those of clients alone, and of all together.

    ``design`` names the coalitions to train.
    """
    are_all_trained = len(masks) == 2 ** masks.shape[1]
    is_alone = masks.sum(1) == 1
    return {
        "source": source,
        "trainings": "all" if are_all_trained else design,
        "alone_only": are_singles_only(masks) and not are_all_trained,
        "halved": has_halvings(masks) and not are_all_trained,
        # The others' scores are then estimated from too few.
        "ranks_only": source == "scores" and design in ("singles", "leave-one-out"),
        "alone": [] if per_class else utilities[is_alone].tolist(),
        "together": None if per_class else float(utilities[masks.all(1)]),
    }
