"""The plan beside everything it should be measured against."""

from typing import Any

from lightning_hetpipe.cluster import Cluster
from lightning_hetpipe.planner.search import make_plan
from lightning_hetpipe.plans import Alternative
from lightning_hetpipe.profiles import Profile


def compare(profile: Profile, cluster: Cluster, batch_size: int, **options: Any) -> tuple[Alternative, ...]:
    """The plan, its baselines, and the bound that no plan passes.

    Args:
        options: As for `make_plan`.

    Returns:
        The plan first; the bound, ``Σ 1/T_d``, last.

    Raises:
        InfeasibleError: Nothing fits.
    """
    plan = make_plan(profile, cluster, batch_size, **options)
    assert plan.prediction is not None
    prediction = plan.prediction
    note = f"{len(plan.stages)} stages, micro-batch {plan.micro_batch}, {plan.schedule}"
    memory_bytes = max(prediction.memory_bytes, default=0)
    bound = prediction.images_per_s_bound
    return (
        Alternative("the plan", prediction.images_per_s, prediction.step_s, memory_bytes, note),
        *plan.alternatives,
        Alternative("all devices, never waiting (bound)", bound, batch_size / bound, note="not a plan"),
    )
