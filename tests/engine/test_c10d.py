import pytest

from lightning_hetpipe.engine.c10d import gloo_device


def test_connections_go_through_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth7")
    assert gloo_device() is not None
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothere0")
    with pytest.raises(RuntimeError, match="nothere0"):
        gloo_device()
