"""Facts about a followed graph that decide where it can be cut."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from lightning_hetpipe.errors import GraphError
from lightning_hetpipe.tracing.fake import Root, State
from lightning_hetpipe.tracing.observe import Observation, observe
from lightning_hetpipe.tracing.spec import TensorSpec

_PLAIN_OPS = ("placeholder", "get_attr", "output")


@dataclass
class Chain:
    """The nodes that a stage runs, in order, and what is known of them.

    Attributes:
        nodes: Operations only; inputs and attributes are not among them.
        position: Index of each node in ``nodes``.
        uses: Position of the last use; ``len(nodes)`` for what is returned.
        mutated: Per node, the nodes whose memory it writes to.
        storage: Per tensor node, a key of the memory that it lives in.
        ties: Pairs of positions between which no cut may be.
        renamed: Tensors that were changed in place, and the operation whose result is the changed tensor.
        seen: What each node did when it was run once.
    """

    nodes: list[fx.Node]
    position: dict[fx.Node, int]
    uses: dict[fx.Node, int] = field(default_factory=dict)
    mutated: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    storage: dict[fx.Node, int] = field(default_factory=dict)
    ties: list[tuple[int, int]] = field(default_factory=list)
    renamed: dict[fx.Node, fx.Node] = field(default_factory=dict)
    seen: Observation = field(default_factory=Observation)

    def current(self, node: fx.Node) -> fx.Node:
        """The node that holds this tensor after all changes in place."""
        while node in self.renamed:
            node = self.renamed[node]
        return node


def analyse(
    root: Root,
    state: State,
    graph: fx.Graph,
    inputs: Mapping[str, TensorSpec],
    device: torch.device,
    outputs: Collection[fx.Node],
) -> Chain:
    """Finds what is alive, what writes where, and what has to stay together.

    Uses of a tensor after an operation changed it in place are turned into uses of that operation's
    result, so that no stage depends on another one's memory.
    """
    seen = observe(root, state, graph, inputs, device)
    values, mutated = seen.values, seen.mutated
    for node, value in values.items():
        node.meta["value"] = value
    storage = {
        node: value.untyped_storage()._cdata for node, value in values.items() if isinstance(value, Tensor)
    }
    alive = _alive(graph, outputs, mutated)
    renamed = _rewire(graph, mutated, values)
    nodes = [node for node in graph.nodes if node in alive and node.op not in _PLAIN_OPS]
    if not nodes:
        raise GraphError(f"{type(root.module).__name__} returns its inputs unchanged: nothing to place")
    chain = Chain(
        nodes, {node: index for index, node in enumerate(nodes)}, {}, mutated, storage, [], renamed, seen
    )
    returned = {chain.current(node) for node in outputs}
    for node in graph.nodes:
        if node in alive and node.op != "output":
            users = [chain.position[user] for user in node.users if user in chain.position]
            chain.uses[node] = len(nodes) if node in returned else max(users, default=-1)
    _tie_mutations(chain, alive)
    _tie_buffers(root, chain)
    _tie_evaluation(chain)
    return chain


def is_carried(value: object) -> bool:
    """Whether a value can pass from stage to stage: a tensor, or sizes, which travel as a shape."""
    return isinstance(value, Tensor) or is_size(value)


def is_size(value: object) -> bool:
    """A size or a tuple of sizes."""
    if isinstance(value, tuple):
        return type(value) in (tuple, torch.Size) and all(type(item) is int for item in value)
    return type(value) is int and value >= 0


def _alive(
    graph: fx.Graph, outputs: Collection[fx.Node], mutated: Mapping[fx.Node, tuple[fx.Node, ...]]
) -> set[fx.Node]:
    """Nodes that matter: eager code would notice if they were left out."""
    alive: set[fx.Node] = set(outputs)
    for node in reversed(graph.nodes):
        computes = node.op == "call_module" or isinstance(node.meta.get("value"), Tensor)
        if (
            node.op == "placeholder"
            or node in alive
            or node in mutated
            or (node.op not in _PLAIN_OPS and computes)
        ):
            alive.add(node)
            alive.update(node.all_input_nodes)
    return alive


def _rewire(
    graph: fx.Graph,
    mutated: Mapping[fx.Node, tuple[fx.Node, ...]],
    values: Mapping[fx.Node, Any],
) -> dict[fx.Node, fx.Node]:
    order = {node: index for index, node in enumerate(graph.nodes)}
    renamed: dict[fx.Node, fx.Node] = {}
    for node, written in mutated.items():
        for old in written:
            if old.op != "get_attr" and _same_tensor(values[old], values[node]):
                later = [user for user in old.users if order[user] > order[node]]
                for user in later:
                    user.replace_input_with(old, node)
                renamed[old] = node
    return renamed


def _same_tensor(left: Any, right: Any) -> bool:
    return bool(
        isinstance(left, Tensor)
        and isinstance(right, Tensor)
        and left.untyped_storage()._cdata == right.untyped_storage()._cdata
        and left.shape == right.shape
        and left.stride() == right.stride()
        and left.storage_offset() == right.storage_offset()
    )


def _tie_mutations(chain: Chain, alive: set[fx.Node]) -> None:
    """Other names of changed memory that are used afterwards see the change only in the same stage."""
    for node, written in chain.mutated.items():
        here = chain.position[node]
        memories = {chain.storage[old] for old in written}
        for other in alive:
            if chain.storage.get(other) not in memories or other.op == "output":
                continue
            if other.op == "get_attr":
                users = [chain.position[user] for user in other.users if user in chain.position]
                chain.ties.append((min([here, *users]), max([here, *users])))
            elif other is not node and chain.uses[other] > here:
                made = chain.position.get(other, 0)
                if made < here:
                    # Changed under its old name and used again: one stage holds all of it.
                    chain.ties.append((made if other not in written else here, chain.uses[other]))


def _tie_buffers(root: Root, chain: Chain) -> None:
    """A buffer that several calls update is held in one place."""
    calls: dict[int, list[int]] = {}
    for node in chain.nodes:
        if node.op == "call_module":
            for buffer in root.get_submodule(str(node.target)).buffers():
                calls.setdefault(id(buffer), []).append(chain.position[node])
    chain.ties.extend((found[0], found[-1]) for found in calls.values() if len(found) > 1)


def _tie_evaluation(chain: Chain) -> None:
    """What only evaluation does stays in the last layer."""
    only = [index for index, node in enumerate(chain.nodes) if node.meta.get("evaluation_only")]
    if only:
        chain.ties.append((only[0], len(chain.nodes) - 1))
