"""ConfigurationError: says what was wrong with the arguments, what was expected, and what to do."""


class ConfigurationError(ValueError):
    """A wrong argument, file or combination, found before training time is spent.

    The message says what was wrong, what was expected and what to do. The command line prints it without a traceback.

    Example:
        >>> raise ConfigurationError("num_clients=1: a federation needs at least 2 clients.")
        Traceback (most recent call last):
        ...
        flsv.errors.ConfigurationError: num_clients=1: a federation needs at least 2 clients.
    """
