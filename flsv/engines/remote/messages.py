"""A round's two messages as packets, and what is checked before a site's reply is believed."""

from __future__ import annotations

import math
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv.engines.remote.wire import Packet
from flsv.parameters import ParameterSpace
from flsv.participants import Traffic
from flsv.round import ClientUpdate, Instruction

START, GLOBAL, TOLD, REPORT = "start", "global", "told/", "report/"


class BadReply(ValueError):
    """A site replied with something that is no update of this federation."""


def instruction_packet(instruction: Instruction, facts: dict[str, Any], global_vector: Tensor | None) -> Packet:
    """What goes down to a site.

    Args:
        instruction: of the server.
        facts: what else it is told of the federation, plain values.
        global_vector: ``[P]``, where its uploads refer to it and its start point is another.
    """
    plain = {"round": instruction.round_index, "client": instruction.client_id, "seed": instruction.seed, **facts}
    tensors = {TOLD + name: tensor for name, tensor in instruction.tensors.items()}
    if instruction.start is not None:
        tensors[START] = instruction.start
    if global_vector is not None:
        tensors[GLOBAL] = global_vector
    return Packet("train", plain, {name: tensor.detach().cpu() for name, tensor in tensors.items()})


def read_instruction(packet: Packet) -> Instruction:
    """What a site was told."""
    told = {name[len(TOLD) :]: tensor for name, tensor in packet.tensors.items() if name.startswith(TOLD)}
    plain = packet.plain
    return Instruction(plain["round"], plain["client"], plain["seed"], packet.tensors.get(START), told)


def update_packet(update: ClientUpdate, lost: bool = False) -> Packet:
    """What a site sends back.

    Args:
        update: of its model.
        lost: whether it went on from nothing, because what it should have gone on from was no longer there.
    """
    traffic = update.traffic or Traffic(0, 0.0)
    plain = {
        "samples": update.num_samples,
        "loss": update.loss,
        "steps": update.num_steps,
        "norm": update.norm,
        "traffic": [traffic.numbers, traffic.bytes],
        "lost": lost,
    }
    tensors = {REPORT + name: value for name, value in update.reports.items()}
    return Packet("update", plain, {name: t.detach().cpu() for name, t in {**tensors, "vector": update.vector}.items()})


def failure_packet(error: BaseException) -> Packet:
    """An error, by its kind and the line that it comes from, without its text."""
    places = traceback.extract_tb(error.__traceback__)
    where = f" at {Path(places[-1].filename).name}:{places[-1].lineno}" if places else ""
    return Packet("failed", {"error": f"{type(error).__name__}{where}"})


def check_done(reply: Packet | str) -> Packet:
    """A reply that is one.

    Raises:
        BadReply: why there is none.
    """
    if isinstance(reply, str):
        raise BadReply(reply)
    if reply.kind == "failed":
        raise BadReply(f"it failed with {reply.plain.get('error')!s:.200}, its own log says more")
    if reply.kind == "busy":
        raise BadReply(f"it is still at round {reply.plain.get('round')!s:.20}")
    return reply


def read_update(packet: Packet, client: int, space: ParameterSpace, device: torch.device) -> ClientUpdate | None:
    """A client's update, of what its site sent; None where its model is not finite.

    Raises:
        BadReply: what is wrong with it.
    """
    if packet.kind == "broken":
        return None
    try:
        plain, vector = packet.plain, packet.tensors["vector"]
        samples, steps = int(plain["samples"]), int(plain["steps"])
        loss, norm = float(plain["loss"]), float(plain["norm"])
        traffic = Traffic(int(plain["traffic"][0]), float(plain["traffic"][1]))
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BadReply(f"its {packet.kind!r} reply lacks or garbles {error}") from error
    if vector.shape != (space.size,) or not vector.is_floating_point():
        raise BadReply(f"its model is {list(vector.shape)} of {vector.dtype}, and the federation's has [{space.size}]")
    if samples < 1 or steps < 0 or not 0 <= traffic.numbers <= 2 * space.size + 64 or math.isinf(norm) or norm < 0:
        raise BadReply(f"its numbers cannot be: {samples} samples, {steps} steps, norm {norm}, {traffic}")
    reports = {n[len(REPORT) :]: t.to(device) for n, t in packet.tensors.items() if n.startswith(REPORT)}
    if not vector.isfinite().all() or not all(t.isfinite().all() for t in reports.values()):
        return None
    vector = vector.to(device, space.dtype)
    return ClientUpdate(client, samples, vector, loss, steps, norm, reports, traffic)
