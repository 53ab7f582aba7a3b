"""The study's slices compute what ranks would."""

from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

from lightning_hetpipe.stage.norm import convert_norm


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> ModuleType:
    monkeypatch.syspath_prepend(str(request.config.rootpath / "recipes"))
    import normalization

    return normalization


def images() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(11, 1, 8, 8, dtype=torch.float64), torch.randint(10, (11,))


def gradients(study: ModuleType, policy: str, split: object) -> tuple[list[Tensor], dict[str, Tensor]]:
    torch.manual_seed(1)
    model = convert_norm(study.network(4).double(), policy)
    study.backward_in_slices(model, split, *images())
    return [parameter.grad for parameter in model.parameters()], dict(model.named_buffers())


def test_the_gradients_of_ragged_slices_add_up_to_the_batchs(study: ModuleType) -> None:
    sliced, _ = gradients(study, "group", study.Split("group", 4))
    whole, _ = gradients(study, "group", study.Split("group", 1))
    torch.testing.assert_close(sliced, whole, rtol=1e-10, atol=1e-12)


def test_the_running_statistics_of_bn_are_the_first_members(study: ModuleType) -> None:
    _, buffers = gradients(study, "keep", study.Split("keep", 4, recorded_every=2))
    torch.manual_seed(1)
    convolution = study.network(4).double()[0]
    norm = nn.BatchNorm2d(4, dtype=torch.float64)
    for part in images()[0].tensor_split(4)[::2]:
        norm(convolution(part))
    torch.testing.assert_close(buffers["1.running_mean"], norm.running_mean)
    torch.testing.assert_close(buffers["1.running_var"], norm.running_var)


def test_every_row_of_the_table_names_something_trained(study: ModuleType) -> None:
    trained = study.splits(4, 2)
    assert {name for _, _, name in study.rows(list(trained))} == set(trained)


def test_the_conclusion_tells_worse_from_equal(study: ModuleType) -> None:
    found = {name: {8: [97.0, 98.0, 99.0]} for name in study.splits(4, 2)}
    found["bn, pipeline"] = {8: [95.0, 96.1, 96.9]}
    sentences = study.conclusion(found, list(found))
    assert "bn, pipeline: worse at N=8 (-2.00 ± 0.06)." in sentences
    assert "group, pipeline: equal within the spread at N=8 (+0.00 ± 0.00)." in sentences
