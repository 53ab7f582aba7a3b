"""Which device a rank computes on, and what carries messages between two of them."""

from typing import Any

import pytest
import torch
from torch.distributed import Store

from lightning_hetpipe.cluster import Cluster, Device
from lightning_hetpipe.engine.control import Control
from lightning_hetpipe.engine.message import Layout
from lightning_hetpipe.engine.pieces import Holding
from lightning_hetpipe.engine.places import backend_between, check_present, processor, torch_device
from lightning_hetpipe.engine.transport import connect
from lightning_hetpipe.errors import ClusterError, RankFailedError
from lightning_hetpipe.graph import Route
from lightning_hetpipe.tracing import TensorSpec
from tests.helpers.outcomes import outcomes, values

CPU = torch.device("cpu")


def test_a_rank_computes_where_its_device_says() -> None:
    cluster = Cluster("c", (Device("a", kind="cuda"), Device("b"), Device("c", kind="cuda")))
    assert [torch_device(each) for each in cluster.devices] == [
        torch.device("cuda", 0),
        CPU,
        torch.device("cuda", 1),
    ]


def test_a_kind_that_ranks_cannot_compute_on_is_refused() -> None:
    with pytest.raises(ClusterError, match="'tpu' is of kind 'xla': ranks compute on cpu and cuda"):
        torch_device(Device("tpu", kind="xla"))


def test_a_gpu_that_the_machine_lacks_is_refused_with_what_to_do() -> None:
    check_present(Device("a"))
    with pytest.raises(ClusterError, match="'gpu' is cuda:999 of host 'h', and this machine has"):
        check_present(Device("gpu", kind="cuda", host="h", index=999))


def test_nccl_joins_two_gpus_and_gloo_all_else() -> None:
    assert backend_between("GPU-1", "GPU-2") == "nccl"
    assert backend_between("GPU-1", "GPU-1") == "gloo"
    assert {backend_between(*ends) for ends in (("GPU-1", None), (None, "GPU-1"), (None, None))} == {"gloo"}


def test_a_cpu_has_no_identity() -> None:
    assert processor(CPU) is None


def exchange(rank: int, store: Store) -> list[float]:
    """Ranks that the cluster calls GPUs, and that compute on CPUs."""
    control = Control(store, rank, 2, timeout_s=20)
    cluster = Cluster("c", (Device("a", kind="cuda"), Device("b")))
    route = Route(0, 1, ("x",), ())
    transport = connect(control, "plan", [route], [Holding((0,)), Holding((1,))], device=CPU, cluster=cluster)
    (edge,) = transport.edges.values()
    layout = Layout.of(("x",), {"x": TensorSpec((2,), torch.float64)})
    found = []
    if rank == 0:
        edge.send("0SEND_F0", layout, {"x": torch.tensor([1.0, 2.0], dtype=torch.float64)})
        edge.release_all()
    else:
        edge.expect([("0SEND_F0", layout)])
        found = edge.receive("0SEND_F0")["x"].tolist()
    control.gather(None)
    return found


def test_what_carries_messages_is_decided_by_the_processors_in_use() -> None:
    assert values(outcomes(2, exchange)) == [[], [1.0, 2.0]]


class Transfer:
    """One between GPUs: its wait returns at once, and it is over after so many looks, if at all."""

    def __init__(self, n_looks: float) -> None:
        self.n_looks = n_looks
        self.waited = False

    def is_completed(self) -> bool:
        self.n_looks -= 1
        return self.n_looks < 0

    def wait(self) -> bool:
        self.waited = True
        return True


def test_waiting_for_a_transfer_between_gpus_ends_when_it_is_over() -> None:
    transfer = Transfer(3)
    Control(None, 0, 1, timeout_s=5).wait_on_device(transfer, 1, "2F0")
    assert transfer.waited


def wait_in_vain(rank: int, store: Store) -> Any:
    control = Control(store, rank, 2, timeout_s=2 if rank == 0 else 30)
    if rank == 0:
        control.wait_on_device(Transfer(float("inf")), 1, "1SEND_F0")
    else:
        control.share()


def test_a_transfer_between_gpus_that_never_ends_names_the_peer() -> None:
    waiting, _ = outcomes(2, wait_in_vain)
    assert isinstance(waiting.error, RankFailedError)
    assert "rank 1" in str(waiting.error)
    assert "1SEND_F0" in str(waiting.error)
