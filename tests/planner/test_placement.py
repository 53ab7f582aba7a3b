import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_hetpipe.planner.chain import Chain, MemoryTables, fill_s, longest
from lightning_hetpipe.planner.placement import Budget, place


def best_by_hand(chain: Chain) -> float:
    """All orders x cuts x subsets, and every period at which each fits."""
    n = chain.n_layers
    devices = [
        choice for choice, count in enumerate(chain.available[: chain.n_choices]) for _ in range(count)
    ]
    runs = [(c, i, j) for c in range(chain.n_choices) for i in range(n) for j in range(i + 1, n + 1)]
    periods = sorted(
        {chain.run_s(*run) for run in runs if chain.allowed is None or chain.allowed[run]}
        | set(chain.occupied_s[:, :, 1:-1].ravel().tolist())
    )
    best = np.inf
    for p in range(1, min(len(devices), n) + 1):
        if chain.n_stages not in (None, p):
            continue
        for order in set(itertools.permutations(devices, p)):
            if not np.isfinite(chain.last_s[order[-1]]) or not all(chain.inner[c] for c in order[:-1]):
                continue
            for cuts in itertools.combinations(range(1, n), p - 1):
                starts = (0, *cuts)
                shortest = longest(chain, starts, order)
                for period in periods:
                    if period >= shortest and fits_by_hand(chain, starts, order, period):
                        cost = fill_s(chain, starts, order) + (chain.n_micro_batches - 1) * period
                        best = min(best, cost)
                        break
    return best


def fits_by_hand(chain, starts, order, period) -> bool:
    memory, n, m = chain.memory, chain.n_layers, chain.n_micro_batches
    if memory is None:
        return True
    stops = (*starts[1:], n)
    seconds = [chain.run_s(*run) for run in zip(order, starts, stops)]
    hops = [float(chain.hop_s[u, v, cut]) for u, v, cut in zip(order, order[1:], starts[1:])]
    if chain.depth == "all":
        counts = [m] * len(order)
    elif chain.depth == "shallow":
        counts = [min(m, len(order) - s) for s in range(len(order))]
    elif chain.depth == "serial":
        counts = [1] * len(order)
    else:
        counts = [1]
        for t, hop in zip(reversed(seconds[:-1]), reversed(hops)):
            counts.insert(0, min(m, counts[0] + max(1, int(np.ceil((t + hop) / period - 1e-9)))))
    for choice, i, j, k in zip(order, starts, stops, counts):
        if k >= m:
            need = memory.every[choice, i, j]
        else:
            filled = memory.fill[choice, i, j] + k * (memory.kept[i, j] + memory.sent[i, j])
            need = max(memory.steady[choice, i, j] + k * memory.kept[i, j], filled)
            need = max(need, memory.optimizer[choice, i, j])
        if need > memory.limit[choice]:
            return False
    return True


def tables(rng, n: int, n_choices: int, m: int) -> MemoryTables:
    """Random needs that grow with the layers and with what is in flight."""
    weights, saved = (np.append(0, rng.uniform(0, most, n).cumsum()) for most in (2, 1))
    kept = saved[None, :] - saved[:, None] + np.append(rng.uniform(0, 0.5, n), 0)[None, :]
    sent = np.broadcast_to(np.append(rng.uniform(0, 0.3, n), 0)[None, :], kept.shape)
    state = (weights[None, :] - weights[:, None])[None] * rng.uniform(0.9, 1.1, n_choices)[:, None, None]
    steady = state + rng.uniform(0, 0.5, (n + 1, 1)) + rng.uniform(0, 0.5, (1, n + 1))
    steady[:, :, -1] += rng.uniform(0, 1)
    return MemoryTables(
        every=np.maximum(steady + m * kept, 0.8 * state + m * (kept + sent)),
        steady=steady,
        fill=0.8 * state,
        optimizer=1.1 * state,
        kept=kept,
        sent=sent,
        n_micro_batches=m,
        limit=rng.uniform(1, 12, n_choices),
        grows=weights + m * saved,
        crosses=np.zeros((3, n + 1)),
    )


@st.composite
def chains(draw) -> Chain:
    seed = draw(st.integers(0, 10**6))
    rng = np.random.default_rng(seed)
    n, n_choices = draw(st.integers(1, 7)), draw(st.integers(1, 4))
    counts = [draw(st.integers(1, 2)) for _ in range(n_choices)]
    while sum(counts) > 4:
        counts[int(np.argmax(counts))] -= 1
    speed = rng.choice([1, 1, 2, 4, 8], n_choices)
    layers = rng.uniform(0.2, 3, n)[None] / speed[:, None] * rng.uniform(0.85, 1.15, (n_choices, n))
    if draw(st.booleans()):
        layers = np.ceil(layers * 2) / 2  # ties
    seconds = np.concatenate([np.zeros((n_choices, 1)), layers.cumsum(axis=1)], axis=1)
    hop = rng.uniform(0, draw(st.sampled_from([0.0, 0.5, 4.0])), (n_choices, n_choices, n + 1))
    hop[:, :, [0, -1]] = 0
    memory, m = None, draw(st.sampled_from([1, 2, 4, 8, 16]))
    if draw(st.booleans()):
        memory = tables(rng, n, n_choices, m)
    pinned = draw(st.booleans())
    last_s = np.full(n_choices, rng.uniform(0, 1))
    inner = np.ones(n_choices, dtype=bool)
    if pinned:
        counts[0] = 1
        last_s[1:] = np.inf
        inner[0] = False
    uses, available = np.eye(n_choices, dtype=np.int64), np.array(counts)
    n_stages = draw(st.sampled_from([None, None, None, 2, 3]))
    if n_stages is not None:
        uses = np.column_stack([uses, np.ones(n_choices, dtype=np.int64)])
        available = np.append(available, n_stages)
    return Chain(
        seconds=seconds,
        hop_s=hop,
        occupied_s=hop * rng.uniform(0.3, 0.9),
        uses=uses,
        available=available,
        n_micro_batches=m,
        last_s=last_s,
        inner=inner,
        memory=memory,
        n_stages=n_stages,
        depth=draw(st.sampled_from(["safe", "all", "shallow", "serial"])),
    )


@settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains())
def test_no_order_cut_or_subset_beats_the_search(chain: Chain) -> None:
    result = place(chain)
    expected = best_by_hand(chain)
    if not np.isfinite(expected):
        assert not result.found
    else:
        assert result.found[0].objective_s == pytest.approx(expected, rel=1e-9)
        assert result.bound_s == pytest.approx(expected, rel=1e-6)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(chains())
def test_the_bound_of_a_hurried_search_holds(chain: Chain) -> None:
    result = place(chain, tolerance=0.05, budget=Budget(labels=2, searches=3, rounds=2))
    assert result.bound_s <= best_by_hand(chain) * (1 + 1e-9)
