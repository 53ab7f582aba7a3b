import pytest

from lightning_hetpipe.engine.order import taken_sends
from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import READER, Route
from lightning_hetpipe.schedule import Action, Schedule, make_schedule

ROUTES = (Route(READER, 0, ("x",), ()), Route(0, 1, ("a",), ("a",)), Route(1, 2, ("b",), ("b",)))


def schedule_of(name: str, m: int, training: bool = True) -> Schedule:
    return make_schedule(
        name,
        ranks_of_stage=((1,), (2,), (0,)),
        n_ranks=3,
        n_micro_batches=m,
        in_flight=(3, 2, 1),
        routes=ROUTES,
        training=training,
    )


def proofs(schedule: Schedule, rank: int) -> dict[str, list[str]]:
    taken = taken_sends(schedule, rank)
    return {str(a): [str(s) for s in sends] for a, sends in zip(schedule.actions[rank], taken) if sends}


def test_a_returning_gradient_proves_that_its_value_was_taken() -> None:
    found = proofs(schedule_of("1f1b", 4), 1)
    assert found["0RECV_B0"][0] == "0SEND_F0"


def test_a_next_value_proves_that_an_earlier_gradient_was_taken() -> None:
    found = proofs(schedule_of("1f1b", 8), 2)
    assert any("1SEND_B0" in sends for action, sends in found.items() if "RECV_F" in action)


def test_held_messages_stay_bounded_in_a_forward_only_schedule() -> None:
    schedule = schedule_of("gpipe", 40, training=False)
    for rank in range(3):
        held = most = 0
        for action, sends in zip(schedule.actions[rank], taken_sends(schedule, rank)):
            held += action.kind.is_send - len(sends)
            most = max(most, held)
        assert most < 12, f"rank {rank} holds up to {most} messages"


def test_no_send_is_proved_before_it_happened_or_twice() -> None:
    schedule = schedule_of("1f1b", 6)
    for rank in range(3):
        seen: set[Action] = set()
        proved: list[Action] = []
        for action, sends in zip(schedule.actions[rank], taken_sends(schedule, rank)):
            assert seen.issuperset(sends)
            proved.extend(sends)
            if action.kind.is_send:
                seen.add(action)
        assert len(proved) == len(set(proved))


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    rows = tuple(
        tuple(map(Action.parse, row.split(",")))
        for row in ("1RECV_F0,1F0,1B0,1SEND_B0", "0F0,0RECV_B0,0B0,0SEND_F0")
    )
    circle = Schedule("circle", rows, ((1,), (0,)), 1)
    with pytest.raises(ScheduleError, match="rank 0 would wait forever at 1RECV_F0"):
        taken_sends(circle, 0)
