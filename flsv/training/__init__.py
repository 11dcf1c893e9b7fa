"""Client side of a round: local training and client algorithms; nothing that only a server knows."""
