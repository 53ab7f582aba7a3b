import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_hetpipe.errors import ScheduleError
from lightning_hetpipe.graph import Route
from lightning_hetpipe.schedule import Action, Kind, grid, make_schedule, validate


def route(source: int, target: int, gradient: bool = True) -> Route:
    return Route(source, target, ("v",), ("v",) if gradient else ())


CHAIN3 = (route(-1, 0, False), route(0, 1), route(1, 2))
READER3 = (route(-1, 0), route(0, 1), route(1, 2))


def three(name: str = "1f1b", *, m: int = 4, in_flight=(3, 2, 1), routes=CHAIN3, **options):
    return make_schedule(
        name,
        ranks_of_stage=((1,), (2,), (0,)),
        n_ranks=3,
        n_micro_batches=m,
        in_flight=in_flight,
        routes=routes,
        **options,
    )


def drawn(picture: str) -> str:
    return "\n".join(line.strip() for line in picture.strip().splitlines())


def test_one_f_one_b_is_the_schedule_of_its_picture() -> None:
    assert grid(three(), CHAIN3) == drawn("""
        rank 0  rF0 rF1 rF2 rF3 2F0 2B0 2F1 2B1 2F2 2B2 2F3 2B3   .   .
        rank 1    . 0F0 0F1 0F2   .   .   . 0B0 0F3 0B1   . 0B2   . 0B3
        rank 2    .   . 1F0 1F1   .   . 1B0 1F2 1B1 1F3 1B2   . 1B3   .
    """)


def test_gpipe_is_the_schedule_of_its_picture() -> None:
    assert grid(three("gpipe", m=3), CHAIN3) == drawn("""
        rank 0  rF0 rF1 rF2 2F0 2F1 2F2 2B0 2B1 2B2   .   .
        rank 1    . 0F0 0F1 0F2   .   .   .   . 0B0 0B1 0B2
        rank 2    .   . 1F0 1F1 1F2   .   . 1B0 1B1 1B2   .
    """)


def test_the_last_stage_starts_with_the_backward_of_the_first_micro_batch() -> None:
    computed = [str(action) for action in three().actions[0] if action.stage == 2 and action.kind.is_compute]
    assert computed == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"]


def test_a_skip_goes_straight_to_its_consumer_and_its_gradient_straight_back() -> None:
    schedule = three(m=1, in_flight=(1, 1, 1), routes=(*CHAIN3, route(0, 2)))
    rows = ["rF0,rSEND_F0,2RECV_F0:0,2RECV_F0,2F0,2B0,2SEND_B0:0,2SEND_B0"]
    rows += ["0RECV_F0,0F0,0SEND_F0,0SEND_F0:2,0RECV_B0,0RECV_B0:2,0B0"]
    rows += ["1RECV_F0,1F0,1SEND_F0,1RECV_B0,1B0,1SEND_B0"]
    assert schedule.to_csv().splitlines() == rows


def test_one_rank_alone_sends_nothing() -> None:
    schedule = make_schedule(
        "1f1b", ranks_of_stage=((0,),), n_ranks=1, n_micro_batches=2, in_flight=(1,), routes=(route(-1, 0),)
    )
    assert schedule.to_csv() == "rF0,0F0,0B0,rB0,rF1,0F1,0B1,rB1"


def test_the_reader_goes_back_only_where_a_gradient_reaches_it() -> None:
    def reader(routes) -> list[str]:
        return [str(a) for a in three(routes=routes).actions[0] if a.stage == -1 and a.kind is Kind.B]

    assert reader(CHAIN3) == []
    assert reader(READER3) == ["rB0", "rB1", "rB2", "rB3"]


def test_the_reader_goes_back_once_stage_0_must_be_through() -> None:
    text = ",".join(str(a) for a in three(m=6, routes=READER3).actions[0] if a.kind.is_compute)
    assert (
        text
        == "rF0,rF1,rF2,rF3,2F0,2B0,rF4,2F1,2B1,rF5,2F2,2B2,2F3,2B3,rB0,2F4,2B4,rB1,2F5,2B5,rB2,rB3,rB4,rB5"
    )


def test_evaluation_has_no_backward() -> None:
    schedule = three(training=False, routes=READER3, reduce=(0,))
    assert {action.kind for row in schedule.actions for action in row} == {Kind.F, Kind.SEND_F, Kind.RECV_F}


def test_members_of_a_group_have_one_list() -> None:
    schedule = make_schedule(
        "1f1b",
        ranks_of_stage=((1, 2), (0, 3)),
        n_ranks=5,
        n_micro_batches=3,
        in_flight=(2, 1),
        routes=(route(-1, 0), route(0, 1), route(-1, 1, False)),
        reduce=(0, 1),
    )
    assert schedule.actions[1] == schedule.actions[2]
    assert tuple(a for a in schedule.actions[0] if a.stage == 1) == schedule.actions[3]
    assert schedule.actions[4] == ()
    assert all(str(schedule.actions[rank][-1]) == f"{stage}REDUCE_GRAD" for rank, stage in ((1, 0), (3, 1)))


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_every_shape_of_pipeline_gets_a_schedule_that_runs(data) -> None:
    n = data.draw(st.integers(1, 6))
    m = data.draw(st.integers(1, 9))
    in_flight = sorted(data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n)), reverse=True)
    skips = data.draw(st.sets(st.tuples(st.integers(-1, n - 1), st.integers(0, n - 1)), max_size=5))
    edges = {(s, s + 1) for s in range(-1, n - 1)} | {(a, b) for a, b in skips if a < b}
    routes = tuple(route(a, b, data.draw(st.booleans())) for a, b in sorted(edges))
    sizes = data.draw(st.lists(st.integers(1, 2), min_size=n, max_size=n))
    ranks, groups = 0, []
    for size in reversed(sizes):
        groups.insert(0, tuple(range(ranks, ranks + size)))
        ranks += size
    make_schedule(
        data.draw(st.sampled_from(["gpipe", "1f1b"])),
        ranks_of_stage=groups,
        n_ranks=ranks,
        n_micro_batches=m,
        in_flight=in_flight,
        routes=routes,
        reduce=range(n),
        training=data.draw(st.booleans()),
    )


def edited(edit) -> str:
    """The complaint about a schedule after one row was edited."""
    schedule = three()
    rows = [list(row) for row in schedule.actions]
    edit(rows)
    with pytest.raises(ScheduleError, match=schedule.name) as caught:
        validate(dataclasses.replace(schedule, actions=tuple(map(tuple, rows))), CHAIN3, in_flight=(3, 2, 1))
    return str(caught.value)


def swap(row: list, a: str, b: str) -> None:
    i, j = row.index(Action.parse(a)), row.index(Action.parse(b))
    row[i], row[j] = row[j], row[i]


def test_a_missing_action_is_named() -> None:
    assert "rank 1 lacks 0F2" in edited(lambda rows: rows[1].remove(Action.parse("0F2")))


def test_an_action_that_comes_twice_is_named_and_marked() -> None:
    text = edited(lambda rows: rows[2].append(Action.parse("1B3")))
    assert "rank 2 has 1B3 twice" in text
    assert ">1B3<" in text


def test_an_action_of_another_rank_is_named() -> None:
    assert "rank 2 has 0F0, which its stages never need" in edited(
        lambda rows: rows[2].append(Action.parse("0F0"))
    )


def test_a_backward_before_its_forward_is_named() -> None:
    assert "rank 0 has 2B1 before 2F1" in edited(lambda rows: swap(rows[0], "2B1", "2F1"))


def test_messages_out_of_order_are_named_at_both_ends() -> None:
    text = edited(lambda rows: swap(rows[1], "0SEND_F0", "0SEND_F1"))
    assert "rank 1 sends micro-batch 1 where rank 2 receives 0" in text
    assert text.count(">") == 2


def test_a_deadlock_names_who_waits_for_whom() -> None:
    def wait_early(rows) -> None:
        rows[2].remove(Action.parse("1RECV_B0"))
        rows[2].insert(0, Action.parse("1RECV_B0"))

    text = edited(wait_early)
    assert "nothing can move any more" in text
    assert "rank 2 waits in 1RECV_B0 for 2SEND_B0 of rank 0" in text


def test_holding_more_than_the_limit_is_refused() -> None:
    schedule = three("gpipe")
    with pytest.raises(ScheduleError, match="stage 2 holds 2 micro-batches at 2F1, its limit is 1"):
        validate(schedule, CHAIN3, in_flight=(4, 4, 1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"in_flight": (1, 2, 1)}, "grows along the stages"),
        ({"in_flight": (2, 1)}, "at least 1 for each of 3 stages"),
        ({"m": 0}, "0 micro-batches"),
        ({"name": "zb"}, "schedule 'zb' is unknown"),
    ],
)
def test_impossible_requests_are_refused(change, message) -> None:
    with pytest.raises(ScheduleError, match=message):
        three(**change)


def test_the_last_stage_must_be_on_rank_0() -> None:
    with pytest.raises(ScheduleError, match="last stage must be on rank 0"):
        make_schedule(
            "gpipe",
            ranks_of_stage=((0,), (1,)),
            n_ranks=2,
            n_micro_batches=1,
            in_flight=(1, 1),
            routes=(route(0, 1),),
        )


def rounds(ranks=(1, 0, 1, 0), n_ranks=2, *, m=4, in_flight=(4, 3, 3, 2), **options):
    chain = (route(-1, 0), *(route(i, i + 1) for i in range(len(ranks) - 1)))
    made = make_schedule(
        "interleaved",
        ranks_of_stage=tuple((rank,) for rank in ranks),
        n_ranks=n_ranks,
        n_micro_batches=m,
        in_flight=in_flight,
        routes=chain,
        **options,
    )
    return made, chain


def test_interleaved_is_the_schedule_of_its_picture() -> None:
    made, chain = rounds(in_flight=(4, 4, 3, 2))
    assert grid(made, chain, width=21) == drawn("""
        rank 0  rF0 rF1 rF2 rF3 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3 rB0 ...
        rank 1    . 0F0 0F1   .   . 2F0 2F1 0F2 0F3 2B0 2B1 2F2 0B0 2F3 0B1   . 2B2   . 2B3 0B2 0B3 ...
    """)


def test_the_last_of_interleaved_stages_follows_each_forward_by_its_backward() -> None:
    made, _ = rounds(m=8)
    row = [str(action) for action in made.actions[0] if action.kind.is_compute and action.stage >= 0]
    assert all(row[row.index(f"3F{m}") + 1] == f"3B{m}" for m in range(8))


@settings(max_examples=80, deadline=None)
@given(st.data())
def test_interleaved_runs_to_its_end_for_any_places_and_limits(data) -> None:
    n_ranks = data.draw(st.integers(2, 4))
    ranks = [data.draw(st.integers(0, n_ranks - 1))]
    for _ in range(data.draw(st.integers(1, 7))):
        ranks.append(data.draw(st.integers(0, n_ranks - 1).filter(lambda rank: rank != ranks[-1])))
    if ranks[-1] != 0:
        ranks.append(0)
    limits = tuple(data.draw(st.integers(1, 5)) for _ in ranks)
    training = data.draw(st.booleans())
    made, chain = rounds(
        tuple(ranks), n_ranks, m=data.draw(st.integers(1, 9)), in_flight=limits, training=training
    )
    validate(made, chain, in_flight=limits if training else None)


def test_what_cannot_interleave_is_refused() -> None:
    with pytest.raises(ScheduleError, match="interleaved stages cannot be shared"):
        make_schedule(
            "interleaved",
            ranks_of_stage=((1, 2), (0,)),
            n_ranks=3,
            n_micro_batches=2,
            in_flight=(2, 1),
            routes=(),
        )
    with pytest.raises(ScheduleError, match="the schedule must be interleaved"):
        make_schedule(
            "1f1b",
            ranks_of_stage=((0,), (1,), (0,)),
            n_ranks=2,
            n_micro_batches=2,
            in_flight=(1, 1, 1),
            routes=(),
        )
