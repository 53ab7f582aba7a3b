"""A traced module: its layers, the shapes between them, and stages made of them."""

import hashlib
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.graph import LayerGraph
from lightning_hetpipe.tracing.analysis import Chain, analyse, is_carried, is_size
from lightning_hetpipe.tracing.binding import Binding, make_binding
from lightning_hetpipe.tracing.fake import Root, State, run_fake
from lightning_hetpipe.tracing.layers import (
    Names,
    fingerprint_text,
    group,
    keepers,
    make_layers,
    make_values,
    tied_layers,
)
from lightning_hetpipe.tracing.modes import join, resolve_training_flags
from lightning_hetpipe.tracing.remedies import relative
from lightning_hetpipe.tracing.spec import TensorSpec
from lightning_hetpipe.tracing.stage import Leaf, Returns, StageModule, build_graph, pack_size
from lightning_hetpipe.tracing.tracer import follow


class Traced:
    """What `trace` returns; equal on every rank for equal modules.

    Attributes:
        module: The pipelined module itself.
        graph: Its layers and the values between them, with gradients as of the parameters'
            ``requires_grad`` when it was traced.
        input_names: Names of the tensors that calls of the module take, in order.
        trainable: Names of the parameters that required a gradient when it was traced.
    """

    def __init__(
        self,
        root: Root,
        state: State,
        binding: Binding,
        chain: Chain,
        nodes: fx.Graph,
        returns: Returns,
        outputs: Collection[fx.Node],
        example: Mapping[str, TensorSpec],
        device: torch.device,
    ) -> None:
        self.module = root.module
        self.device = device
        self.trainable = frozenset(map(relative, state.trainable))
        self._root = root
        self._state = state
        self._binding = binding
        self._chain = chain
        self._nodes = nodes
        self._returns = returns
        self._groups = group(chain)
        for layer, held in enumerate(self._groups):
            for node in held:
                node.meta["layer"] = layer
        self._crossing = make_values(nodes, self._groups, outputs)
        self._cache: dict[object, dict[str, TensorSpec]] = {}
        layers, self._uses = make_layers(root, Names(root), self._groups)
        n_samples = batch_size(example)
        self._crossing, saved = keepers(self._crossing, self._groups, chain)
        layers = [
            replace(
                layer,
                flops_per_sample=sum(map(chain.seen.flops.__getitem__, nodes)) / n_samples,
                saved_bytes_per_sample=kept / n_samples,
            )
            for layer, nodes, kept in zip(layers, self._groups, saved)
        ]
        self.graph = LayerGraph(
            layers=tuple(layers),
            values=tuple(self._crossing.values()),
            tied=tied_layers(self._uses),
            fingerprint=self._fingerprint(example),
            input_names=binding.names,
        )
        self.graph = self.with_gradients(example, self.trainable)
        self.graph = replace(self.graph, values=self._sized(example))

    @property
    def input_names(self) -> tuple[str, ...]:
        return self.graph.input_names

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Tensor]:
        """The input values of a call of the module, by name.

        Raises:
            GraphError: The call differs from the traced one in structure or in a constant.
        """
        return self._binding.bind(args, kwargs)

    def shapes(
        self,
        inputs: Mapping[str, TensorSpec],
        trainable: Collection[str] | None = None,
        *,
        context: AbstractContextManager[Any] | None = None,
        device: torch.device | None = None,
    ) -> dict[str, TensorSpec]:
        """Every value's spec for these inputs, without touching anything real.

        Works for any batch size and on partitioned modules; parameters are taken as they were when the
        module was traced.

        Args:
            inputs: One spec per input; ``requires_grad`` tells whether the reader wants a gradient.
            trainable: Names of the parameters that require a gradient now; None for those that did when
                the module was traced. Pass an empty collection for a forward without gradients.
            context: Entered meanwhile, such as ``torch.autocast("cpu", torch.bfloat16)``; without it the
                autocast state of the caller is in force.
            device: Where the values would live (autocast differs between kinds); default as traced.

        Returns:
            A spec per value of the graph. ``requires_grad`` is True where a gradient comes back.

        Raises:
            GraphError: An operation refuses the inputs, or they lead along another path than was traced.
        """
        missing = set(self.input_names) ^ set(inputs)
        if missing:
            raise GraphError(
                f"specs are given for {sorted(inputs)}, but the inputs are {list(self.input_names)}"
            )
        device = device or self.device
        names = self.trainable if trainable is None else frozenset(trainable)
        with context or nullcontext():
            autocast = torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
            key = (tuple(inputs.items()), names, autocast, device)
            if key not in self._cache:
                self._cache[key] = self._run_shapes(inputs, names, device)
        return dict(self._cache[key])

    def _run_shapes(
        self, inputs: Mapping[str, TensorSpec], trainable: Collection[str], device: torch.device
    ) -> dict[str, TensorSpec]:
        env = run_fake(
            self._root,
            self._state,
            self._nodes.nodes,
            inputs,
            device=device,
            trainable={f"module.{name}" for name in trainable},
        )
        with self._state.mode:
            specs = {
                value.name: TensorSpec.of(pack_size(env[node]) if is_size(env[node]) else env[node])
                for node, value in self._crossing.items()
            }
        return specs | dict(inputs)

    def with_gradients(self, inputs: Mapping[str, TensorSpec], trainable: Collection[str]) -> LayerGraph:
        """The graph whose values say where a gradient flows for these parameters and inputs.

        Args:
            inputs: One spec per input.
            trainable: Names of the parameters that require a gradient.
        """
        specs = self.shapes(inputs, trainable)
        values = tuple(
            replace(value, gradient=specs[value.name].requires_grad) for value in self.graph.values
        )
        return replace(self.graph, values=values)

    def stage(
        self, start: int, stop: int, device: torch.device | None = None, *, returns: bool = True
    ) -> StageModule:
        """Layers ``start`` to ``stop - 1`` as a module over the original submodules.

        Args:
            start, stop: A non-empty run of layers; or none after the last one, to take up the outputs.
            device: Where the stage runs, if the forward makes tensors on its inputs' device.
            returns: Whether the run that ends with the last layer takes up what the module returns; False
                where a run without layers follows it.

        Raises:
            GraphError: There is no such run.
        """
        n_layers = len(self.graph)
        if not (0 <= start < stop <= n_layers or start == stop == n_layers):
            raise GraphError(f"layers {start} to {stop} were asked for; the model has 0 to {n_layers}")
        last = stop == n_layers and returns
        entering: list[fx.Node] = []
        leaving: list[fx.Node] = []
        for node, value in self._crossing.items():
            inside = start <= value.producer < stop
            if not inside and (
                (last and value.output) or any(start <= layer < stop for layer in value.consumers)
            ):
                entering.append(node)
            if (last and value.output) or (
                inside and (value.output or any(layer >= stop for layer in value.consumers))
            ):
                leaving.append(node)
        nodes = [node for group in self._groups[start:stop] for node in group]
        if device is not None:
            self._move_constants(device)
        return StageModule(
            self._root,
            build_graph(self._chain, nodes, entering, leaving, device),
            tuple(node.meta["name"] for node in entering),
            tuple(node.meta["name"] for node in leaving),
            self._returns if last else None,
        )

    def parameters_of(self, start: int, stop: int) -> set[str]:
        """Names of the parameters that a run of layers uses, relative to the module; a tied one under its
        first name.
        """
        return {name for use in self._uses[start:stop] for name in use.parameters}

    def buffers_of(self, start: int, stop: int) -> set[str]:
        """Names of the buffers that a run of layers uses, likewise."""
        return {name for use in self._uses[start:stop] for name in use.buffers}

    def _move_constants(self, device: torch.device) -> None:
        for node in self._nodes.nodes:
            target = str(node.target)
            if node.op == "get_attr" and "." not in target:
                setattr(self._root, target, getattr(self._root, target).to(device))

    def _sized(self, example: Mapping[str, TensorSpec]) -> Any:
        """Values with bytes as ``fixed + per_sample * n``, from two batch sizes."""
        n_samples = batch_size(example)
        one, two = self.shapes(example), self.shapes(resized(example, 2 * n_samples))
        sized = []
        for value in self.graph.values:
            small, large = one[value.name].size_bytes, two[value.name].size_bytes
            per_sample = (large - small) / n_samples
            sized.append(
                replace(value, bytes_per_sample=per_sample, fixed_bytes=small - per_sample * n_samples)
            )
        return tuple(sized)

    def _fingerprint(self, example: Mapping[str, TensorSpec]) -> str:
        specs = {
            relative(name): f"{spec.dtype} {list(spec.shape)}"
            for name, spec in (*self._state.parameters.items(), *self._state.buffers.items())
        }
        n_samples = batch_size(example)
        for name, spec in example.items():
            batched = spec.shape[:1] == (n_samples,)
            specs[f"input {name}"] = f"{spec.dtype} {list(spec.shape[1:] if batched else spec.shape)}"
        text = fingerprint_text(self._root, self._groups, specs)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def trace(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], blocks: str | None = None
) -> Traced:
    """Turns a module into layers by following one call.

    Only the shapes of the example are used: no parameter, buffer or random state moves.

    Args:
        module: The pipelined module; whole, not yet partitioned.
        args, kwargs: An example call. Tensors become inputs, all else becomes a constant. The first
            dimension of the first tensor is the batch.
        blocks: Dotted names, separated by commas, of modules to keep whole; of an ``nn.Sequential`` or
            ``nn.ModuleList``, each item is kept whole. ``"."`` is the module itself.

    Raises:
        GraphError: The forward cannot be followed; names the construct, file, line and remedies.
    """
    binding = make_binding(module, args, kwargs)
    inputs = binding.bind(args, kwargs)
    device = next(iter(inputs.values())).device
    root = Root(module)
    state = State(root)
    leaves = _blocks(module, blocks)
    training = follow(root, state, binding, inputs, leaves, training=True)
    evaluation = follow(root, state, binding, inputs, leaves, training=False)
    evaluated = join(root, training, evaluation)
    resolve_training_flags(training.graph)
    outputs = {leaf for leaf in (*training.leaves, *evaluated) if isinstance(leaf, fx.Node)}
    example = {name: TensorSpec.of(tensor) for name, tensor in inputs.items()}
    chain = analyse(root, state, training.graph, example, device, outputs)
    returned = {chain.current(node) for node in outputs}
    returns = Returns(
        (_leaves(chain, training.leaves), training.structure),
        (_leaves(chain, evaluated), evaluation.structure),
    )
    return Traced(root, state, binding, chain, training.graph, returns, returned, example, device)


def batch_size(inputs: Mapping[str, TensorSpec]) -> int:
    """First dimension of the first input."""
    first = next(iter(inputs.values()))
    if not first.shape or first.shape[0] == 0:
        raise GraphError(f"the first input has shape {list(first.shape)}: it has no batch to divide")
    return first.shape[0]


def resized(inputs: Mapping[str, TensorSpec], n_samples: int) -> dict[str, TensorSpec]:
    """The same inputs for another batch size; inputs that are not batched stay."""
    before = batch_size(inputs)
    return {
        name: replace(spec, shape=(n_samples, *spec.shape[1:])) if spec.shape[:1] == (before,) else spec
        for name, spec in inputs.items()
    }


def _blocks(module: nn.Module, blocks: str | None) -> set[nn.Module]:
    kept: set[nn.Module] = set()
    for name in filter(None, map(str.strip, (blocks or "").split(","))):
        try:
            block = module if name == "." else module.get_submodule(name)
        except AttributeError as error:
            children = ", ".join(child for child, _ in module.named_children())
            raise GraphError(
                f"blocks={name!r} is no module of {type(module).__name__}, which has {children}: {error}"
            ) from error
        kept.update(block if isinstance(block, (nn.Sequential, nn.ModuleList)) else (block,))
    return kept


def _leaves(chain: Chain, leaves: tuple[Any, ...]) -> tuple[Leaf, ...]:
    return tuple(_leaf(chain, leaf) for leaf in leaves)


def _leaf(chain: Chain, leaf: Any) -> Leaf:
    if not isinstance(leaf, fx.Node):
        if not pytree.tree_is_leaf(leaf):
            raise GraphError(f"the module returns a {type(leaf).__name__} that cannot be taken apart")
        return Leaf(None, leaf)
    node = chain.current(leaf)
    value = node.meta["value"]
    if node.op == "get_attr" or not is_carried(value):
        raise GraphError(
            f"the module returns {node.meta['name']!r}, a {type(value).__name__}, at {node.meta['where']}: "
            "return tensors computed from the inputs, sizes and constants only"
        )
    return Leaf(node.meta["name"], value if is_size(value) else None, is_size(value))
