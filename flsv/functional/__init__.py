"""The mathematics: pure functions on tensors, without state and without Lightning."""

from flsv.functional.class_specific_shapley import class_specific_shapley, participant_weights

__all__ = ["class_specific_shapley", "participant_weights"]
