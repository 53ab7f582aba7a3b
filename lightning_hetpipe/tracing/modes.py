"""Joins what was followed in training mode with what was followed in evaluation mode.

    training    x ──► a ──► b ──► (b, aux(a))
    evaluation  x ──► a ──► b ──► softmax(b)          one graph, two outputs

Operations that both modes share are found by value numbering: same operation, same arguments. What only
one mode does has to be free of parameters if evaluation is that mode, because it always runs.
"""

from collections import defaultdict
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_aggregate

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.tracing.fake import Root, TrainingFlag
from lightning_hetpipe.tracing.remedies import remedy
from lightning_hetpipe.tracing.tracer import Trace


def join(root: Root, training: Trace, evaluation: Trace) -> tuple[Any, ...]:
    """Adds to the training graph what evaluation needs beyond it.

    Returns:
        The leaves that evaluation returns, as nodes of the training graph.

    Raises:
        GraphError: Evaluation calls modules with parameters or buffers otherwise than training does.
    """
    known: dict[object, list[fx.Node]] = defaultdict(list)
    for node in training.graph.nodes:
        known[_key(root, node, {})].append(node)
    end = next(node for node in reversed(training.graph.nodes) if node.op == "output")
    names = {node.meta["name"] for node in training.graph.nodes if node.op != "output"}
    joined: dict[fx.Node, fx.Node] = {}
    for node in evaluation.graph.nodes:
        if node.op == "output":
            continue
        same = known.get(_key(root, node, joined))
        if same:
            joined[node] = same.pop(0) if len(same) > 1 else same[0]
            continue
        _check_stateless(root, node)
        with training.graph.inserting_before(end):
            joined[node] = training.graph.node_copy(node, lambda argument: joined[argument])
        joined[node].meta["evaluation_only"] = True
        while joined[node].meta["name"] in names:
            joined[node].meta["name"] += "_eval"
        names.add(joined[node].meta["name"])
    return tuple(joined[leaf] if isinstance(leaf, fx.Node) else leaf for leaf in evaluation.leaves)


def resolve_training_flags(graph: fx.Graph) -> None:
    """Reads ``self.training`` where the graph runs instead of as it was traced."""
    for node in list(graph.nodes):

        def resolve(leaf: Any, node: fx.Node = node) -> Any:
            if not isinstance(leaf, TrainingFlag):
                return leaf
            with graph.inserting_before(node):
                read = graph.create_node("get_attr", f"{leaf.path}.training")
            read.meta = {**node.meta, "value": bool(leaf), "name": read.target}
            read.meta.pop("guard", None)
            return read

        node.args = map_aggregate(node.args, resolve)
        node.kwargs = map_aggregate(node.kwargs, resolve)


def _key(root: Root, node: fx.Node, joined: dict[fx.Node, fx.Node]) -> object:
    if node.op == "get_attr" and (constant := _constant(root, node)) is not None:
        # Each mode stores its own copy of a constant, so the content has to tell.
        content = constant.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
        return "constant", constant.shape, constant.dtype, content

    def frozen(leaf: Any) -> Any:
        if isinstance(leaf, fx.Node):
            return ("node", joined.get(leaf, leaf))
        if isinstance(leaf, TrainingFlag):
            return ("training", leaf.path)
        if isinstance(leaf, (tuple, list)):
            return (type(leaf).__name__, *map(frozen, leaf))
        if isinstance(leaf, dict):
            return tuple((key, frozen(value)) for key, value in leaf.items())
        if isinstance(leaf, slice):
            return ("slice", frozen(leaf.start), frozen(leaf.stop), frozen(leaf.step))
        return (type(leaf).__name__, repr(leaf))

    return node.op, node.target, frozen(node.args), frozen(node.kwargs), node.meta.get("grad", True)


def _constant(root: Root, node: fx.Node) -> Tensor | None:
    target = str(node.target)
    return None if target.startswith("module.") else getattr(root, target)


def _check_stateless(root: Root, node: fx.Node) -> None:
    holds = node.op == "get_attr" and _constant(root, node) is None
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        holds = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
    if holds:
        raise GraphError(
            f"{node.meta['where']}: evaluation takes another path than training and uses "
            f"{node.meta['name']!r} otherwise; one chain of stages has to serve both. "
            + remedy(node.meta["scope"])
        )
