import pytest
import yaml

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.shipped import conf_dir

CLUSTERS = sorted((conf_dir() / "cluster").glob("*.yaml"))
SPEEDS = {
    "lab4": [0.6, 0.3, 0.3, 0.15],
    "twins": [0.5, 0.5],
    "edge6": [0.5, 0.25, 0.25, 0.1, 0.1, 0.1],
    "whimpy5": [0.6, 0.15, 0.15, 0.15, 0.15],
    "slowlink3": [0.6, 0.3, 0.3],
}


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_a_shipped_cluster_is_named_like_its_file_and_can_be_planned_for(path):
    cluster = Cluster.from_yaml(path)
    assert cluster.name == path.stem
    for device in cluster.devices:
        if device.emulation is None:
            assert device.flops_per_s
            assert device.memory_bytes_per_s
            assert device.memory_bytes
            assert device.source
    assert Cluster.from_mapping(cluster.to_mapping()) == cluster


@pytest.mark.parametrize("name", SPEEDS)
def test_an_emulated_cluster_has_the_promised_speeds_and_leaves_the_cpu_room(name):
    cluster = Cluster.from_yaml(conf_dir() / "cluster" / f"{name}.yaml")
    speeds = [device.emulation.speed for device in cluster.devices]
    assert speeds == SPEEDS[name]
    assert sum(speeds) < 2


@pytest.mark.parametrize("path", sorted((conf_dir() / "model").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_model_builds_and_takes_the_inputs_it_names(path):
    import torch
    from hydra.utils import instantiate

    config = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert config["name"] == path.stem
    with torch.device("meta"):
        module = instantiate(config["module"])
        output = module.eval()(*(torch.empty(2, *shape) for shape in config["inputs"]))
    assert output.shape == (2, config["classes"])
