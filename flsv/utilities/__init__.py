"""Small things that every room may use: errors, checks of arguments, files, progress, plots, seeds."""
