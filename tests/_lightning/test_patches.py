"""Patched attributes leave no trace."""

from __future__ import annotations

import pickle

from flsv._lightning.patches import PatchedAttributes


class Speaks:
    word = "yes"

    def say(self) -> str:
        return self.word


def test_a_method_is_its_class_s_again() -> None:
    speaker = Speaks()
    patched = PatchedAttributes([(speaker, "say", lambda: "no"), (speaker, "word", "maybe")])
    assert (speaker.say(), speaker.word) == ("no", "maybe")
    patched.give_back()
    assert (speaker.say(), speaker.word) == ("yes", "yes")
    assert "say" not in vars(speaker)
    assert pickle.loads(pickle.dumps(speaker)).say() == "yes"
