"""Client side of a round: local training and client algorithms. No module here uses what only the server knows."""
