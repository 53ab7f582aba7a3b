import io

import pytest
from hydra.core.utils import JobReturn
from omegaconf import OmegaConf
from rich.console import Console

from lightning_hetpipe.report.sweep import SweepTable, curves, save_sweep, sweep_table


def shown(jobs) -> list[list[str]]:
    console = Console(file=io.StringIO(), width=120)
    console.print(sweep_table(jobs))
    return [line.split() for line in console.file.getvalue().splitlines() if "micro_batch=" in line]


def figures(size: int, images: float, **more: float) -> dict[str, float]:
    return {"micro_batch": size, "micro_batch_auto": 8, "images_per_s": images, **more}


GRID = [
    ([f"micro_batch={size}", f"cluster={name}", "max_epochs=1"], figures(size, size * factor))
    for size in (16, 4, 8)
    for name, factor in (("lab4", 1.0), ("edge6", 2.0))
]


def test_a_sweep_shows_only_what_was_varied_and_a_dash_for_a_job_that_failed():
    jobs = [
        (["cluster=twins", "micro_batch=4"], {"images_per_s": 10.0}),
        (["cluster=twins", "micro_batch=8"], {}),
    ]
    assert shown(jobs) == [["micro_batch=4", "10"], ["micro_batch=8", "-"]]


def test_the_jobs_with_the_size_that_auto_takes_are_marked():
    rows = shown(GRID)
    assert [row for row in rows if "<--" in row] == [
        ["micro_batch=8", "cluster=lab4", "<--", "8", "8"],
        ["micro_batch=8", "cluster=edge6", "<--", "8", "16"],
    ]
    assert len(rows) == 6


def test_curves_run_along_the_numbers_one_for_each_of_the_rest():
    axis, lines = curves(GRID)
    assert axis == "micro_batch"
    found = {name: [(x, each["images_per_s"]) for x, each in points] for name, points in lines.items()}
    assert found == {
        "cluster=lab4": [(4, 4.0), (8, 8.0), (16, 16.0)],
        "cluster=edge6": [(4, 8.0), (8, 16.0), (16, 32.0)],
    }


def test_a_job_that_is_no_number_or_failed_is_in_no_curve():
    jobs = [*GRID[:3], (["micro_batch=auto", "cluster=lab4"], figures(8, 9.0)), (["micro_batch=2"], {})]
    _, lines = curves(jobs)
    assert sum(map(len, lines.values())) == 3


def test_the_picture_is_written_where_there_is_something_to_draw(tmp_path):
    jobs = [(overrides, {**each, "images_per_s_predicted": 5.0}) for overrides, each in GRID]
    assert save_sweep(jobs, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 1000
    assert not save_sweep(jobs[:1], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_sweeper_that_searches_gets_the_one_figure_it_is_after():
    config = OmegaConf.create({"hydra": {"overrides": {"task": ["micro_batch=4"]}}})
    callback, job = SweepTable("images_per_s"), JobReturn()
    job.return_value = figures(4, 10.0)
    callback.on_job_end(config, job)
    assert job._return_value == 10.0
    assert callback.jobs == [(["micro_batch=4"], figures(4, 10.0))]
    job.return_value = {"step_s": 1.0}
    with pytest.raises(ValueError, match="objective=images_per_s is no figure of a job; it has step_s"):
        callback.on_job_end(config, job)
