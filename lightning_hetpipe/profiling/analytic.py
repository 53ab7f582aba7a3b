"""A profile from published figures, for machines one does not have: a roofline per layer.

    forward = overhead + max( FLOPs / (0.5 · peak),  bytes moved / (0.75 · memory bandwidth) )

The two fractions are what convolutions and matrix products, and streaming kernels, commonly reach of the data
sheet. Comparisons between devices hold better than the absolute times; measure where you can.
"""

from collections.abc import Sequence

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.graph import LayerGraph
from lightning_hetpipe.profiles import DeviceProfile, Profile

COMPUTE_FRACTION = 0.5
MEMORY_FRACTION = 0.75
OVERHEAD_S = 10e-6  # one kernel launch, and what eager PyTorch does around it
BACKWARD_PASSES = 2.0  # the gradients of inputs and of weights each cost a forward
FRACTIONS = (0.5, 0.125)  # of the channels: all but the overhead shrinks with them
OPTIMIZER_PASSES = 5.0  # SGD with momentum reads weight, gradient, momentum, and writes two of them


def analytic_profile(graph: LayerGraph, cluster: Cluster, micro_batches: Sequence[int]) -> Profile:
    """Estimates every layer on every device from FLOPs, bytes and the devices' published peaks.

    Args:
        graph: Its layers carry FLOPs and bytes.
        cluster: Each device has ``flops_per_s`` and ``memory_bytes_per_s``.
        micro_batches: Sizes to tabulate, ascending, in samples.

    Raises:
        ProfileError: A device has no published figures.
    """
    devices = tuple(_estimate(graph, device, tuple(micro_batches)) for device in cluster.devices)
    return Profile(graph, devices, origin="analytic")


def _estimate(graph: LayerGraph, device: Device, sizes: tuple[int, ...]) -> DeviceProfile:
    if device.flops_per_s is None or device.memory_bytes_per_s is None:
        raise ProfileError(
            f"device {device.name!r} has no published figures, so it can only be measured: say "
            "profile=auto on that machine, or give flops_per_s and memory_bandwidth in the cluster"
        )
    flops_per_s = COMPUTE_FRACTION * device.flops_per_s
    bytes_per_s = MEMORY_FRACTION * device.memory_bytes_per_s
    moved = _moved_bytes(graph)
    forward = tuple(
        tuple(
            OVERHEAD_S
            + max(
                layer.flops_per_sample * size / flops_per_s,
                (layer.parameter_bytes + per_sample * size) / bytes_per_s,
            )
            for size in sizes
        )
        for layer, per_sample in zip(graph.layers, moved)
    )
    backward = tuple(tuple(BACKWARD_PASSES * seconds for seconds in row) for row in forward)
    factors = tuple(
        tuple((OVERHEAD_S + fraction * (row[-1] - OVERHEAD_S)) / row[-1] for fraction in FRACTIONS)
        for row in forward
    )
    return DeviceProfile(
        device.name,
        sizes,
        forward,
        backward,
        optimizer_s_per_byte=OPTIMIZER_PASSES / bytes_per_s,
        fractions=FRACTIONS,
        forward_factors=factors,
        backward_factors=factors,
    )


def _moved_bytes(graph: LayerGraph) -> list[float]:
    """Activation bytes that each layer reads and writes for one sample."""
    moved = [layer.saved_bytes_per_sample for layer in graph.layers]
    for value in graph.values:
        touching = {value.producer, *value.consumers} & set(range(len(graph)))
        for layer in touching:
            moved[layer] += value.bytes_per_sample
    return moved
