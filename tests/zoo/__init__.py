"""Strange programs as users write them, a module for each kind of strangeness. What comes of each of them in a
federation is in :mod:`zoo.table`, by which tests are parametrized."""
