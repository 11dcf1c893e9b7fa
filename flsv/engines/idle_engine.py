"""IdleEngine: base class of engines that train outside of Lightning's loop, batched or at sites."""

from __future__ import annotations

from typing import Any

from flsv._lightning.patches import PatchedAttributes
from flsv._lightning.several_processes import IdleBatch, idle_patches
from flsv.engines.engine import Engine


class IdleEngine(Engine):
    """Base class of engines that train outside of Lightning's loop. The loop gets one idle batch per round."""

    def begin_training(self, buffers: dict[str, Any] | None) -> None:
        super().begin_training(buffers)
        # This comes after all checks, which look at the module's own hooks.
        patches = PatchedAttributes(idle_patches(self.trainer))
        self._undo.callback(patches.restore)

    def loader(self) -> Any:
        return IdleBatch()

    def finish_epoch(self) -> None:
        self.loop.train_epoch(is_idle=True)
        super().finish_epoch()
