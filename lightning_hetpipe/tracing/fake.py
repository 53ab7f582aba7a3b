"""Runs a graph on tensors without content: shapes, dtypes and gradients, but no arithmetic.

The module's parameters and buffers are swapped for fake ones meanwhile, so that nothing real is read,
written or needed: the real ones may live on another rank.
"""

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.fx.node import map_aggregate
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.tracing.spec import TensorSpec

_KNOWN = ("torch.nn.", "lightning_hetpipe.")
_LOG = logging.getLogger("torch._subclasses.fake_tensor")


class Root(nn.Module):
    """Holds the pipelined module under the name ``module``, and constants that tracing finds."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, body: Callable[[], Any]) -> Any:
        """Runs a function while `torch.func.functional_call` has the state swapped."""
        return body()


def keeps_shape(module: nn.Module, state: Mapping[str, Tensor], args: Any, kwargs: Any) -> bool:
    """Whether a module that looks at its data returns a tensor like the first one it is given.

    Runs it on random numbers and a copy of its state.

    Args:
        module: Its own parameters and buffers are not used.
        state: The real ones, by their names below the module.
        args, kwargs: Fake arguments.
    """

    def real(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        drawn = torch.zeros(leaf.shape, dtype=leaf.dtype, device=leaf.device)
        return drawn.normal_() if leaf.dtype.is_floating_point else drawn

    first = _first_tensor(args, kwargs)
    copies = {name: tensor.detach().clone() for name, tensor in state.items()}
    with torch.no_grad():
        result = torch.func.functional_call(
            module, copies, tuple(map(real, args)), {name: real(leaf) for name, leaf in kwargs.items()}
        )
    return isinstance(result, Tensor) and (result.shape, result.dtype) == (first.shape, first.dtype)


def like_input(module: nn.Module, args: Any, kwargs: Any) -> Tensor:
    """What a module that keeps shape and dtype returns, and what it keeps for its backward."""
    value = _first_tensor(args, kwargs)
    trainable = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in module.parameters())
    if trainable and not value.requires_grad:
        value = value.detach().requires_grad_()
    return value * value


def _first_tensor(args: Any, kwargs: Any) -> Tensor:
    return next(leaf for leaf in (*args, *kwargs.values()) if isinstance(leaf, Tensor))


class TrainingFlag(int):
    """Stands for ``module.training`` while a forward is traced; remembers whose it is."""

    path: str

    def __new__(cls, value: bool, path: str) -> "TrainingFlag":
        flag = super().__new__(cls, value)
        flag.path = path
        return flag


class State:
    """Specs of all parameters and buffers of a root, taken while they are whole."""

    def __init__(self, root: Root) -> None:
        self.parameters = {name: TensorSpec.of(tensor) for name, tensor in root.named_parameters()}
        self.buffers = {name: TensorSpec.of(tensor) for name, tensor in root.named_buffers()}
        self.trainable = frozenset(name for name, spec in self.parameters.items() if spec.requires_grad)
        _start_autograd()
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._fakes: tuple[object, dict[str, Tensor]] = (None, {})

    def fakes(self, device: torch.device, trainable: Collection[str]) -> dict[str, Tensor]:
        """One fake per name; parameters require a gradient where ``trainable`` says so."""
        key = (device, frozenset(trainable))
        if self._fakes[0] == key:
            return self._fakes[1]
        with self.mode:
            parameters = {
                name: nn.Parameter(
                    torch.empty(spec.shape, dtype=spec.dtype, device=device), requires_grad=name in trainable
                )
                for name, spec in self.parameters.items()
            }
            buffers = {
                name: torch.empty(spec.shape, dtype=spec.dtype, device=device)
                for name, spec in self.buffers.items()
            }
        self._fakes = (key, {**parameters, **buffers})
        return self._fakes[1]


def _start_autograd() -> None:
    """Lets autograd choose its threads before a fake mode pretends that there is an accelerator.

    It chooses once, at the first backward, one thread per device it sees; with any, forked ranks
    cannot compute gradients.
    """
    with torch.enable_grad(), torch.inference_mode(False):
        torch.ones((), requires_grad=True).backward()  # type: ignore[no-untyped-call]


@contextmanager
def undisturbed() -> Iterator[None]:
    """Gradients on, inference mode off, attention's fused path off, random numbers not consumed."""
    # torch logs each refused operation with its traceback; the error raised says it better.
    silent, _LOG.disabled = _LOG.disabled, True
    fast_path = torch.backends.mha.get_fastpath_enabled()
    generator = torch.get_rng_state()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        _LOG.disabled = silent
        torch.set_rng_state(generator)
        torch.backends.mha.set_fastpath_enabled(fast_path)


def run_fake(
    root: Root,
    state: State,
    nodes: Iterable[fx.Node],
    inputs: Mapping[str, TensorSpec],
    *,
    device: torch.device,
    trainable: Collection[str],
    around: Callable[[fx.Node, dict[fx.Node, Any], Callable[[], Any]], Any] | None = None,
) -> dict[fx.Node, Any]:
    """Evaluates nodes in order on fake inputs.

    Args:
        root: The graph's module; only its structure is used.
        state: Its specs.
        nodes: In execution order; each argument is a node before it.
        inputs: One spec per placeholder.
        device: Where the fakes pretend to live (autocast depends on it).
        trainable: Names of the parameters that require a gradient.
        around: Runs each node; for measuring what it does.

    Returns:
        The value of every node.

    Raises:
        GraphError: The inputs are refused by an operation, or take another path than was traced.
    """
    env: dict[fx.Node, Any] = {}

    def body() -> None:
        for node in nodes:
            if node.op == "placeholder":
                # A clone, because eager code may change in place what it was given, but not a leaf.
                env[node] = inputs[str(node.target)].empty(device).clone()
            elif node.op != "output":
                run: Callable[[], Any] = lambda node=node: evaluate(root, node, env, device)  # type: ignore[misc]  # noqa: E731
                try:
                    env[node] = run() if around is None else around(node, env, run)
                except Exception as error:
                    raise GraphError(
                        f"{node.meta['name']} ({node.meta['where']}) refuses inputs "
                        f"{_shapes(inputs)}: {error}"
                    ) from error
                check_guard(node, env[node], inputs)

    with undisturbed():
        fakes = state.fakes(device, trainable)
        with state.mode:
            torch.func.functional_call(root, fakes, (body,))
    return env


def evaluate(
    root: nn.Module, node: fx.Node, env: Mapping[fx.Node, Any], device: torch.device | None = None
) -> Any:
    """The result of one node; constants and tensors made in the forward are on a device, if one is given."""
    args, kwargs = arguments(node, env, device)
    target: Any = node.target
    with torch.set_grad_enabled(node.meta["grad"]):
        if node.op == "get_attr":
            value = attribute(root, target)
            return value if device is None or not isinstance(value, Tensor) else value.to(device)
        if node.op == "call_function":
            return target(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], target)(*args[1:], **kwargs)
        module = root.get_submodule(target)
        if isinstance(module, _BatchNorm) and type(module).__module__.startswith(_KNOWN):
            # torch decomposes a fake batch_norm in Python, at 15 ms a layer.
            return like_input(module, args, kwargs)
        try:
            return module(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not node.meta.get("keeps_shape"):
                raise
            return like_input(module, args, kwargs)


def arguments(
    node: fx.Node, env: Mapping[fx.Node, Any], device: torch.device | None = None
) -> tuple[Any, Any]:
    """What a node is called with."""
    nodes: Any = (node.args, dict(node.kwargs))
    args, kwargs = map_aggregate(nodes, lambda leaf: _plain(leaf, env, device))
    return args, kwargs


def check_guard(node: fx.Node, value: Any, inputs: Mapping[str, TensorSpec]) -> None:
    """Refuses a value that differs from the one that the traced control flow relied on."""
    if "guard" in node.meta and value != node.meta["guard"]:
        raise GraphError(
            f"inputs {_shapes(inputs)} take another path than the traced ones: at {node.meta['where']} "
            f"the forward depends on a value that was {node.meta['guard']} and is now {value}. Make the "
            f"inputs alike, or keep the deciding module whole: blocks={node.meta['scope']!r}"
        )


def attribute(root: nn.Module, path: str) -> Any:
    """What a dotted path leads to."""
    value: Any = root
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _plain(leaf: Any, env: Mapping[fx.Node, Any], device: torch.device | None) -> Any:
    if isinstance(leaf, fx.Node):
        return env[leaf]
    if isinstance(leaf, torch.device) and device is not None:
        return device
    return bool(leaf) if isinstance(leaf, TrainingFlag) else leaf


def _shapes(inputs: Mapping[str, TensorSpec]) -> str:
    return ", ".join(f"{name}{list(spec.shape)}" for name, spec in inputs.items())
