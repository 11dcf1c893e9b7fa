"""Conversations of the server with several sites at once, in which all sites work on their answers at the same time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from flsv.core import Client
from flsv.engines.remote.messages import Packet, Reply

T = TypeVar("T")


class Ended(BaseException):
    """End of a conversation because another one has failed. Not an Exception, which the conversation could handle."""


class Conversation:
    """A conversation with one site, in a thread that stands still between a question and its answer.

    The thread has its caller's context variables, grad mode, inference mode and CUDA device, but no autocast and no
    default device.
    """

    def __init__(self, site: int, talk: Callable[[], Any]) -> None:
        self.site = site
        self.question: Packet | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._reply: Reply | None = None
        self._is_ended = False
        self._may_resume = threading.Semaphore(0)
        self._is_paused = threading.Semaphore(0)
        context = contextvars.copy_context()
        grad_mode = torch.is_grad_enabled()
        inference_mode = torch.is_inference_mode_enabled()
        if torch.cuda.is_initialized():
            device = torch.cuda.current_device()
        else:
            device = -1  # none

        def run_in_thread() -> None:
            self._may_resume.acquire()
            try:
                with (
                    torch.cuda.device(device),
                    torch.inference_mode(inference_mode),
                    torch.set_grad_enabled(grad_mode),
                ):
                    if not self._is_ended:
                        self.result = context.run(talk)
            except Ended:
                pass
            except BaseException as error:  # raised again in the caller's thread
                self.error = error
            finally:
                self.question = None
                self._is_paused.release()

        self.thread = threading.Thread(target=run_in_thread, daemon=True)
        self.thread.start()

    def go_on(self, answer: Reply | None = None) -> None:
        """Hand over an answer, and let the thread run up to its next question or its end."""
        self._reply = answer
        self._may_resume.release()
        self._is_paused.acquire()

    def ask(self, question: Packet) -> Reply:
        """Ask a question, in the conversation's thread."""
        if self._is_ended:
            raise Ended
        self.question = question
        self._is_paused.release()
        self._may_resume.acquire()
        if self._is_ended:
            raise Ended
        assert self._reply is not None
        return self._reply

    def end(self) -> None:
        """Leave the conversation where it is."""
        self._is_ended = True
        if self.thread.is_alive():
            self._may_resume.release()
        self.thread.join()


class Conversations:
    """Conversations of which one runs at a time, and whose questions of one step are one exchange.

    Args:
        exchange: function that sends ``{site: packet}``, and returns each site's reply.
    """

    def __init__(self, exchange: Callable[[Mapping[int, Packet]], dict[int, Reply]]) -> None:
        self._exchange = exchange
        self._running: dict[threading.Thread, Conversation] = {}

    def ask(self, site: int, packet: Packet) -> Reply:
        """Send a packet to a site, and return its reply, or the reason why there is none."""
        conversation = self._running.get(threading.current_thread())
        if conversation is None:
            return self._exchange({site: packet})[site]
        if site != conversation.site:
            raise RuntimeError(
                f"site {site} was asked within a conversation with site {conversation.site}."
            )
        return conversation.ask(packet)

    def hold_conversations(self, talk: Callable[[Client], T], clients: Sequence[Client]) -> list[T]:
        """Return ``[talk(client) for client in clients]``. Each ``talk`` may ask its own client only."""
        client_ids = {client.id for client in clients}
        is_repeated = len(client_ids) < len(clients)
        is_within_another = threading.current_thread() in self._running
        if len(clients) < 2 or is_repeated or is_within_another:
            return [talk(client) for client in clients]

        conversations = {}
        try:
            for client in clients:
                conversation = Conversation(client.id, partial(talk, client))
                self._running[conversation.thread] = conversation
                conversations[client.id] = conversation
            self._take_turns(conversations)
        finally:
            for conversation in conversations.values():
                conversation.end()
                del self._running[conversation.thread]
        return [conversation.result for conversation in conversations.values()]

    def _take_turns(self, conversations: Mapping[int, Conversation]) -> None:
        # Without an answer each conversation begins.
        answers: Mapping[int, Reply | None] = dict.fromkeys(conversations)
        while answers:
            for site, answer in answers.items():
                conversation = conversations[site]
                # This sets its next question, or at its end the result or error.
                conversation.go_on(answer)
                if conversation.error is not None:
                    raise conversation.error

            questions = {}
            for site, conversation in conversations.items():
                question = conversation.question
                conversation.question = None
                if question is not None:
                    questions[site] = question
            answers = {}
            if questions:
                replies = self._exchange(questions)
                answers = {site: replies[site] for site in questions}
