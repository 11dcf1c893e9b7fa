"""Engines, which train and ask the clients of a federation: in one process, as one batched model, on several ranks or
at remote sites. They compute neither clients' contributions nor the aggregate of their updates.
"""
