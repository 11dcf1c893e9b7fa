"""What a loop goes on from, beside the federation's state and its parts: what a checkpoint holds, and a copy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flsv import __version__
from flsv.engines.one_process import OneProcess
from flsv.participants import ClientStates
from flsv.server.identity import Identity


@dataclass
class Saver:
    """What the next round needs of clients, optimizers and files.

    Args:
        states: what the clients keep between rounds.
        optimizers: likewise their optimizers' states, until training has begun with them.
        buffers: likewise those that no vector holds.
        asked: what ``configure_optimizers`` gave when the run began, until it is used again.
        shared: which part of the module traveled.
        finetuned: which layers a finetuning callback had unfrozen.
        csv: the file of contributions that the run goes on writing.
        identity: what the run is.
        resumed: whether this is of a checkpoint.
    """

    states: ClientStates = field(default_factory=ClientStates)
    optimizers: dict[str, Any] | None = None
    buffers: dict[str, Any] | None = None
    asked: dict[str, Any] | None = None
    shared: dict[str, str] | None = None
    finetuned: dict[str, list[str]] | None = None
    csv: str | None = None
    identity: Identity = field(default_factory=lambda: Identity({}, {}))
    resumed: bool = False

    def state_dict(self, engine: OneProcess | None = None) -> dict[str, Any]:
        """As it stands, with the engine of a fit.

        Args:
            engine: which has taken up what is here; None: there is none yet.
        """
        kept = (self.states.state_dict(), self.optimizers), self.buffers
        if engine is not None and engine.clients is not None:
            kept = engine.kept(), engine.clients.local.buffers()
        (clients, optimizers), buffers = kept
        return {
            "clients": clients,
            "optimizers": optimizers,
            "buffers": buffers,
            "asked": self.asked if engine is None else engine.options.asked,
            "shared": self.shared if engine is None else engine.space.described(),
            "finetuned": self.finetuned,
            "csv": self.csv,
            "identity": self.identity.plain(),
            "version": __version__,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """All but the identity, which is this fit's."""
        self.states.load_state_dict(state["clients"])
        self.optimizers, self.buffers, self.asked = state["optimizers"], state["buffers"], state["asked"]
        self.shared, self.finetuned, self.csv = state["shared"], state["finetuned"], state["csv"]
        self.resumed = True

    def copy(self, engine: OneProcess | None) -> Saver:
        """As it stands, apart from the engine."""
        copied = Saver()
        copied.load_state_dict(self.state_dict(engine))
        copied.identity, copied.resumed = self.identity, self.resumed
        return copied
