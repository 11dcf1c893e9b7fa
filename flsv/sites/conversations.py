"""Conversations of the server with several sites at once, in which all sites work on their replies at the same time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from flsv.core import Client
from flsv.sites.messages import Packet

T = TypeVar("T")


class Ended(BaseException):
    """End of a conversation because another one has failed. Not an Exception, which the conversation could handle."""


class Conversation:
    """Server code that exchanges messages with one site. It runs in a thread, which waits after each request.

    The thread has its caller's context variables, grad mode, inference mode and CUDA device, but no autocast and no
    default device.
    """

    def __init__(self, site: int, server_code: Callable[[], Any]) -> None:
        self.site = site
        self.request: Packet | None = None
        self.result: Any = None
        self.error: BaseException | None = None
        self._server_code = server_code
        self._reply: Packet | None = None
        self._is_ended = False
        self._resume_signal = threading.Semaphore(0)
        self._pause_signal = threading.Semaphore(0)
        self._context = contextvars.copy_context()
        self._grad_mode = torch.is_grad_enabled()
        self._inference_mode = torch.is_inference_mode_enabled()
        has_device = torch.cuda.is_initialized()
        self._device = torch.cuda.current_device() if has_device else -1  # none
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self._resume_signal.acquire()
        try:
            with (
                torch.cuda.device(self._device),
                torch.inference_mode(self._inference_mode),
                torch.set_grad_enabled(self._grad_mode),
            ):
                if not self._is_ended:
                    self.result = self._context.run(self._server_code)
        except Ended:
            pass
        except BaseException as error:  # raised again in the caller's thread
            self.error = error
        finally:
            self.request = None
            self._pause_signal.release()

    def resume(self, reply: Packet | None = None) -> None:
        """Pass the site's reply to the thread, and let the thread run until its next request or its end."""
        self._reply = reply
        self._resume_signal.release()
        self._pause_signal.acquire()

    def send(self, request: Packet) -> Packet:
        """Send a request and wait for the site's reply. The conversation's own thread calls this method."""
        if self._is_ended:
            raise Ended
        self.request = request
        self._pause_signal.release()
        self._resume_signal.acquire()
        if self._is_ended:
            raise Ended
        assert self._reply is not None
        return self._reply

    def end(self) -> None:
        """End the conversation, even if it is not complete."""
        self._is_ended = True
        if self.thread.is_alive():
            self._resume_signal.release()
        self.thread.join()


class Conversations:
    """Conversations with several sites. One of them runs at a time, and their requests are sent together.

    Args:
        exchange: function that sends ``{site: packet}``, and returns each site's reply.
    """

    def __init__(self, exchange: Callable[[Mapping[int, Packet]], dict[int, Packet]]) -> None:
        self._exchange = exchange
        self._running: dict[threading.Thread, Conversation] = {}

    def send(self, site: int, packet: Packet) -> Packet:
        """Send a packet to a site, and return its reply, a failed one if there is none."""
        conversation = self._running.get(threading.current_thread())
        if conversation is None:
            return self._exchange({site: packet})[site]
        if site != conversation.site:
            raise RuntimeError(
                f"The server has sent a request to site {site} within its conversation with site {conversation.site}, "
                "which may send requests to that site only."
            )
        return conversation.send(packet)

    def hold_conversations(
        self, server_code: Callable[[Client], T], clients: Sequence[Client]
    ) -> list[T]:
        """Return ``[server_code(client) for client in clients]``. A call may send requests to its own client only."""
        client_ids = {client.id for client in clients}
        is_repeated = len(client_ids) < len(clients)
        is_within_another = threading.current_thread() in self._running
        if len(clients) < 2 or is_repeated or is_within_another:
            return [server_code(client) for client in clients]

        conversations = {}
        try:
            for client in clients:
                conversation = Conversation(client.id, partial(server_code, client))
                self._running[conversation.thread] = conversation
                conversations[client.id] = conversation
            self._run_all(conversations)
        finally:
            for conversation in conversations.values():
                conversation.end()
                del self._running[conversation.thread]
        return [conversation.result for conversation in conversations.values()]

    def _run_all(self, conversations: Mapping[int, Conversation]) -> None:
        # Without a reply each conversation begins.
        replies: Mapping[int, Packet | None] = dict.fromkeys(conversations)
        while replies:
            requests = {}
            for site, reply in replies.items():
                conversation = conversations[site]
                conversation.resume(reply)
                if conversation.error is not None:
                    raise conversation.error
                if conversation.request is not None:
                    requests[site] = conversation.request
            replies = self._exchange(requests) if requests else {}
