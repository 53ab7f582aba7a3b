import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import READER
from lightning_hetpipe.schedule.action import Action, Kind
from lightning_hetpipe.timeline import Span, Timeline

TRANSFERS = [kind for kind in Kind if kind.is_send or kind.is_receive]
STAGES = st.integers(READER, 20)
ACTIONS = st.one_of(
    st.builds(Action, STAGES, st.sampled_from([k for k in Kind if k.is_compute]), st.integers(0, 99)),
    st.builds(Action, STAGES, st.just(Kind.REDUCE_GRAD)),
    st.builds(Action, STAGES, st.sampled_from(TRANSFERS), st.integers(0, 99), STAGES),
)


@given(ACTIONS)
def test_an_action_parses_what_it_prints(action: Action) -> None:
    assert Action.parse(str(action)) == action


def test_neighbours_need_no_peer_and_the_reader_is_r() -> None:
    assert str(Action(READER, Kind.SEND_F, 3, 0)) == "rSEND_F3"
    assert str(Action(0, Kind.RECV_F, 3, READER)) == "0RECV_F3"
    assert str(Action(0, Kind.SEND_F, 3, 2)) == "0SEND_F3:2"


@given(st.builds(Action, STAGES, st.sampled_from(TRANSFERS), st.integers(0, 9), STAGES))
def test_the_counterpart_of_the_counterpart_is_the_action(action: Action) -> None:
    assert action.counterpart.counterpart == action


@pytest.mark.parametrize("text", ["", "F0", "2X0", "2F", "2REDUCE_GRAD1", "2F0:1", "-1F0"])
def test_what_is_not_an_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match=r"action such as|takes|only a transfer"):
        Action.parse(text)


TIMELINE = Timeline(
    (Span(0, "0F0", 1.0, 2.0), Span(1, "1F0", 2.0, 5.0), Span(1, "1RECV_F0", 1.0, 2.0, False)), 2, "simulated"
)


def test_busy_counts_computing_only() -> None:
    assert TIMELINE.step_s == 4.0
    assert TIMELINE.busy == (0.25, 0.75)


def test_an_empty_timeline_lasts_no_time() -> None:
    assert Timeline((), 2, "measured").busy == (0.0, 0.0)


def test_the_chrome_trace_keeps_names_and_times(tmp_path: Path) -> None:
    TIMELINE.to_chrome_trace(tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["tid"], e["ts"], e["dur"]) for e in spans][1] == ("1F0", 1, 2e6, 3e6)
