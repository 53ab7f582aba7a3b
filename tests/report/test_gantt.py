import subprocess
import sys

import pytest

from lightning_hetpipe.report import save_gantt
from lightning_hetpipe.timeline import Span, Timeline

SPANS = (
    Span(0, "1RECV_F0", 0.0, 1.0, compute=False),
    Span(0, "1F0", 1.0, 2.0),
    Span(0, "1B0", 2.0, 4.0),
    Span(1, "0F0", 0.0, 1.0),
    Span(1, "0B0", 4.0, 6.0),
)


def test_the_text_picture_has_one_row_per_rank_with_actions_to_scale():
    picture = Timeline(SPANS, 2, "simulated").gantt(width=24)
    assert picture.splitlines() == [
        "simulated: 6 s per step",
        "rank 0 |····1F0─1B0═════        |  50 %",
        "rank 1 |0F0─            0B0═════|  50 %",
    ]


def test_the_text_picture_of_an_empty_step_is_blank():
    assert Timeline((), 1, "measured").gantt(width=4).splitlines()[1] == "rank 0 |    |   0 %"


def test_spans_narrower_than_a_column_still_show():
    spans = (Span(0, "0F0", 0.0, 1e-6), Span(0, "0B0", 1.0, 1.0 + 1e-6))
    row = Timeline(spans, 1, "measured").gantt(width=10).splitlines()[1]
    assert row == "rank 0 |─        ═|   0 %"


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_the_picture_shows_planned_and_measured(tmp_path, suffix):
    path = tmp_path / f"gantt.{suffix}"
    measured = Timeline(SPANS, 2, "measured")
    save_gantt([Timeline(SPANS, 2, "simulated"), measured], path, ["fast", "old"])
    assert path.stat().st_size > 1000


def test_matplotlib_is_imported_only_to_draw():
    code = "import sys, lightning_hetpipe.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
