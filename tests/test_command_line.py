import json
import sys
from dataclasses import replace

import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_hetpipe.__main__ import main
from lightning_hetpipe.plans import Plan
from tests.helpers.synthetic import make_graph, make_profile, make_sharing


@pytest.fixture
def hetpipe(tmp_path, monkeypatch, capsys):
    """Runs one command in an empty folder; returns its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "160")

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hetpipe", *words])
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = stop.code
            if isinstance(code, str):
                print(code, file=sys.stderr)
        finally:
            GlobalHydra.instance().clear()
        return code, *capsys.readouterr()

    return run


def test_help_lists_commands_models_and_clusters_and_leaves_no_files(hetpipe, tmp_path):
    code, shown, _ = hetpipe("--help")
    assert not code
    for word in ("profile", "compare", "resnet18", "lab4", "hetpipe16", "micro_batch: auto"):
        assert word in shown
    assert list(tmp_path.iterdir()) == []


def test_groups_are_planned_as_the_command_line_says(hetpipe, tmp_path):
    graph = make_graph(4)
    profile = replace(make_profile(graph, (0.5, 0.5)), sharing=make_sharing(graph, work=1e7))
    twins = tuple(replace(each, device=f"twin{i}") for i, each in enumerate(profile.devices, start=1))
    replace(profile, devices=twins).save(tmp_path / "twins.json")
    words = ("plan", "cluster=twins", "profile=twins.json", "batch_size=8", "format=json")
    for merge, groups in (("auto", 1), ("never", 0), ("[[twin1,twin2]]", 1)):
        code, shown, _ = hetpipe(*words, f"merge={merge}")
        assert not code
        assert sum(stage.split != "none" for stage in Plan.from_json(shown).stages) == groups
    code, _, errors = hetpipe(*words, "merge=[[twin1,twin3]]")
    assert code
    assert "device 'twin3' is not in cluster 'twins'" in errors


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what to do: hetpipe profile | plan | compare | simulate | train"),
        (("paln",), "say what to do"),
        (("plan", "cluster=lab5"), "Could not find 'cluster/lab5'"),
        (("plan", "microbatch=4"), "Key 'microbatch' is not in struct"),
        (("plan", "profile=none.json"), "profile none.json cannot be read"),
        (("simulate", "plan=none.json"), "plan none.json cannot be read"),
        (("plan", "cluster.devices.0.speed=2"), "a device can only be slowed down"),
        (("plan", "cluster=mixed3"), "profile=analytic"),
        (("profile", "model.module.num_classes=many"), "the model cannot be built"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_request_ends_with_one_clear_message_and_no_traceback(hetpipe, words, message):
    code, _, errors = hetpipe(*words)
    assert code
    assert message in errors
    assert "Traceback" not in errors


@pytest.fixture
def profile(hetpipe, tmp_path):
    """A profile of VGG-11 on three GPUs, from their data sheets."""
    words = ("model=vgg11", "cluster=mixed3", "profile=analytic", "out=profile.json")
    code, _, errors = hetpipe("profile", *words)
    assert code == 0, errors
    return tmp_path / "profile.json"


def test_a_plan_made_from_a_profile_file_is_a_plan_on_its_standard_output(hetpipe, profile):
    code, shown, _ = hetpipe("plan", "cluster=mixed3", f"profile={profile}", "format=json")
    assert code == 0
    plan = Plan.from_json(shown)
    assert plan.cluster.name == "mixed3"
    assert plan.prediction.images_per_s > 0


def test_plan_shows_its_stages_what_it_rejected_and_why(hetpipe, profile):
    code, shown, _ = hetpipe("plan", "cluster=mixed3", f"profile={profile}")
    assert code == 0
    for word in ("mixed3: batch 64", "stage", "a100", "images/s", "why:"):
        assert word in shown


def test_simulate_draws_the_plan_it_is_given(hetpipe, profile):
    assert hetpipe("plan", "cluster=mixed3", f"profile={profile}", "micro_batch=16", "out=plan.json")[0] == 0
    code, shown, _ = hetpipe("simulate", "plan=plan.json", f"profile={profile}")
    assert code == 0
    assert "in 4 micro-batches of 16" in shown
    assert "rank 0 |" in shown


def test_compare_lists_every_baseline(hetpipe, profile):
    code, shown, _ = hetpipe("compare", "cluster=mixed3", f"profile={profile}", "format=json")
    assert code == 0
    names = " ".join(row["name"] for row in json.loads(shown))
    for word in ("single", "even", "data-parallel", "bound"):
        assert word in names


def test_a_sweep_ends_in_one_table(hetpipe, profile):
    code, shown, _ = hetpipe("plan", "cluster=mixed3", f"profile={profile}", "micro_batch=8,16", "-m")
    assert code == 0
    table = shown[shown.rindex("Sweep") :]
    assert "micro_batch=8" in table
    assert "micro_batch=16" in table
    assert "images_per_s" in table


def test_a_profile_of_another_cluster_is_refused_by_name(hetpipe, profile):
    code, _, errors = hetpipe("plan", "cluster=lab4", f"profile={profile}")
    assert code == 2
    assert "was not profiled; this profile has a100, v100, t4" in errors
