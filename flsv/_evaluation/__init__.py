"""How many models of one structure are evaluated on one validation set: the machinery behind :mod:`flsv.coalition`."""
