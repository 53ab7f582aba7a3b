import pytest
import torch

from lightning_hetpipe.engine.message import Layout
from lightning_hetpipe.errors import StepError
from tests.helpers.toy import Spec

HOST = torch.device("cpu")
SPECS = {
    "image": Spec((2, 3), torch.float64, True),
    "mask": Spec((5,), torch.bool, False),
    "half": Spec((3,), torch.bfloat16, True),
    "none": Spec((0, 4), torch.float32, True),
    "count": Spec((), torch.int64, False),
}
VALUES = {
    "image": torch.arange(6.0, dtype=torch.float64).view(3, 2).t(),
    "mask": torch.tensor([True, False, True, True, False]),
    "half": torch.tensor([1, 2, 3], dtype=torch.bfloat16),
    "none": torch.empty(0, 4),
    "count": torch.tensor(7),
}


@pytest.mark.parametrize("stamped", [False, True])
def test_tensors_of_several_dtypes_travel_in_one_buffer(stamped: bool) -> None:
    layout = Layout.of(list(SPECS), SPECS, stamped=stamped)
    buffer = layout.pack(VALUES, HOST, "0SEND_F0")
    assert buffer.is_contiguous()
    assert buffer.shape == layout.empty(HOST).shape
    if stamped:
        layout.stamp(buffer, 12.5)
        assert layout.read_stamp(buffer) == 12.5
    for name, value in layout.unpack(buffer, HOST).items():
        torch.testing.assert_close(value, VALUES[name], rtol=0, atol=0)


def test_a_single_contiguous_tensor_is_not_copied() -> None:
    layout = Layout.of(["half"], SPECS)
    assert layout.pack(VALUES, HOST, "").data_ptr() == VALUES["half"].data_ptr()


def test_a_single_transposed_tensor_is_made_contiguous() -> None:
    layout = Layout.of(["image"], SPECS)
    buffer = layout.pack(VALUES, HOST, "")
    assert buffer.is_contiguous()
    torch.testing.assert_close(buffer, VALUES["image"])


def test_a_message_of_no_values_is_empty() -> None:
    assert Layout.of([], SPECS, stamped=True).size_bytes == 0


@pytest.mark.parametrize(
    "wrong", [torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, 3, dtype=torch.float32)]
)
def test_a_value_that_differs_from_the_plan_is_refused_by_its_sender(wrong: torch.Tensor) -> None:
    with pytest.raises(StepError, match=r"1SEND_F2 made 'image' with shape .* but the plan says \(2, 3\)"):
        Layout.of(["image"], SPECS).pack({"image": wrong}, HOST, "1SEND_F2")
