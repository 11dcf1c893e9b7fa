"""Where the checkpoint callbacks of a coalition's fit save."""

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint

from flsv.retraining.coalition_fit import write_into


class CheckpointWithFolderProperty(ModelCheckpoint):
    """Stores its folder under another name, as a callback that moves its files does."""

    @property
    def dirpath(self):
        return self.target

    @dirpath.setter
    def dirpath(self, folder):
        self.target = folder


def test_checkpoint_callback_with_a_folder_property_saves_in_the_coalitions_folder(tmp_path):
    callback = CheckpointWithFolderProperty(dirpath=tmp_path / "of_the_run")
    trainer = L.Trainer(callbacks=[callback], logger=False, accelerator="cpu")
    folder = tmp_path / "of_the_coalition"

    write_into(str(folder), trainer)

    assert callback.target == str(folder)
