"""The configuration of a federation, fixed before it starts, and the identity of a fit; nothing that changes during
one.
"""
