"""client_app: a Lightning project as a site of a federation on Flower."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from flsv.engines.flower.records import from_record, to_record
from flsv.engines.remote import Site
from flsv.engines.remote.messages import failure_packet
from flsv.engines.remote.site import Settings
from flsv.errors import ConfigurationError

_log = logging.getLogger(__name__)


def client_app(
    make_module: Callable[[], L.LightningModule],
    make_datamodule: Callable[[Mapping[str, Any]], L.LightningDataModule],
    make_loop: Callable[[], Settings],
    *,
    trainer: Mapping[str, Any] | None = None,
    questions: Sequence[str] = (),
    mods: Sequence[Callable[..., Any]] = (),
) -> ClientApp:
    """A Flower ClientApp around a LightningModule and a data module.

    A SuperNode is started with ``--node-config 'site="Boston" folder="/data/boston"'``: ``site`` is its name in the
    federation, ``folder`` where it keeps what it needs between rounds (default: ``flsv-sites`` in its working folder);
    whatever else is there is for ``make_datamodule``.

    Args:
        make_module: makes the LightningModule, the same as the server's.
        make_datamodule: makes the site's own data, from the node's configuration.
        make_loop: makes the :class:`flsv.FederatedLoop` that says what happens at clients, the same as the server's.
        trainer: arguments of the Trainer that trains here, such as ``{"accelerator": "gpu"}``.
        questions: functions that the server may ask for beside flsv's own, as ``"package.module:function"``.
        mods: Flower's mods. Not those of secure aggregation.

    Raises:
        ConfigurationError: a mod of secure aggregation: of sums no contribution of a single site can be told.

    Example:
        >>> from flsv import ClassifierClient, FederatedLoop
        >>> def make_module():
        ...     return ClassifierClient("mlp", num_classes=10, input_shape=(1, 8, 8))
        >>> app = client_app(make_module, lambda node: MyData(node["data"]), FederatedLoop)
    """
    hiding = [name for mod in mods if (name := getattr(mod, "__name__", "")) in ("secagg_mod", "secaggplus_mod")]
    if hiding:
        raise ConfigurationError(
            f"{hiding[0]} lets only sums of updates reach the server, and every metric and aggregator of flsv looks at "
            "single ones. Leave it out, or average without contributions in Flower's own SecAggPlusWorkflow."
        )
    app = ClientApp(mods=list(mods))
    sites: dict[str, Site] = {}

    def site(node_config: Mapping[str, Any]) -> Site:
        name = site_name(node_config)
        if name not in sites:
            folder = Path(str(node_config.get("folder", "flsv-sites")))
            data = make_datamodule(node_config)
            sites[name] = Site(name, make_module, lambda: data, make_loop, folder, trainer, questions)
        return sites[name]

    def reply(message: Message, context: Context) -> Message:
        try:
            answer = site(context.node_config).answer(from_record(message.content))
        except Exception as error:  # else Flower would send what it says, which may be of the samples
            _log.exception("this site could not be made")
            answer = failure_packet(error)
        return Message(content=to_record(answer), reply_to=message)

    for register in (app.train(), app.query(), app.evaluate()):
        register(reply)
    return app


def site_name(node_config: Mapping[str, Any]) -> str:
    """The name that the SuperNode was started with.

    Raises:
        ConfigurationError: it was told nothing.
    """
    name = node_config.get("site")
    if not isinstance(name, str):
        raise ConfigurationError(
            f"the SuperNode's configuration names no site, it is {dict(node_config)}. Start it with "
            "--node-config 'site=\"Boston\"'."
        )
    return name
