"""ClientAlgorithm: base class of algorithms that change how a client trains, without changes to its module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from flsv._lightning.patches import discarded_logs, metric_states, put_metric_states
from flsv._lightning.private import trainer_of
from flsv.core import Instruction, LocalData
from flsv.core.parameter_space import ParameterSpace
from flsv.core.strategy import Strategy
from flsv.training.module_state import kept_state
from flsv.training.training_step import step_arguments, training_loss
from flsv.utilities.errors import ConfigurationError
from flsv.utilities.seeding import generator_for, isolated_rngs

_END_OF_BATCHES = object()


#: The name of the model ``[P]`` that a server sends if proximal gradients pull toward another model than the client has
#: started from.
ANCHOR = "anchor"
#: Function from a layer's positional arguments and its output to a scalar.
Term = Callable[[tuple[Any, ...], Any], Tensor]


class LossTerm:
    """Term of a loss that is computed from a layer's latest call."""

    def __init__(self, term: Term, layer: nn.Module) -> None:
        self._term = term
        self._layer = layer
        self._latest_call: tuple[tuple[Any, ...], Any] | None = None

    def watch(self) -> RemovableHandle:
        """Watch the layer's calls until the handle is removed."""
        return self._layer.register_forward_hook(self._note_call)

    def _note_call(self, layer: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        self._latest_call = (arguments, output)

    def value(self) -> Tensor:
        """Compute the term from the latest call, which is then forgotten with its graph."""
        if self._latest_call is None:
            raise ConfigurationError(
                f"the client algorithm computes a loss term from a call of {type(self._layer).__name__}, but "
                "training_step does not call this layer. Call it there, as in self(x), or choose another algorithm."
            )
        arguments, output = self._latest_call
        self._latest_call = None
        return self._term(arguments, output)


class ClientContext:
    """One client's training in one round, as a client algorithm sees it.

    Attributes:
        instruction: the server's message to the client.
        local: the client's own data.
        state: tensors that the client keeps between rounds, by name.
        start: ``[P]``, the model that the client started from, of all shared parameters and buffers.
        num_steps: number of optimizer steps so far. A step that takes another optimizer's step counts once.
        lr_sum: sum of the learning rates of these steps.
        optimizer: the optimizer that takes the present step. None before the first step.
        module: the module in which the client trains.
        samples: the client's number of training samples.
        batches: number of batches that the client trains on in the round.
        position: number of batches so far.
        lengths: number of batches of each local epoch. The last one may be shorter.
        epoch_batches: number of batches of a whole local epoch, at least 1.
        epoch: the local epoch, from 0, of the present step.
        broken: whether training has failed, or its result is not finite.
        trained: ``[P]``, the model that the client has trained. None before the end.
        sent: ``[P]``, the model that the client sends, after the uploads (attacks, noise, compression). None before the
            end. Compute reports from this model: those of ``trained`` would reveal what noise hides.
        upload: ``upload(vector, start, name)`` applies the uploads to another model ``[P]`` of this client, trained
            from ``start``, and keeps their state under ``name``. Before the end of training it changes nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        space: ParameterSpace,
        instruction: Instruction,
        local: LocalData,
        initial_model: Tensor,
        samples: int = 0,
        lengths: Sequence[int] = (),
    ) -> None:
        self.module = module
        self.space = space
        self.instruction = instruction
        self.local = local
        self.state = local.state
        self.start = initial_model
        self.samples = samples
        self.lengths = lengths
        self.batches = sum(lengths)
        self.epoch_batches = max([1, *lengths])

        # Progress of the training.
        self.epoch = 0
        self.position = 0
        self.optimizer: Any = None
        self.num_steps = 0
        self.lr_sum = 0.0
        self.loss = initial_model.new_zeros(())  # summed over its batches
        self.broken = False

        # Results.
        self.trained: Tensor | None = None
        self.sent: Tensor | None = None
        self.upload: Callable[[Tensor, Tensor, str], Tensor] = _upload_unchanged

        self._names: dict[Tensor, str] = {}  # of the shared parameters
        for name, parameter in module.named_parameters():
            if name in space.names:
                self._names[parameter] = name
        self._streams: dict[str, Iterator[Any]] = {}
        self._frozen_modules: dict[str, nn.Module] = {}
        self.loss_terms: list[LossTerm] = []  # of the present batch
        self._num_second_steps = 0  # calls of `step`

    @property
    def num_parameters(self) -> int:
        """Return how many of a model vector's first elements are parameters. Buffers follow them."""
        return self.space.num_parameters

    def received(self, name: str) -> Tensor:
        """Return the tensor that the server sent to the client under ``name``."""
        return self.instruction.tensors[name]

    def unflatten(self, vector: Tensor, parameters: list[Tensor]) -> list[Tensor]:
        """Split a vector into one tensor per parameter, in the parameter's shape and dtype: a view of the vector, or a
        copy where the dtype differs.

        Args:
            vector: a vector ``[P]``, or only its first ``num_parameters`` elements.
            parameters: the shared parameters to return tensors for.
        """
        views = self.space.unflatten(vector)
        return [views[self._names[parameter]].to(parameter.dtype) for parameter in parameters]

    def flatten(self, parameters: Sequence[Tensor], tensors: Sequence[Tensor | None]) -> Tensor:
        """Write one tensor per parameter, such as its gradient, into a new vector ``[num_parameters]``.

        Args:
            parameters: shared parameters of the client's module.
            tensors: for each of these, a tensor in its shape. None stands for zeros.

        Returns:
            The vector, with 0 for all other parameters.
        """
        vector = self.start.new_zeros(self.num_parameters)
        views = self.space.unflatten(vector)
        for parameter, tensor in zip(parameters, tensors):
            if tensor is None:
                continue
            if tensor.is_sparse:
                tensor = tensor.to_dense()
            view = views[self._names[parameter]]
            view.copy_(tensor)
        return vector

    def is_shared(self, parameter: Tensor) -> bool:
        """Return whether a parameter is shared with the server, as part of the model's vector."""
        return parameter in self._names

    def shared(
        self, parameters: list[Tensor], gradients: list[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return two lists: the ``parameters`` that are shared with the server, and their ``gradients``."""
        shared_parameters = []
        shared_gradients = []
        for parameter, gradient in zip(parameters, gradients):
            if self.is_shared(parameter):
                shared_parameters.append(parameter)
                shared_gradients.append(gradient)
        return shared_parameters, shared_gradients

    def own_model(self, name: str) -> Tensor:
        """Return a model ``[P]`` that the client trains beside the federation's model (Ditto's personal model).

        Change it in place: the client's state keeps it under ``name``, and it is saved with the run. At first it is a
        copy of the model that the client started from."""
        if name not in self.state:
            self.state[name] = self.start.clone()
        return self.state[name]

    def frozen_module(self, name: str, vector: Tensor) -> nn.Module:
        """Return a frozen copy of the module in evaluation mode that holds a model ``[P]``, made once for each ``name``
        in a client's training. To train, call :meth:`step`."""
        if name not in self._frozen_modules:
            self._frozen_modules[name] = self.local.module(vector)
        return self._frozen_modules[name]

    def add_loss(self, term: Term, layer: nn.Module) -> None:
        """Add a term to the present batch's loss. Call it in :meth:`ClientAlgorithm.begin_batch`.

        It is added to what ``training_step`` returns, so that gradient accumulation, precision, clipping and reported
        losses include it.

        Args:
            term: function from the layer's positional arguments and its output in ``training_step`` to a scalar.
            layer: the layer, such as the client's ``module`` for its predictions.

        Raises:
            ConfigurationError: the module steps its optimizers itself. In the batch: ``training_step`` does not call
                the layer, or returns no loss.
        """
        self._check_optimization("adds a term to the loss")
        self.loss_terms.append(LossTerm(term, layer))

    def _check_optimization(self, use: str) -> None:
        if not getattr(self.module, "automatic_optimization", True):
            raise ConfigurationError(
                f"the client algorithm {use}, which needs automatic optimization, but {type(self.module).__name__} "
                "steps its optimizers itself. Set automatic_optimization = True."
            )

    def own_batches(self, name: str) -> Iterator[Any]:
        """Return an endless iterator over the client's training batches, as ``training_step`` gets them.

        It passes over the samples again and again, apart from the Trainer's batches, each time in another random order,
        which depends on ``name``, the run's seed, the round and the client. A second call in a round returns the same
        iterator."""
        if name not in self._streams:
            self._streams[name] = self._endless_batches(name)
        return self._streams[name]

    def _endless_batches(self, name: str) -> Iterator[Any]:
        seed = self.instruction.seed
        # Random numbers are derived from the seed and this tuple.
        purpose = (name, self.instruction.round_index, self.instruction.client_id)
        for epoch in count():
            generator = generator_for(seed, *purpose, epoch)
            batches = iter(self.local.batches(generator))
            for batch_index in count():
                # Augmentation draws random numbers.
                with isolated_rngs(seed, *purpose, epoch, batch_index):
                    batch = next(batches, _END_OF_BATCHES)
                if batch is _END_OF_BATCHES:
                    break
                yield batch

    def step(self, model: Tensor, batch: Any) -> tuple[Tensor, Tensor]:
        """Compute the loss of ``model`` on a batch, and its gradient with respect to the model.

        ``training_step`` runs with ``model`` in the client's module, which is restored afterwards. Logged values are
        dropped, and random numbers come from a separate stream, so that the client's training is not affected.

        Args:
            model: ``[P]``. Its buffers (BatchNorm's statistics) are updated in place, its parameters are not.
                Parameters that are not shared with the server are those of the client's module.
            batch: the batch of :meth:`ClientAlgorithm.begin_batch`, or one of :meth:`own_batches`.

        Returns:
            The loss, a scalar, and the loss's gradient ``[num_parameters]``, 0 for parameters that are not trained.

        Raises:
            ConfigurationError: the module steps its optimizers itself, or ``training_step`` returns no loss.
        """
        self._check_optimization("runs training_step with a second model")
        module: Any = self.module
        trainer = trainer_of(module)
        if trainer is None:
            training_step = module.training_step
        else:
            training_step = trainer.strategy.training_step
        trained_parameters = [parameter for parameter in self._names if parameter.requires_grad]

        with self._restored_module():
            self.space.write(module, model)
            batch_index = self.position % self.epoch_batches  # `batch_idx` restarts per epoch
            arguments = step_arguments(module, batch, batch_index)
            loss = training_loss(training_step(*arguments))
            gradients = torch.autograd.grad(loss, trained_parameters, allow_unused=True)
            buffers = self.space.read(module)[self.num_parameters :]
            model[self.num_parameters :] = buffers  # in place, such as BatchNorm's statistics
        return loss.detach(), self.flatten(trained_parameters, gradients)

    @contextmanager
    def _restored_module(self) -> Iterator[None]:
        """Let another model use the module within this context, and restore the module and the client afterwards."""
        module = self.module
        terms_of_batch = self.loss_terms
        self.loss_terms = []  # loss terms belong to the client's own training
        states_of_metrics = metric_states(module)
        try:
            with (
                self._isolated_rngs(),
                discarded_logs(module),
                torch.enable_grad(),
                kept_state(module, self.space),  # with its patched methods
            ):
                yield
        finally:
            self.loss_terms = terms_of_batch
            put_metric_states(states_of_metrics)

    def _isolated_rngs(self) -> AbstractContextManager[None]:
        """Return a context with random numbers of its own for the next call of :meth:`step`."""
        instruction = self.instruction
        call_index = self._num_second_steps
        self._num_second_steps += 1
        # Random numbers are derived from the seed and this tuple.
        purpose = "second model", instruction.round_index, instruction.client_id, call_index
        return isolated_rngs(instruction.seed, *purpose)


def _upload_unchanged(vector: Tensor, initial_model: Tensor, name: str) -> Tensor:
    return vector


class ClientAlgorithm(Strategy):
    """Base class of client algorithms, which change how clients train, with any module, precision and optimizer.

    The methods below that take a :class:`ClientContext` are called at the client. There one object may serve many
    clients: read only constructor arguments from ``self``, and keep a client's tensors in ``context.state``.
    ``reports`` names what clients report. The methods of :class:`flsv.core.strategy.Strategy` are called at the server,
    except ``report``.

    Attributes:
        uses: the name of the client's own model (:meth:`ClientContext.own_model`) with which it predicts and is tested.
            None: the model of the personalizer or the server, see :func:`used_model`.
        only_watches: whether clients train the same models to the bit without the algorithm. Coalitions of clients
            (:class:`flsv.metrics.ShadowShapley`) are then trained without it.
    """

    uses: ClassVar[str | None] = None
    only_watches: ClassVar[bool] = False

    def check_fit(self, trainer: Any, config: Any) -> None:
        """Check a fit before its first round, at the server.

        Args:
            trainer: the trainer, with its optimizers set up.
            config: the federation's configuration, a :class:`flsv.configuration.federation_config.FederationConfig`.

        Raises:
            ConfigurationError: the algorithm cannot work with this trainer or this configuration.
        """

    def begin_client(self, context: ClientContext) -> None:
        """Prepare for a client's training in a round, before its first batch."""

    def begin_batch(self, context: ClientContext, batch: Any) -> None:
        """Prepare for a training batch. Called before each one, also with gradient accumulation.

        Args:
            context: the client's training.
            batch: the batch, as ``training_step`` gets it.
        """

    def frozen_parameters(
        self, context: ClientContext, parameters: Sequence[Tensor]
    ) -> Iterable[Tensor]:
        """Select the parameters that the next optimizer step must not change.

        Args:
            context: the client's training.
            parameters: all parameters that have a gradient, shared with the server or not.

        Returns:
            The parameters to leave as they are.
        """
        return ()

    def gradients(
        self, context: ClientContext, parameters: list[Tensor], gradients: list[Tensor]
    ) -> None:
        """Change the gradients in place, before every optimizer step and before gradient clipping. By default
        :meth:`add_proximal_gradients` changes them. Its initial parameters are those of the model :data:`ANCHOR` if the
        server has sent one, and otherwise those from which the client has started.

        Args:
            context: the client's training.
            parameters: the parameters that are shared with the server and have a gradient.
            gradients: the parameters' gradients.
        """
        anchor = context.instruction.tensors.get(ANCHOR, context.start)
        initial_parameters = context.unflatten(anchor, parameters)
        self.add_proximal_gradients(parameters, gradients, initial_parameters)

    def add_proximal_gradients(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        initial_parameters: list[Tensor],
    ) -> None:
        """Change the gradients in place, each entry by the same entries of the parameter, its gradient and its initial
        value alone, without gradients of this. Such steps can be taken for many models at once, whose tensors are
        stacked. So groups of clients train at once with an algorithm that overrides no other method of its training.

        Args:
            parameters: the parameters that are shared with the server and have a gradient.
            gradients: the parameters' gradients.
            initial_parameters: these parameters in the model that the client has started from.
        """

    def leave_client(self, context: ClientContext) -> None:
        """Undo the changes that :meth:`begin_client` made to the module.

        This is called before :meth:`end_client`, also if training has failed or its model is not finite."""

    def end_client(self, context: ClientContext) -> Mapping[str, Tensor | float]:
        """Return what the client reports to the server after its training, ``{name: value}``, by the names in
        ``reports``.

        ``context.trained`` and ``context.sent`` are set. This is not called if the trained model is not finite."""
        return {}


def used_model(
    local: LocalData, instruction: Instruction, strategies: Mapping[str, Any]
) -> Tensor | None:
    """Return the model ``[P]`` with which a client predicts and is tested. Runs at the client."""
    algorithm = strategies.get("client_algorithm")
    if algorithm is not None and algorithm.uses is not None:
        state_name = algorithm.uses  # such as a personal model that the algorithm trains
        if state_name in local.state:
            return local.state[state_name]

    personalizer = strategies.get("personalizer")
    if personalizer is None:
        return instruction.start  # the model that the client was sent
    return personalizer.receive(local, instruction)


#: What a proximal algorithm may define, too. It sends nothing if clients start from the global model, as in coalitions.
_ALLOWED_BESIDE_PROXIMAL = {"add_proximal_gradients", "send", "sends", "check_fit"}


def overrides(algorithm: ClientAlgorithm, name: str) -> bool:
    """Return whether an algorithm's class defines the method or attribute ``name`` of :class:`ClientAlgorithm`."""
    return getattr(type(algorithm), name) is not getattr(ClientAlgorithm, name)


def is_proximal(algorithm: ClientAlgorithm) -> bool:
    """Return whether an algorithm changes training by :meth:`ClientAlgorithm.add_proximal_gradients` alone."""
    if not overrides(algorithm, "add_proximal_gradients"):
        return False
    names = [name for name in dir(ClientAlgorithm) if not name.startswith("_")]
    overridden = {name for name in names if overrides(algorithm, name)}
    return overridden <= _ALLOWED_BESIDE_PROXIMAL


def is_plain_sgd(optimizers: Sequence[Any]) -> bool:
    """Return whether each step is a gradient times one learning rate, as in ``torch.optim.SGD`` without momentum."""
    if [type(optimizer) for optimizer in optimizers] != [torch.optim.SGD]:
        return False
    groups = optimizers[0].param_groups
    learning_rates = {group["lr"] for group in groups}
    has_momentum = any(group["momentum"] for group in groups)
    return len(learning_rates) == 1 and not has_momentum
