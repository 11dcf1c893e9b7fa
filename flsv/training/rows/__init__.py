"""Training of many models of one structure, clients' or coalitions', as rows of one batched model; nothing that knows
what a row stands for.
"""
