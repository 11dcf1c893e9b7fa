"""Coalitions that are trained: beside the federation, side by side, one after the other, or after a fit."""
