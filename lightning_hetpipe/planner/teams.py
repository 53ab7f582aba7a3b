"""Which devices might share a stage: disjoint teams, the most promising first."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np

from lightning_hetpipe.planner.candidates import Setting

MOST = 8  # members of a team
Teams = tuple[tuple[str, ...], ...]


def teams_to_try(setting: Setting) -> Iterator[Teams]:
    """Disjoint teams of devices, the most promising first: of one kind, or neighbours among the slowest."""
    profile = setting.profile
    size = setting.batch_size
    seconds = {
        device.name: float(sum(map(np.sum, profile.device(device.name).layer_seconds(size))))
        for device in setting.cluster.devices
    }
    kinds: dict[object, list[str]] = defaultdict(list)
    for device in sorted(setting.cluster.devices, key=lambda device: device.host):
        kinds[device.kind_key].append(device.name)
    slowest_first = sorted(
        (names for names in kinds.values() if len(names) > 1), key=lambda n: -seconds[n[0]]
    )
    per_kind = [list(_divisions(names)) for names in slowest_first]
    options: list[Teams] = [teams for divisions in per_kind for teams in divisions]
    options += [(*one[0], *other[0]) for one, other in combinations(per_kind, 2)]
    by_speed = sorted(seconds, key=lambda name: -seconds[name])
    counts = [count for count in (2, 3, len(by_speed)) if count <= min(len(by_speed), MOST)]
    options += [(tuple(by_speed[:count]),) for count in counts]
    seen: set[Teams] = set()
    for teams in options:
        key = tuple(sorted(tuple(sorted(team)) for team in teams))
        if key not in seen:
            seen.add(key)
            yield teams


def _divisions(names: Sequence[str]) -> Iterator[Teams]:
    """All of them, pairs, halves, and some of them."""
    n = len(names)
    if n <= MOST:
        yield (tuple(names),)
    if n >= 4:
        yield tuple(tuple(names[i : i + 2]) for i in range(0, n - 1, 2))
    if n >= 6:
        for half in (3, n // 2):
            if half <= MOST:
                yield tuple(tuple(names[i : i + half]) for i in range(0, n - half + 1, half))
    for count in (2, 3):
        if n > count:
            yield (tuple(names[-count:]),)
