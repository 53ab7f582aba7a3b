"""Values of a traced forward, and what torch.fx's own do not offer."""

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from lightning_hetpipe.tracing.tracer import LayerTracer


class Proxy(fx.Proxy):
    """A value of the traced forward; what Python needs to know at once is answered and guarded."""

    tracer: "LayerTracer"

    def __getattr__(self, name: str) -> Any:
        attribute = Attribute(self, name)
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

    def call(self: Proxy, other: Any) -> Any:
        return self.tracer.create_proxy("call_function", target, (self, other), {})

    setattr(Proxy, f"__{name}__", call)


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


class Attribute(Proxy):
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


class CustomFunction:
    """Calls an `torch.autograd.Function` as one operation, so that its backward stays its own."""

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        self.function = function
        self.__name__ = self.__qualname__ = function.__name__
        self.__module__ = function.__module__

    def __call__(self, *args: Any) -> Any:
        return self.function.apply(*args)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CustomFunction) and other.function is self.function

    def __hash__(self) -> int:
        return hash(self.function)


def holds_proxy(value: Any) -> bool:
    if isinstance(value, fx.Proxy):
        return True
    if isinstance(value, (list, tuple)):
        return any(map(holds_proxy, value))
    return isinstance(value, dict) and any(map(holds_proxy, value.values()))
