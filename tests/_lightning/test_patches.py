"""Patched attributes leave no trace."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

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


def test_an_instance_s_own_function_stays_its_own() -> None:
    owner = SimpleNamespace(say=lambda: "mine", number=1)
    patched = PatchedAttributes([(owner, "say", None), (owner, "number", 2)])
    patched.give_back()
    assert owner.say() == "mine"
    assert owner.number == 1


def test_a_class_inherits_again() -> None:
    class Child(Speaks):
        pass

    patched = PatchedAttributes([(Child, "say", lambda self: "no")])
    assert Child().say() == "no"
    patched.give_back()
    assert Child().say() == "yes"
    assert "say" not in vars(Child)
