"""Follows a module's forward with torch.fx, keeping calls of torch's own modules as they are.

Every node is evaluated on fake tensors as it is made. So code that asks for a shape gets an answer
(``assert t <= self.block_size``, ``for head in x.chunk(4)``); what it decided by that answer is kept as a
guard, and inputs that would decide otherwise are refused later.
"""

import operator
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.nn.modules.batchnorm import _NormBase
from torch.utils import _pytree as pytree

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.tracing.binding import Binding
from lightning_hetpipe.tracing.fake import (
    Root,
    State,
    arguments,
    attribute,
    evaluate,
    keeps_shape,
    undisturbed,
)
from lightning_hetpipe.tracing.proxies import Proxy
from lightning_hetpipe.tracing.remedies import relative, remedy, where
from lightning_hetpipe.tracing.spec import TensorSpec
from lightning_hetpipe.tracing.surroundings import attributes_kept, patched, training_flags

# torch's own modules that are followed, so that their attention and their MLP become layers.
_OPEN = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Trace:
    """What following one forward gives.

    Attributes:
        graph: All nodes; each has ``name``, ``scope``, ``where``, ``grad`` and ``value`` in its ``meta``.
        leaves: The returned leaves: a node, or a constant.
        structure: Of the returned value.
    """

    def __init__(self, graph: fx.Graph, leaves: tuple[Any, ...], structure: pytree.TreeSpec) -> None:
        self.graph = graph
        self.leaves = leaves
        self.structure = structure


def follow(
    root: Root, state: State, binding: Binding, inputs: Mapping[str, Tensor], leaves: Collection[nn.Module],
    *, training: bool,
) -> Trace:  # fmt: skip
    """Follows the forward of ``root.module`` in one mode.

    Args:
        root: Holds the module; constants made in its forward are put there.
        state: Its specs.
        binding: How inputs become arguments.
        inputs: Real examples, of which only the specs are used.
        leaves: Modules not to look into.
        training: The mode that modules report while they are followed.

    Raises:
        GraphError: Names the construct, file and line that cannot be followed.
    """
    specs = {name: TensorSpec.of(tensor) for name, tensor in inputs.items()}
    device = next(iter(inputs.values())).device
    real_state = {
        **dict(root.named_parameters(remove_duplicate=False)),
        **dict(root.named_buffers(remove_duplicate=False)),
    }
    tracer = LayerTracer(state, binding, specs, device, leaves, real_state)
    with undisturbed(), ExitStack() as stack:
        stack.enter_context(attributes_kept(root.module, tracer))
        stack.enter_context(training_flags(root, tracer, training))
        stack.enter_context(patched(tracer))
        with state.mode:
            fakes = state.fakes(device, state.trainable)
        try:
            graph: fx.Graph = torch.func.functional_call(root, fakes, (lambda: tracer.trace(root),))
        except GraphError:
            raise
        except Exception as error:
            raise GraphError(_explain(root.module, tracer, error)) from error
    return Trace(graph, tracer.result, tracer.structure)


class LayerTracer(fx.Tracer):
    def __init__(
        self, state: State, binding: Binding, inputs: Mapping[str, TensorSpec], device: torch.device,
        leaves: Collection[nn.Module], real_state: Mapping[str, Tensor],
    ) -> None:  # fmt: skip
        super().__init__()
        self.proxy_buffer_attributes = True
        self.state = state
        self.real_state = real_state
        self.binding = binding
        self.inputs = inputs
        self.device = device
        self.leaves = leaves
        self.evaluating = False
        self.result: tuple[Any, ...] = ()
        self.structure = pytree.tree_structure(None)
        self.last: fx.Node | None = None
        self.failed = ""  # the innermost module in which an error arose
        self.names: set[str] = set()
        self.precision = _precision(device)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> Any:
        def call() -> list[Any]:
            proxies = {name: self.create_proxy("placeholder", name, (), {}) for name in self.inputs}
            args, kwargs = self.binding.unbind(proxies)
            leaves, self.structure = pytree.tree_flatten(self.root.module(*args, **kwargs))  # type: ignore[operator]
            self.result = tuple(self.create_arg(leaf) for leaf in leaves)
            return [leaf for leaf in leaves if isinstance(leaf, fx.Proxy)]

        return call, []

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        hooked = any(getattr(m, hooks) for hooks in _HOOKS)
        own = type(m).__module__.startswith("lightning_hetpipe.") or isinstance(m, torch.jit.ScriptModule)
        if m in self.leaves or hooked or own or isinstance(m, _NormBase):
            return True
        if type(m) in _OPEN:
            return False
        return super().is_leaf_module(m, module_qualified_name)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return Proxy(node, self)

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.evaluating:
            return forward(*args, **kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.submodule_paths.get(m, "")  # type: ignore[union-attr]
            raise

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return attr_val if self.evaluating else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_node(self, kind: str, target: Any, *rest: Any, **named: Any) -> fx.Node:
        node = super().create_node(kind, target, *rest, **named)
        if kind == "output":
            return node
        scope = relative(self.scope.module_path)
        node.meta |= {"scope": scope, "grad": torch.is_grad_enabled(), "where": where(), "training": None}
        node.meta["name"] = self._name(node, scope)
        self.last = node
        if _precision(self.device) != self.precision:
            raise GraphError(
                f"{node.meta['where']}: the forward switches autocast, which a traced graph cannot carry. "
                + remedy(scope)
            )
        self._evaluate(node)
        return node

    def _name(self, node: fx.Node, scope: str) -> str:
        if node.op in ("call_module", "get_attr"):
            base = relative(str(node.target))
        elif node.op == "placeholder":
            base = str(node.target)
        else:
            target = node.target if isinstance(node.target, str) else _operation(node.target)
            base = f"{scope}.{target}" if scope else target
        name = base = base or type(self.root.module).__name__
        suffix = 0
        while name in self.names:
            suffix += 1
            name = f"{base}_{suffix}"
        self.names.add(name)
        return name

    def _evaluate(self, node: fx.Node) -> None:
        if node.op == "placeholder":
            with self.state.mode:
                node.meta["value"] = self.inputs[str(node.target)].empty(self.device).clone()
            return
        if node.op == "get_attr":
            with self._quiet():
                node.meta["value"] = attribute(self.root, str(node.target))
            return
        env = _Values()
        with self._quiet():
            try:
                with self.state.mode:
                    node.meta["value"] = evaluate(self.root, node, env)
            except (DataDependentOutputException, DynamicOutputShapeException) as error:
                if node.op != "call_module":
                    raise
                self._check_keeps_shape(node, *arguments(node, env), error)
                with self.state.mode:
                    node.meta["value"] = evaluate(self.root, node, env)

    def _check_keeps_shape(self, node: fx.Node, args: Any, kwargs: Any, error: Exception) -> None:
        prefix = f"{node.target}."
        state = {
            name.removeprefix(prefix): tensor
            for name, tensor in self.real_state.items()
            if name.startswith(prefix)
        }
        module = self.root.get_submodule(str(node.target))
        if not keeps_shape(module, state, args, kwargs):
            raise GraphError(
                f"{node.meta['name']} ({node.meta['where']}) looks at its data ({error}), so its output is "
                "known only if it is one tensor of its input's shape and dtype, which it is not: keep "
                "a larger module whole, or write it without looking"
            )
        node.meta["keeps_shape"] = True

    @contextmanager
    def _quiet(self) -> Iterator[None]:
        self.evaluating, before = True, self.evaluating
        try:
            yield
        finally:
            self.evaluating = before

    def decide(self, proxy: fx.Proxy) -> Any:
        """The value of a proxy that the forward needs now; later inputs must give the same one."""
        node = proxy.node
        value = node.meta["value"]
        if isinstance(value, Tensor):
            raise GraphError(
                f"{where()}: the forward's path depends on the content of a tensor "
                f"({node.meta['name']}), which stages on other devices do not have; write it with "
                f"torch.where if possible. {remedy(relative(self.scope.module_path))}"
            )
        node.meta["guard"] = value
        node.meta["where"] = where()
        return value

    def to_bool(self, obj: fx.Proxy) -> bool:
        return bool(self.decide(obj))

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        length = self.decide(self.create_proxy("call_function", len, (obj,), {}))
        return iter(
            [
                self.create_proxy("call_function", operator.getitem, (obj, index), {})
                for index in range(length)
            ]
        )


class _Values(Mapping[fx.Node, Any]):
    """The values that nodes carry."""

    def __getitem__(self, node: fx.Node) -> Any:
        return node.meta["value"]

    def __iter__(self) -> Iterator[fx.Node]:
        return iter(())

    def __len__(self) -> int:
        return 0


def _operation(target: Any) -> str:
    return str(getattr(target, "__name__", type(target).__name__))


def _precision(device: torch.device) -> tuple[object, ...]:
    kind = device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _explain(module: nn.Module, tracer: LayerTracer, error: Exception) -> str:
    place = where(error.__traceback__)
    after = f" after {tracer.last.meta['name']!r}" if tracer.last is not None else ""
    return f"{type(module).__name__} cannot be followed at {place}{after}: {error}. " + remedy(
        relative(tracer.failed)
    )
