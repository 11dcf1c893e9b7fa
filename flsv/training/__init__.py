"""Client side of a round: local training and client algorithms. No module here reads what only the server has.

Tier: provisional.
"""
