"""Clients' values, computed from the scores and outputs of coalitions' models in a run's folder."""
