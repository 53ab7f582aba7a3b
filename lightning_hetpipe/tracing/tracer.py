"""Follows a module's forward with torch.fx, keeping calls of torch's own modules as they are.

Every node is evaluated on fake tensors as it is made. So code that asks for a shape gets an answer
(``assert t <= self.block_size``, ``for head in x.chunk(4)``); what it decided by that answer is kept as a
guard, and inputs that would decide otherwise are refused later.
"""

import operator
import os
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import TracebackType
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
    TrainingFlag,
    arguments,
    attribute,
    evaluate,
    keeps_shape,
    undisturbed,
)
from lightning_hetpipe.tracing.spec import TensorSpec

# torch's own modules that are followed, so that their attention and their MLP become layers.
_OPEN = (
    nn.Sequential,
    nn.Transformer,
    nn.TransformerDecoder,
    nn.TransformerDecoderLayer,
    nn.TransformerEncoder,
    nn.TransformerEncoderLayer,
)
# Functions that make tensors from sizes; torch.fx does not see them by itself.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")
# Without a node of their own their numbers would be drawn once, at trace time.
_RANDOM = ("normal", "rand", "randint", "randn", "randperm")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_FILES = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


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
    tracer = _Tracer(state, binding, specs, device, leaves, real_state)
    with undisturbed(), ExitStack() as stack:
        stack.enter_context(_attributes_kept(root.module, tracer))
        stack.enter_context(_training_flags(root, tracer, training))
        stack.enter_context(_patched(tracer))
        with state.mode:
            fakes = state.fakes(device, state.trainable)
        try:
            graph: fx.Graph = torch.func.functional_call(root, fakes, (lambda: tracer.trace(root),))
        except GraphError:
            raise
        except Exception as error:
            raise GraphError(_explain(root.module, tracer, error)) from error
    return Trace(graph, tracer.result, tracer.structure)


class _Proxy(fx.Proxy):
    """A value of the traced forward; what Python needs to know at once is answered and guarded."""

    tracer: "_Tracer"

    def __getattr__(self, name: str) -> Any:
        attribute = _Attribute(self, name)
        if not callable(getattr(self.node.meta["value"], name, None)):
            _ = attribute.node  # read now: it may be another value later, and a size is cheaper to keep
        return attribute

    def __len__(self) -> int:
        return int(self.tracer.decide(self.tracer.create_proxy("call_function", len, (self,), {})))

    def __index__(self) -> int:
        return int(self.tracer.decide(self))

    __int__ = __index__

    def __float__(self) -> float:
        return float(self.tracer.decide(self))

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _define_inplace(name: str) -> None:
    # Without these, Python falls back to ``x = x + y``, and other names of x would not see the change.
    target = getattr(operator, name)

    def call(self: _Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    setattr(_Proxy, f"__{name}__", call)


for _name in (
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "ifloordiv",
    "imod",
    "ipow",
    "iand",
    "ior",
    "ixor",
    "imatmul",
):
    _define_inplace(_name)


class _Attribute(_Proxy):
    """``proxy.name``, which is a method call if it is called and a value otherwise."""

    def __init__(self, owner: fx.Proxy, name: str) -> None:
        self._owner = owner
        self._name = name
        self._node: fx.Node | None = None
        self.tracer = owner.tracer  # type: ignore[assignment]

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        if self._node is None:
            made = self.tracer.create_proxy("call_function", getattr, (self._owner, self._name), {})
            self._node = made.node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self._name, (self._owner, *args), kwargs)


class _CustomFunction:
    """Calls an `torch.autograd.Function` as one operation, so that its backward stays its own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = function.__module__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _CustomFunction) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


class _Tracer(fx.Tracer):
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
        return _Proxy(node, self)

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
        scope = _relative(self.scope.module_path)
        node.meta |= {"scope": scope, "grad": torch.is_grad_enabled(), "where": _where(), "training": None}
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
            base = _relative(str(node.target))
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
                "known only if it is one tensor of its input's shape and dtype, which it is not: keep a larger "
                "module whole, or write it without looking"
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
                f"{_where()}: the forward's path depends on the content of a tensor "
                f"({node.meta['name']}), which stages on other devices do not have; write it with "
                f"torch.where if possible. {remedy(_relative(self.scope.module_path))}"
            )
        node.meta["guard"] = value
        node.meta["where"] = _where()
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


@contextmanager
def _training_flags(root: Root, tracer: _Tracer, training: bool) -> Iterator[None]:
    """Lets ``self.training`` be recognised where it is passed on as an argument."""
    before = {module: module.training for module in root.module.modules()}
    paths = {module: name for name, module in root.named_modules()}
    try:
        for module in before:
            leaf = tracer.is_leaf_module(module, paths[module])
            module.__dict__["training"] = training if leaf else TrainingFlag(training, paths[module])
        yield
    finally:
        for module, flag in before.items():
            module.__dict__["training"] = flag


@contextmanager
def _attributes_kept(module: nn.Module, tracer: _Tracer) -> Iterator[None]:
    """Refuses a forward that stores intermediate values on its module, and takes them off again."""
    before = {child: dict(child.__dict__) for child in module.modules()}
    names = {child: name for name, child in module.named_modules()}
    try:
        yield
    finally:
        stored = [
            (child, key)
            for child, attributes in before.items()
            for key, value in child.__dict__.items()
            if _holds_proxy(value) and not _holds_proxy(attributes.get(key))
        ]
        for child, key in stored:
            child.__dict__.pop(key)
            if key in before[child]:
                child.__dict__[key] = before[child][key]
    if stored:
        child, key = stored[0]
        path = ".".join(filter(None, (names[child], key)))
        raise GraphError(
            f"the forward stores a tensor on the module as {path!r}, which would be lost on the device "
            f"that runs it: return it instead. {remedy(names[child])}"
        )


@contextmanager
def _patched(tracer: _Tracer) -> Iterator[None]:
    """Shows the tracer what torch.fx does not see: factories, random draws, custom functions."""

    def seen(original: Callable[..., Any], always: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not tracer.evaluating and (always or _holds_proxy((args, kwargs))):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return call

    original_apply = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not tracer.evaluating and _holds_proxy(args):
            return tracer.create_proxy("call_function", _CustomFunction(cls), args, kwargs)
        return original_apply.__get__(None, cls)(*args, **kwargs)

    def causal(mask: Any, is_causal: bool | None = None, size: int | None = None) -> bool:
        return bool(is_causal)  # a hint only; looking into the mask is not possible here

    with ExitStack() as stack:
        for name in (*_FACTORIES, *_RANDOM):
            stack.enter_context(_replaced(torch, name, seen(getattr(torch, name), name in _RANDOM)))
        for name in ("_canonical_mask", "_none_or_dtype"):  # they ask for the type of a tensor
            function = getattr(nn.functional, name)
            stack.enter_context(_replaced(nn.functional, name, seen(function, False)))
        stack.enter_context(_replaced(torch.autograd.Function, "apply", classmethod(apply)))
        stack.enter_context(_replaced(nn.modules.transformer, "_detect_is_causal_mask", causal))
        yield


@contextmanager
def _replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    original = owner.__dict__[name]
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


def remedy(scope: str) -> str:
    """What to do about a module whose forward cannot be followed."""
    if not scope:
        return (
            "That line is in the pipelined module's own forward: move it out of there, or pipeline a "
            "submodule that does not contain it (module='...')"
        )
    return (
        f"Keep the module that holds this line whole with blocks={scope!r} (of an nn.Sequential or "
        "nn.ModuleList, each item stays whole), or pipeline a submodule without it (module='...')"
    )


def _relative(path: str) -> str:
    return path.removeprefix("module").removeprefix(".")


def _holds_proxy(value: Any) -> bool:
    if isinstance(value, fx.Proxy):
        return True
    if isinstance(value, (list, tuple)):
        return any(map(_holds_proxy, value))
    return isinstance(value, dict) and any(map(_holds_proxy, value.values()))


def _operation(target: Any) -> str:
    return str(getattr(target, "__name__", type(target).__name__))


def _precision(device: torch.device) -> tuple[object, ...]:
    kind = device.type
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _where(trace: TracebackType | None = None) -> str:
    """File and line of the innermost user code: of an error, or of the call that is going on."""
    frames = traceback.walk_stack(None) if trace is None else reversed(list(traceback.walk_tb(trace)))
    for frame, line in frames:
        file = frame.f_code.co_filename
        if not file.startswith((*_OWN_FILES, "<")) and not file.endswith("contextlib.py"):
            return f"{file}:{line}"
    return "torch"


def _explain(module: nn.Module, tracer: _Tracer, error: Exception) -> str:
    where = _where(error.__traceback__)
    after = f" after {tracer.last.meta['name']!r}" if tracer.last is not None else ""
    return f"{type(module).__name__} cannot be followed at {where}{after}: {error}. " + remedy(
        _relative(tracer.failed)
    )
