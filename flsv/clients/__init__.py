"""The client side of a round: local training, and what a client does differently."""
