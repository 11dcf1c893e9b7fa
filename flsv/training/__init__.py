"""Client side of a round: local training and client algorithms."""
