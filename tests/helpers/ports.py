"""Ports on which nobody listens."""

import random
import socket
from contextlib import ExitStack, suppress

#: Below the ports that a client is given for its end of a connection: one that is free for a moment, while its server
#: is started again, would be taken by one of those who try to reach it. Ray's workers have ports below 20,000.
SERVER_PORTS = range(20_000, 30_000)


def free_ports(count):
    generator = random.SystemRandom()  # other processes may have the same seed
    candidates = generator.sample(SERVER_PORTS, 1000)
    free = []
    with ExitStack() as stack:
        for port in candidates:
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                probe.bind(("127.0.0.1", port))
                free.append(port)
            if len(free) == count:
                return free
    raise OSError("no ports are free")
