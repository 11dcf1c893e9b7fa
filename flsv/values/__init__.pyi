from .query import (
    Game as Game,
    SeedScores as SeedScores,
    mean_over_seeds as mean_over_seeds,
    read_scores as read_scores,
    values as values,
    values_by_round as values_by_round,
)
