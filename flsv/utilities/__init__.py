"""Helpers that know nothing of federations: errors, checks of arguments, files, plots, seeds.

Tier: provisional.
"""
