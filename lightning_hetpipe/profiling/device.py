"""One device's profile: what an earlier run kept, or measured now."""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_hetpipe.cluster import Device
from lightning_hetpipe.profiles import DeviceProfile
from lightning_hetpipe.profiling.cache import ProfileKey, cached_device_profile, processor_name
from lightning_hetpipe.profiling.measure import measure_device
from lightning_hetpipe.profiling.memory import tune_allocator
from lightning_hetpipe.profiling.reference import optimizer_s_per_byte, reference_seconds
from lightning_hetpipe.profiling.weigh import weigh_optimizer
from lightning_hetpipe.tracing import Traced, signature_of

Section = Callable[[], AbstractContextManager[Any]]


class Optimizer(NamedTuple):
    """What makes the optimizer whose step is timed: ``make(parameters, **settings)``."""

    make: Callable[..., torch.optim.Optimizer]
    settings: Mapping[str, Any]

    def __str__(self) -> str:
        name = f"{self.make.__module__}.{self.make.__qualname__}"
        return f"{name}({', '.join(f'{key}={value!r}' for key, value in sorted(self.settings.items()))})"


def profile_device(
    traced: Traced,
    inputs: Mapping[str, Tensor],
    micro_batches: Sequence[int],
    device: Device,
    *,
    section: Section = nullcontext,
    context: Section = nullcontext,
    optimizer: Optimizer | None = None,
    settings: str = "",
    shares: Callable[[DeviceProfile, float], DeviceProfile] | None = None,
    progress: Callable[[int, int], None] | None = None,
    directory: Path | None = None,
) -> DeviceProfile:
    """Measures a device, unless an equal one was measured under the same key at the same pace.

    Args:
        traced, inputs, micro_batches: As for `measure_device`; module and inputs are on the device.
        device: The device that this process stands for now.
        section: Encloses all computing (emulation).
        context: Entered around each forward, such as autocast.
        optimizer: Its step is timed and weighed too; None leaves ``optimizer_s_per_byte`` at 0.
        settings: What else changes the speed of this process, as part of the key.
        shares: Adds what fractions of the channels take to a profile that took so many seconds; None leaves
            that out.
        progress: Called by `measure_device`.
        directory: See `cached_device_profile`.
    """
    place = next(iter(inputs.values())).device
    sizes = tuple(sorted(set(micro_batches)))

    def measure() -> DeviceProfile:
        began_s = time.perf_counter()
        profile = measure_device(
            traced, inputs, sizes, device.name, section=section, context=context, progress=progress
        )
        if shares is not None:
            profile = shares(profile, time.perf_counter() - began_s)
        if optimizer is None:
            return profile
        dtype = next((parameter.dtype for parameter in traced.module.parameters()), torch.float32)
        cost = optimizer_s_per_byte(
            optimizer.make, optimizer.settings, device=place, dtype=dtype, section=section
        )
        needs = weigh_optimizer(optimizer.make, optimizer.settings, place, dtype)
        return replace(profile, optimizer_s_per_byte=cost, optimizer_peak=(needs.of_largest, needs.of_all))

    key = ProfileKey(
        graph=traced.graph.fingerprint,
        inputs=str(signature_of(inputs)),
        precision=_precision(place, context),
        device=device,
        micro_batches=sizes,
        torch_version=torch.__version__,
        processor=_processor(place),
        optimizer="" if optimizer is None else str(optimizer),
        settings=f"{settings}; {'whole layers' if shares is None else 'shares too'}; {_mode(traced)}",
    )
    return cached_device_profile(key, measure, directory, reference=lambda: reference_seconds(place, section))


def allocator_for(device: Device) -> str:
    """Tunes the allocator as for a rank on this device, and says how: a part of ``settings``."""
    limited = device.emulation is not None and device.emulation.memory_bytes is not None
    return f"allocator tuned: {tune_allocator(mapped=limited)}, mapped: {limited}"


def _precision(place: torch.device, context: Section) -> str:
    with context():
        autocast = torch.get_autocast_dtype(place.type) if torch.is_autocast_enabled(place.type) else None
    return f"{torch.get_default_dtype()}, autocast {autocast}, matmul {torch.get_float32_matmul_precision()}"


def _processor(place: torch.device) -> str:
    if place.type == "cuda":
        return f"{torch.cuda.get_device_name(place)}, CUDA {torch.version.cuda}"
    return processor_name()


def _mode(traced: Traced) -> str:
    """Which parameters learn and which modules train: a frozen layer's backward is cheaper."""
    evaluating = [name for name, module in traced.module.named_modules() if not module.training]
    frozen = {name for name, _ in traced.module.named_parameters()} - traced.trainable
    return f"frozen {sorted(frozen)}, evaluating {evaluating}"
