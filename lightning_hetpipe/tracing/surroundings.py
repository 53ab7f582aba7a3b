"""What is different around a forward while it is followed; all of it is put back."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.tracing.fake import Root, TrainingFlag
from lightning_hetpipe.tracing.proxies import CustomFunction, holds_proxy
from lightning_hetpipe.tracing.remedies import remedy

if TYPE_CHECKING:
    from lightning_hetpipe.tracing.tracer import LayerTracer

# Functions that make tensors from sizes; torch.fx does not see them by itself.
_FACTORIES = ("arange", "empty", "eye", "full", "linspace", "ones", "tensor", "zeros")
# Without a node of their own their numbers would be drawn once, at trace time.
_RANDOM = ("normal", "rand", "randint", "randn", "randperm")


@contextmanager
def training_flags(root: Root, tracer: "LayerTracer", training: bool) -> Iterator[None]:
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
def attributes_kept(module: nn.Module, tracer: "LayerTracer") -> Iterator[None]:
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
            if holds_proxy(value) and not holds_proxy(attributes.get(key))
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
def patched(tracer: "LayerTracer") -> Iterator[None]:
    """Shows the tracer what torch.fx does not see: factories, random draws, custom functions."""

    def seen(original: Callable[..., Any], always: bool) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if not tracer.evaluating and (always or holds_proxy((args, kwargs))):
                return tracer.create_proxy("call_function", original, args, kwargs)
            return original(*args, **kwargs)

        return call

    original_apply = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not tracer.evaluating and holds_proxy(args):
            return tracer.create_proxy("call_function", CustomFunction(cls), args, kwargs)
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
