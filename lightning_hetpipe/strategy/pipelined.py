"""Which submodule of the LightningModule is pipelined."""

from typing import Any

from torch import nn

from lightning_hetpipe.errors import GraphError

NEARLY_ALL = 0.95  # of the parameters: a child that holds this fraction is what is worth splitting


def find_pipelined(module: nn.Module, wanted: str) -> tuple[str, nn.Module]:
    """The pipelined submodule and its dotted name; "" is the module itself.

    Args:
        module: The LightningModule.
        wanted: A dotted name, or ``auto``: the child that holds nearly all parameters, else the module.

    Raises:
        GraphError: There is no such submodule, or ``auto`` finds none that can be called.
    """
    if wanted != "auto":
        return wanted, _named(module, wanted)
    total = _size(module)
    if not total:
        raise GraphError(f"{type(module).__name__} has no parameters, so there is nothing to pipeline")
    children = [(_size(child), name, child) for name, child in module.named_children() if _is_callable(child)]
    size, name, child = max(children, key=lambda entry: entry[0], default=(0, "", module))
    if size >= NEARLY_ALL * total:
        return name, child
    if _is_callable(module):
        return "", module
    sizes = ", ".join(f"{name} {size / total:.0%}" for size, name, _ in sorted(children, reverse=True)[:5])
    raise GraphError(
        f"{type(module).__name__} has no child that holds {NEARLY_ALL:.0%} of the parameters ({sizes}) and "
        "no forward: write a forward, or name the submodule with HetPipeStrategy(module=...)"
    )


def refuse_one_layer(module: nn.Module, name: str, pipelined: nn.Module) -> None:
    """Refuses a pipelined submodule that is a single layer of torch.

    Raises:
        GraphError: It is.
    """
    kind = type(pipelined)
    if kind.__module__.startswith("torch.nn.") and not any(pipelined.children()):
        raise GraphError(
            f"the pipelined module {name!r} of {type(module).__name__} is one layer ({kind.__name__}), which "
            "cannot be cut into stages: put it into an nn.Sequential with its neighbours, or name a larger "
            "submodule with HetPipeStrategy(module=...)"
        )


def _named(module: nn.Module, wanted: str) -> nn.Module:
    try:
        return module.get_submodule(wanted)
    except AttributeError:
        names = ", ".join(name for name, _ in module.named_children())
        raise GraphError(
            f"module={wanted!r} was asked for, but {type(module).__name__} has no such submodule; "
            f"its children are {names}"
        ) from None


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _is_callable(module: Any) -> bool:
    """True where the class brings a ``forward`` of its own (containers and bare modules do not)."""
    forward = getattr(type(module), "forward", None)
    return forward is not None and _defining_module(type(module)) not in _WITHOUT_FORWARD


def _defining_module(kind: type) -> str:
    owner = next(base for base in kind.__mro__ if "forward" in vars(base))
    return f"{owner.__module__}.{owner.__name__}"


_WITHOUT_FORWARD = {
    "torch.nn.modules.module.Module",
    "lightning.pytorch.core.module.LightningModule",
    "pytorch_lightning.core.module.LightningModule",
}
