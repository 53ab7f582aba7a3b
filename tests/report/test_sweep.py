import io

from rich.console import Console

from lightning_hetpipe.report.sweep import sweep_table


def test_a_sweep_shows_only_what_was_varied_and_a_dash_for_a_job_that_failed():
    jobs = [
        (["cluster=twins", "micro_batch=4"], {"images_per_s": 10.0}),
        (["cluster=twins", "micro_batch=8"], {}),
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(sweep_table(jobs))
    rows = [line.split() for line in console.file.getvalue().splitlines() if "micro_batch" in line]
    assert rows == [["micro_batch=4", "10"], ["micro_batch=8", "-"]]
