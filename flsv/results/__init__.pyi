from .basis import Basis as Basis, preferred_basis as preferred_basis
from .reading import Run as Run, open_run as open_run, read_run as read_run
