"""Measures what a message and a collective cost in software, on this machine's processors over gloo.

    member 0   rest ──────►  operation | sleep     its own clock, from when it comes, last
    member 1   rest ─►  operation, asleep in it

What the links are declared to take comes on top of it. The least of some repeats counts: a busy moment only
adds. Copies that a stage makes for a collective are computing, and measured with the shares.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.engine.c10d import Collectives, Work, gloo_device, gloo_group, thread_store
from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.message import Layout
from lightning_hetpipe.engine.probe import lead, machine, tell_all
from lightning_hetpipe.errors import ProfileError
from lightning_hetpipe.profiles import Software
from lightning_hetpipe.profiling.cache import processor_name, software_file
from lightning_hetpipe.profiling.fit import fit_line
from lightning_hetpipe.profiling.kept import KeptFile
from lightning_hetpipe.tracing import TensorSpec

SIZES_BYTES = (2**12, 2**16, 2**18, 2**20)
REPEATS = 15
_REST_S = 0.001  # long enough for the other member to fall asleep in its wait, as it does in a pipeline
PATIENCE_S = 10.0
_HOST = torch.device("cpu")


def measure_software(control: Control, name: str, cluster: Cluster) -> Software:
    """What sending and collectives cost between ranks 0 and 1, measured or kept. All ranks call it together.

    Zero where a device is no CPU: how much of it a GPU's streams hide is not known.

    Args:
        control: Of this rank.
        name: Unique among the groups of this process.
        cluster: Rank ``i`` is its device ``i``.

    Returns:
        Equal costs on all ranks.

    Raises:
        RankFailedError: A rank failed or did not answer.
    """
    if not _is_measured(cluster):
        return Software()
    try:
        machines: list[str] = tell_all(control, machine())
        file = _file(machines[0], machines[1])
        kept = lead(control, file.entries)
        if kept:
            return kept[-1]
        found = None
        if control.rank < 2:
            group = control.create_group(name, (0, 1))
            with control.naming(1 - control.rank, "measuring what messages cost"):
                found = member_software(group, control.rank)

        def keep() -> Software:
            assert found is not None  # rank 0 is member 0
            return file.keep(found, lambda _: None)

        return lead(control, keep)
    except BaseException as error:
        control.fail(error, "measuring what messages cost")
        raise


def software_here(cluster: Cluster) -> Software:
    """The same for ranks that would be on this machine: between two threads of this process, or kept.

    Raises:
        ProfileError: The threads cannot reach each other.
    """
    if not _is_measured(cluster):
        return Software()
    file = _file(machine(), machine())
    kept = file.entries()
    return kept[-1] if kept else file.keep(between_threads(), lambda _: None)


def between_threads() -> Software:
    """Measures between two threads of this process.

    Raises:
        ProfileError: One of them failed, or did not answer in time.
    """
    store = thread_store(PATIENCE_S)
    found: list[Software | None] = []
    errors: list[BaseException] = []

    def run(member: int) -> None:
        try:
            found.append(member_software(gloo_group(store, member, 2, device, PATIENCE_S), member))
        except BaseException as error:  # without its frames, which hold the group: the other waits for it
            errors.append(error.with_traceback(None))

    try:
        device = gloo_device()
        threads = [threading.Thread(target=run, args=(member,), daemon=True) for member in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    except RuntimeError as error:
        errors.append(error)
    measured = next((each for each in found if each is not None), None)
    if errors or measured is None:
        raise ProfileError(
            f"what messages cost on this machine cannot be measured ({errors[0]}): two ranks on it could not "
            "reach each other. Let its host name resolve to an address of its own"
        ) from errors[0]
    return measured


def member_software(group: Collectives, member: int) -> Software | None:
    """One member's part of the measurement; member 0 learns the costs."""
    best: list[dict[int, float]] = [{}, {}, {}]
    for _ in range(REPEATS):  # each goes through all sizes, so that no busy moment spoils one altogether
        for size in SIZES_BYTES:
            tensor = torch.zeros(size // 4)
            halves, received = [tensor.numel() // 2] * 2, torch.empty_like(tensor)
            for seconds, operation in zip(
                best,
                (
                    partial(_collective_s, partial(group.allreduce, [tensor])),
                    partial(_collective_s, partial(group.alltoall_base, received, tensor, halves, halves)),
                    partial(_message_s, group, member, tensor),
                ),
            ):
                time.sleep(_REST_S * (2 - member))
                taken_s = operation()
                seconds[size] = min(taken_s, seconds.get(size, taken_s))
    if member != 0:
        return None
    (sum_s, sum_s_per_byte), (swap_s, swap_s_per_byte), (send_s, send_s_per_byte) = map(fit_line, best)
    return Software(send_s, send_s_per_byte, (sum_s + swap_s) / 2, (sum_s_per_byte + swap_s_per_byte) / 2)


def _collective_s(start: Callable[[], Work]) -> float:
    """Until a sleep after it, such as an emulated link's, is over; that sleep itself not counted."""
    begun_s = time.perf_counter()
    start().wait()
    time.sleep(_REST_S)
    return time.perf_counter() - begun_s - _REST_S


def _message_s(group: Collectives, member: int, tensor: Tensor) -> float:
    """Until the sender may go on."""
    layout = Layout.of(("x",), {"x": TensorSpec.of(tensor)}, stamped=True)
    begun_s = time.perf_counter()
    if member == 0:
        buffer = layout.pack({"x": tensor}, _HOST, "measuring")
        layout.stamp(buffer, begun_s)
        work = group.send([buffer], 1, 0)
    else:
        work = group.recv([layout.empty(_HOST)], 0, 0)
    taken_s = time.perf_counter() - begun_s
    work.wait()
    group.allreduce([torch.zeros(1)]).wait()  # both begin to rest together
    return taken_s


def _is_measured(cluster: Cluster) -> bool:
    return len(cluster.devices) > 1 and {device.kind for device in cluster.devices} == {"cpu"}


def _file(first: str, second: str) -> KeptFile[Software]:
    return software_file(
        {"machines": [first, second], "torch": torch.__version__, "processor": processor_name()}
    )
