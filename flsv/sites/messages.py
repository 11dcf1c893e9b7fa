"""Messages between the server and the sites, and the checks of a site's replies."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flsv.core import ClientUpdate, Instruction, Numbers, Traffic
from flsv.core.parameter_space import ParameterSpace
from flsv.core.responses import LARGEST_NUMBER
from flsv.core.state import GLOBAL_MODEL
from flsv.sites.requests import TRAINING_LOSS
from flsv.utilities.atomic_files import replacing
from flsv.utilities.errors import ConfigurationError, Refused
from flsv.utilities.plain_values import digest

#: Names of a packet's tensors: that of the initial model, and the prefixes of other tensors and of reports.
START_NAME = "start"
SENT_PREFIX = "sent/"
REPORT_PREFIX = "report/"
#: Largest number of characters of a site's error that a message shows.
_MAX_REASON_LENGTH = 600
#: Largest number of clients, rounds or classes in a message, which decide what a site computes and stores.
MAX_COUNT = 10**6
#: Largest number of clients times rounds. A site that is asked for its steps in the whole fit draws all cohorts.
MAX_TRAININGS = 10**7
#: Causes of errors that a site tells the server, since they do not depend on samples. They may be temporary.
_CAUSE_BY_ERROR: Mapping[type[Exception], str] = {
    MemoryError: "it is out of memory",
    torch.OutOfMemoryError: "it is out of memory",
    PermissionError: "it has no permission for a file",
    FileNotFoundError: "a file is missing",
    ConnectionError: "a connection has failed",
}
_CAUSE_BY_NUMBER = {
    errno.ENOSPC: "no space is left on its disk",
    errno.EDQUOT: "no space is left on its disk",
    errno.EMFILE: "it has too many open files",
    errno.ENFILE: "it has too many open files",
    errno.EROFS: "its disk is read-only",
    errno.EISDIR: "a folder is in the place of a file",
    errno.ENOTDIR: "a file is in the place of a folder",
    errno.EEXIST: "a file is in the place of a folder",
}
_PLAIN_TYPES = (str, int, float, bool, type(None))
#: Dtypes that hold numbers. Operations on tensors of any other dtype raise errors.
_NUMBER_TYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128, torch.bool,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
)  # fmt: skip


@dataclass(frozen=True)
class Packet:
    """One message between server and site.

    Args:
        kind: the kind of message, such as ``"train"``.
        plain: values of JSON's types, by name.
        tensors: dense tensors of numbers, by name, each of which has all its entries in memory.

    Raises:
        ValueError: an argument has the wrong type, or a tensor has more entries than bytes that came.
    """

    kind: str
    plain: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or not isinstance(self.plain, Mapping):
            raise ValueError(
                f"a packet needs a text as its kind and named values, but got {self.kind!r:.40} and {self.plain!r:.40}."
            )
        for name, tensor in self.tensors.items():
            is_strided = isinstance(tensor, Tensor) and tensor.layout == torch.strided
            is_dense = is_strided and not tensor.is_meta
            if not isinstance(name, str) or not is_dense or tensor.dtype not in _NUMBER_TYPES:
                raise ValueError(
                    f"the packet's tensor {name!r:.40} is not a dense tensor of numbers."
                )
            # One entry can be expanded to any shape, and would be as large as that in a copy.
            if tensor.nbytes > tensor.untyped_storage().nbytes():
                raise ValueError(
                    f"the packet's tensor {name!r:.40} has the shape {list(tensor.shape)}, but fewer entries in memory."
                )

    @cached_property
    def digest(self) -> bytes:
        """Return the SHA-256 hash of all fields."""
        return digest([getattr(self, field.name) for field in fields(self)])


def save_packet(path: Path, packet: Packet) -> None:
    """Write a packet into a file that only the user of this process can read."""
    with replacing(path, private=True) as file:
        parts = packet.kind, dict(packet.plain), dict(packet.tensors)
        torch.save(parts, file)


def load_packet(path: Path) -> Packet | None:
    """Read a packet from the file of :func:`save_packet`, None if there is no file."""
    if not path.is_file():
        return None
    kind, plain, tensors = torch.load(path, map_location="cpu", weights_only=True)
    return Packet(kind, plain, tensors)


def printable(text: object) -> str:
    """Replace characters that are not printable, such as a site's line breaks and terminal codes, by question marks."""
    return "".join(c if c.isprintable() else "?" for c in str(text))


class BadReply(ValueError):
    """Error: a site's reply is not valid in this federation. Its text is printable."""

    def __init__(self, text: str) -> None:
        super().__init__(printable(text))


class PermanentFailure(BadReply):
    """Error: a site cannot take part, and another attempt would fail in the same way."""


#: Errors that may be raised while a reply with unexpected content is read. They include :class:`BadReply`.
GARBLED_REPLY_ERRORS = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)


def describe_error(error: Exception) -> str:
    """Describe what is wrong with a site's reply, given the error that was raised while it was read."""
    if isinstance(error, BadReply):
        return str(error)
    return printable(
        f"its reply cannot be read because of a missing or invalid value: {error!s:.200}"
    )


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    # The receiving process may not have the same devices. A packet's tensors have all their entries in memory.
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def instruction_packet(
    instruction: Instruction, info: Mapping[str, Any], kind: str = "train"
) -> Packet:
    """Make the packet in which the server sends an instruction to a site."""
    plain = {
        "round": instruction.round_index,
        "client": instruction.client_id,
        "seed": instruction.seed,
        **info,
    }
    tensors = {SENT_PREFIX + name: tensor for name, tensor in instruction.tensors.items()}
    if instruction.start is not None:
        tensors[START_NAME] = instruction.start
    return Packet(kind, plain, on_cpu(tensors))


def read_instruction(packet: Packet, device: Any = "cpu") -> Instruction:
    """Read the server's instruction from a packet at a site."""
    start_model = None
    other_tensors = {}
    for name, tensor in packet.tensors.items():
        if name == START_NAME:
            start_model = tensor.to(device)
        elif name.startswith(SENT_PREFIX):
            other_tensors[name.removeprefix(SENT_PREFIX)] = tensor.to(device)
    plain = packet.plain
    return Instruction(
        round_index=plain["round"],
        client_id=plain["client"],
        seed=plain["seed"],
        start=start_model,
        tensors=other_tensors,
    )


def check_request(packet: Packet) -> None:
    """Raise Refused if a message names a client, a round or a number of classes that its run does not have."""
    plain = packet.plain
    try:
        clients = checked_int(plain, "clients", maximum=MAX_COUNT, minimum=1)
        checked_int(plain, "client", maximum=clients - 1)
        if plain.get("classes") is not None:
            checked_int(plain, "classes", maximum=MAX_COUNT, minimum=1)
        is_greeting = packet.kind == "handshake"
        if is_greeting and "rounds" not in plain:
            return
        max_rounds = min(MAX_COUNT, MAX_TRAININGS // clients)
        rounds = checked_int(plain, "rounds", maximum=max_rounds, minimum=1)
        if is_greeting:
            return
        # Requests after the last round have the number after the last round's.
        last_round = rounds - 1 if packet.kind == "train" else rounds
        checked_int(plain, "round", maximum=last_round)
    except GARBLED_REPLY_ERRORS as error:
        raise Refused(f"the server's message is not valid: {error!s:.200}") from error


def check_shapes(packet: Packet, num_parameters: int) -> None:
    """Raise Refused if an empty tensor has a dimension longer than a model, which no request has.

    The dimensions of all other tensors are bounded by the bytes of the message.
    """
    for name, tensor in packet.tensors.items():
        if tensor.numel() == 0 and max(tensor.shape) > num_parameters:
            raise Refused(
                f"the server's message has an empty tensor {name!r:.40} of the shape {list(tensor.shape)!r:.80}, but "
                f"the model has {num_parameters} numbers"
            )


def check_model(packet: Packet) -> None:
    """Raise Refused if a private site cannot train the model that it was sent."""
    model = global_model(read_instruction(packet))
    if model is None or not bool(model.isfinite().all()):
        raise Refused("the model in the server's message is missing or not finite")


def global_model(instruction: Instruction) -> Tensor | None:
    """Return the global model ``[P]`` in an instruction, if the server has sent it."""
    return instruction.tensors.get(GLOBAL_MODEL, instruction.start)


def update_packet(
    update: ClientUpdate, state: str, lost: bool = False, withheld: Sequence[str] = ()
) -> Packet:
    """Make the packet that sends a site's update, after which the site is in the state of the name ``state``. ``lost``:
    the site has lost its earlier state. ``withheld``: scores that it does not report."""
    loss = update.loss
    if TRAINING_LOSS in withheld:
        loss = float("nan")
    plain = {
        "samples": update.num_samples,
        "loss": loss,
        "steps": update.num_steps,
        "traffic": list(update.traffic or Traffic(0, 0.0)),
        "lost": lost,
        "withheld": list(withheld),
        "state": state,
    }
    tensors = {REPORT_PREFIX + name: value for name, value in update.reports.items()}
    tensors["vector"] = update.vector
    return Packet("update", plain, on_cpu(tensors))


def failure_packet(error: BaseException) -> Packet:
    """Make the packet that reports an error at a site."""
    # The error's class, line and text may depend on samples. The text of a Refused error does not.
    cause = named_cause(error)
    text = getattr(error, "without_data", None)
    if text is None:
        text = f"{cause or 'it failed with an error'}; the site's own log has the details"
    return failed(text, is_permanent=cause is None)


def failed(reason: str, is_permanent: bool = False) -> Packet:
    """Make the packet that stands for a reply that a site cannot give, or that has not arrived. ``is_permanent``:
    another attempt would fail in the same way.
    """
    return Packet("failed", {"error": reason, "permanent": is_permanent})


def named_cause(error: BaseException) -> str | None:
    """Return the cause of an error if a site may tell it."""
    for kind, cause in _CAUSE_BY_ERROR.items():
        if isinstance(error, kind):
            return cause
    number: Any = getattr(error, "errno", None)
    return _CAUSE_BY_NUMBER.get(number)


def describe_reports(update: ClientUpdate) -> str:
    reports = sorted(update.reports.items())
    descriptions = [f"{name:.40} {list(value.shape)} of {value.dtype}" for name, value in reports]
    return ", ".join(descriptions) or "nothing"


def check_done(reply: Packet) -> Packet:
    """Return a site's reply if it has not failed. Raise BadReply otherwise."""
    if reply.kind == "failed":
        reason = str(reply.plain.get("error"))[:_MAX_REASON_LENGTH]
        if reply.plain.get("permanent") is True:
            raise PermanentFailure(reason)
        raise BadReply(reason)
    return reply


def read_update(
    packet: Packet,
    client: int,
    space: ParameterSpace,
    device: torch.device,
    num_announced: int,
    max_steps: int,
) -> ClientUpdate | None:
    """Read a site's update from its reply. It must have ``num_announced`` samples and at most ``max_steps`` steps.
    Return None if the site's model is not finite."""
    if packet.kind == "broken":
        return None  # the site itself has found that its model is not finite
    try:
        update = _received_update(packet, client, _max_numbers(space), max_steps)
    except GARBLED_REPLY_ERRORS as error:
        raise BadReply(describe_error(error)) from error
    _check_update(update, space, num_announced)

    # Values that are finite in float64 may overflow in this conversion, so they are checked after it.
    vector = update.vector.detach().to(device, space.dtype)
    reports = _reports_in(packet, device)
    for tensor in (vector, *reports.values()):
        if not tensor.isfinite().all():
            return None
    return replace(update, vector=vector, reports=reports)


def _max_numbers(space: ParameterSpace) -> int:
    return 2 * space.size + 64


def _received_update(
    packet: Packet,
    client: int,
    max_numbers: int,
    max_steps: int,
) -> ClientUpdate:
    plain = packet.plain
    vector = packet.tensors["vector"]
    num_samples = checked_int(plain, "samples", maximum=float("inf"))
    num_steps = checked_int(plain, "steps", maximum=max_steps)
    loss = float(plain["loss"])
    numbers, num_bytes = plain["traffic"]
    # A check needs a name for its error.
    num_numbers = checked_int({"traffic": numbers}, "traffic", maximum=max_numbers)
    return ClientUpdate(
        client,
        num_samples,
        vector=vector,
        loss=loss,
        num_steps=num_steps,
        traffic=Traffic(num_numbers, float(num_bytes)),
    )


def _reports_in(packet: Packet, device: torch.device) -> dict[str, Tensor]:
    reports = {}
    for name, tensor in packet.tensors.items():
        if name.startswith(REPORT_PREFIX):
            reports[name.removeprefix(REPORT_PREFIX)] = tensor.detach().to(device)
    return reports


def _check_update(update: ClientUpdate, space: ParameterSpace, num_announced: int) -> None:
    """Raise BadReply if an update's number of samples, loss, traffic or shape cannot be right."""
    if update.num_samples != num_announced:
        raise BadReply(
            f"it has trained on {update.num_samples} samples, but it had announced {num_announced}. Start the server "
            "again"
        )
    traffic = update.traffic or Traffic()
    if abs(update.loss) > LARGEST_NUMBER or not 0 <= traffic.bytes <= 16 * _max_numbers(space):
        raise BadReply(f"its loss {update.loss} or its traffic {traffic} is out of range")
    vector = update.vector
    if vector.shape != (space.size,) or not vector.is_floating_point():
        raise BadReply(
            f"its model has the shape {list(vector.shape)} and the dtype {vector.dtype}, but the federation's model "
            f"has the shape [{space.size}]"
        )


def name_of_function(function: Callable[..., Any]) -> str:
    """Return the name by which a site imports a function, ``"package.module:function"``."""
    name = f"{function.__module__}:{function.__qualname__}"
    if "<" in name or "." in function.__qualname__:
        raise ConfigurationError(
            f"{name} cannot run at a site, which can import only functions at the top level of a module. Define it "
            "there."
        )
    return name


def read_response(reply: Packet, expected: Numbers) -> tuple[Any, str]:
    """Read a function's result from a site's reply. Return it, and the name of the state in which the site now is."""
    packet = check_done(reply)
    result = unpack(packet.plain["result"], packet.tensors)
    try:
        expected.check(result)
    except ValueError as error:
        raise BadReply(f"its result is wrong: {error}") from error
    return result, read_state_name(packet)


def read_state_name(packet: Packet) -> str:
    """Read from a site's reply the name of the state in which the site now is."""
    state = packet.plain.get("state")
    if not isinstance(state, str) or not re.fullmatch(r"[0-9a-f]{64}", state):
        raise BadReply(f"its state has the name {state!r:.80}, expected 64 hexadecimal digits")
    return state


def checked_int(
    plain: Mapping[str, Any],
    name: str,
    maximum: float,
    minimum: int = 0,
) -> int:
    """Return the value ``plain[name]`` if it is a whole number from ``minimum`` to ``maximum``.

    Example:
        >>> checked_int({"steps": 3}, "steps", maximum=3)
        3
        >>> checked_int({"steps": 4}, "steps", maximum=3)
        Traceback (most recent call last):
            ...
        ValueError: 'steps': 4 (expected a whole number from 0 to 3)
    """
    value = plain[name]
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(
            f"{name!r}: {value!r:.40} (expected a whole number from {minimum} to {maximum})"
        )
    return value


def pack(value: Any) -> tuple[Any, dict[str, Tensor]]:
    """Split a value into plain values, of JSON's types, and tensors by name.

    Example:
        >>> import torch
        >>> plain, tensors = pack({"a": [1, torch.tensor(2.0)], "b": (None, "x")})
        >>> plain
        {'dict': [['a', {'list': [1, {'tensor': '0'}]}], ['b', {'tuple': [None, 'x']}]]}
        >>> unpack(plain, tensors)
        {'a': [1, tensor(2.)], 'b': (None, 'x')}
    """
    tensors: dict[str, Tensor] = {}
    plain = _pack_into(tensors, value)
    return plain, tensors


def _pack_into(tensors: dict[str, Tensor], value: Any) -> Any:
    # Tensors of the value are added to `tensors`, and numbered in this order.
    if isinstance(value, _PLAIN_TYPES):
        return value
    if isinstance(value, Tensor):
        return {"tensor": _add_numbered(tensors, value.detach())}
    if isinstance(value, torch.Generator):
        return {"generator": _add_numbered(tensors, value.get_state())}
    if isinstance(value, Mapping):
        has_plain_keys = all(isinstance(key, str | int) for key in value)
        if has_plain_keys:
            pairs = [[key, _pack_into(tensors, part)] for key, part in value.items()]
            return {"dict": pairs}
    if type(value) in (list, tuple):
        parts = [_pack_into(tensors, part) for part in value]
        return {type(value).__name__: parts}
    raise ConfigurationError(
        f"A value of type {type(value).__name__} cannot be sent to another process. Use numbers, texts, tensors, and "
        "lists, tuples and dictionaries of these."
    )


def _add_numbered(tensors: dict[str, Tensor], tensor: Tensor) -> str:
    name = str(len(tensors))
    tensors[name] = tensor
    return name


def unpack(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Restore a value from the plain values and tensors of :func:`pack`.

    Raises:
        ValueError: they were not made by :func:`pack`, which names each tensor once.
    """
    return _unpack_from(dict(tensors), plain)


def _unpack_from(unused_tensors: dict[str, Tensor], plain: Any) -> Any:
    # Tensors of the value are removed from `unused_tensors`: a text that names one a million times would become a
    # value of a million models.
    if isinstance(plain, _PLAIN_TYPES):
        return plain
    if isinstance(plain, Mapping) and len(plain) == 1:
        # The only item: the value's type, and its parts.
        kind, content = next(iter(plain.items()))
        if kind == "tensor" and content in unused_tensors:
            return unused_tensors.pop(content).detach()
        if kind == "generator" and content in unused_tensors:
            return torch.Generator().set_state(unused_tensors.pop(content))
        if kind in ("list", "tuple") and isinstance(content, Sequence):
            values = [_unpack_from(unused_tensors, part) for part in content]
            return values if kind == "list" else tuple(values)
        if kind == "dict" and isinstance(content, Sequence):
            return {key: _unpack_from(unused_tensors, part) for key, part in content}
    raise ValueError(f"{plain!r:.200} has not been made by `pack`.")
