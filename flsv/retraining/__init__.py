"""Training of coalitions' models, during the federation's fit or after it.

Tier: provisional.
"""
