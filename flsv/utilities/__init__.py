"""Helpers that all parts of flsv may use: errors, checks of arguments, files, progress, plots, seeds."""
