import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
from hydra.core.global_hydra import GlobalHydra

from lightning_hetpipe.__main__ import main
from lightning_hetpipe.plans import Plan
from lightning_hetpipe.shipped import conf_dir
from tests.helpers.synthetic import make_graph, make_profile, make_sharing

ROOT = conf_dir().parent


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


@pytest.mark.parametrize("command", ["profile", "plan", "compare", "simulate", "train"])
def test_every_command_explains_itself(hetpipe, command):
    code, shown, _ = hetpipe(command, "--help")
    assert not code
    assert f"\n{command} " in shown
    assert "steps: 20" in shown


def save_twins(folder):
    """A profile of the cluster `twins`, whose devices may share stages."""
    graph = make_graph(4)
    profile = replace(make_profile(graph, (0.5, 0.5)), sharing=make_sharing(graph, work=1e7))
    twins = tuple(replace(each, device=f"twin{i}") for i, each in enumerate(profile.devices, start=1))
    replace(profile, devices=twins).save(folder / "twins.json")


def test_groups_are_planned_as_the_command_line_says(hetpipe, tmp_path):
    save_twins(tmp_path)
    words = ("plan", "cluster=twins", "profile=twins.json", "batch_size=8", "format=json")
    for merge, groups in (("auto", 1), ("never", 0), ("[[twin1,twin2]]", 1)):
        code, shown, _ = hetpipe(*words, f"merge={merge}")
        assert not code
        assert sum(stage.split != "none" for stage in Plan.from_json(shown).stages) == groups
    for merge, message in (
        ("[[twin1,twin3]]", "device 'twin3' is not in cluster 'twins'"),
        ("null", "merge=None is unknown"),
        ("[]", "merge=[] is unknown"),
    ):
        code, _, errors = hetpipe(*words, f"merge={merge}")
        assert code
        assert message in errors
    code, _, errors = hetpipe(*words, "batch_size=max", "merge=[[twin1,twin2]]")
    assert code
    assert "batch_size=max is of devices apart: leave merge=[['twin1', 'twin2']] out" in errors


def test_a_plan_with_a_group_that_was_written_by_hand_is_predicted(hetpipe, tmp_path):
    save_twins(tmp_path)
    words = ("profile=twins.json", "format=json")
    code, made, _ = hetpipe("plan", "cluster=twins", "batch_size=8", "merge=[[twin1,twin2]]", *words)
    assert not code
    replace(Plan.from_json(made), prediction=None, profile_hash="").save(tmp_path / "hand.json")
    code, shown, errors = hetpipe("plan", "plan=hand.json", *words)
    assert not code, errors
    prediction, expected = Plan.from_json(shown).prediction, Plan.from_json(made).prediction
    assert prediction.step_s == pytest.approx(expected.step_s)
    assert prediction.images_per_s_bound == pytest.approx(expected.images_per_s_bound)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "say what to do: hetpipe profile | plan | compare | simulate | train"),
        (("paln",), "say what to do"),
        (("plan", "cluster=lab5"), "Could not find 'cluster/lab5'"),
        (("plan", "microbatch=4"), "Key 'microbatch' is not in struct"),
        (("plan", "profile=none.json"), "profile none.json cannot be read"),
        (("simulate", "plan=none.json"), "plan none.json cannot be read"),
        (
            ("simulate", "plan=p.json", "cluster=twins", "merge=never"),
            "plan= and cluster, merge were both asked",
        ),
        (("plan", "plan=p.json", "batch_size=max"), "plan= and batch_size were both asked"),
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


MADE = []  # the text of the profile, once it was made


@pytest.fixture
def profile(hetpipe, tmp_path):
    """A profile of VGG-11 on three GPUs, from their data sheets."""
    path = tmp_path / "profile.json"
    if not MADE:
        code, _, errors = hetpipe(
            "profile", "model=vgg11", "cluster=mixed3", "profile=analytic", f"out={path}"
        )
        assert code == 0, errors
        MADE.append(path.read_text())
    path.write_text(MADE[0])
    return path


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


def test_the_largest_batch_is_told_beside_that_of_gpipe_on_an_even_split(hetpipe, profile):
    memory = (f"cluster.devices.{index}.memory=4GB" for index in range(3))
    words = ("cluster=mixed3", f"profile={profile}", "batch_size=max", *memory)
    code, shown, errors = hetpipe("plan", *words)
    assert code == 0, errors
    table = shown[shown.rindex("Largest batch") :]
    assert "gpipe, even split" in table
    assert "this plan: +" in table
    code, shown, _ = hetpipe("plan", *words, "format=json")
    plan = Plan.from_json(shown)
    assert code == 0
    assert f"{plan.batch_size} " in table


def test_there_is_no_largest_batch_without_memory_limits(hetpipe, profile):
    words = (
        "plan",
        "cluster=mixed3",
        f"profile={profile}",
        "batch_size=max",
        "cluster.devices.0.memory=null",
    )
    code, _, errors = hetpipe(*words)
    assert code == 2
    assert "has no memory limit: give every device its memory" in errors
    code, _, errors = hetpipe("compare", *words[1:])
    assert code == 2
    assert "batch_size=max is a question for `hetpipe plan`" in errors


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


def test_a_sweep_ends_in_one_table_and_one_picture(hetpipe, profile, tmp_path):
    code, shown, _ = hetpipe("plan", "cluster=mixed3", f"profile={profile}", "micro_batch=8,16", "-m")
    assert code == 0
    table = shown[shown.rindex("Sweep") :]
    assert "micro_batch=8" in table
    assert "micro_batch=16" in table
    assert "images_per_s" in table
    assert "auto takes" in table
    (picture,) = (tmp_path / "multirun").rglob("sweep.png")
    assert picture.stat().st_size > 1000


def test_a_profile_of_another_cluster_is_refused_by_name(hetpipe, profile):
    code, _, errors = hetpipe("plan", "cluster=lab4", f"profile={profile}")
    assert code == 2
    assert "was not profiled; this profile has a100, v100, t4" in errors


@pytest.mark.parametrize(
    ("command", "key"), [("profile", "devices"), ("plan", "stages"), ("simulate", "step_s")]
)
def test_what_is_printed_as_json_is_nothing_else(hetpipe, profile, command, key):
    code, shown, errors = hetpipe(
        command, "cluster=mixed3", f"profile={profile}", "format=json", "micro_batch=16"
    )
    assert code == 0, errors
    assert key in json.loads(shown)


@pytest.mark.parametrize(("command", "column"), [("compare", "the plan"), ("simulate", "step_s")])
def test_other_commands_sweep_too(hetpipe, profile, command, column):
    code, shown, _ = hetpipe(command, "cluster=mixed3", f"profile={profile}", "micro_batch=8,16", "-m")
    assert code == 0
    table = shown[shown.rindex("Sweep") :]
    assert column in table
    assert "micro_batch=16" in table


def test_figures_that_nobody_measured_are_marked_and_set_against_the_bound(hetpipe, profile):
    for command in ("plan", "compare", "simulate"):
        code, shown, _ = hetpipe(command, "cluster=mixed3", f"profile={profile}", "micro_batch=16")
        assert code == 0
        assert "analytic profile: from published peaks" in shown
        assert ("of bound" in shown) == (command != "simulate")


def test_a_measured_profile_is_not_marked_and_trains_to_json_alone(tmp_path):
    models = tmp_path / "conf" / "model"
    models.mkdir(parents=True)
    (models / "tiny.yaml").write_text(
        "name: tiny\ninputs: [[4]]\nclasses: 3\n"
        "module:\n  _target_: torch.nn.Sequential\n  _args_:\n"
        "    - {_target_: torch.nn.Linear, in_features: 4, out_features: 4}\n"
        "    - {_target_: torch.nn.Linear, in_features: 4, out_features: 3}\n"
    )
    words = ("--config-dir", str(tmp_path / "conf"), "model=tiny", "cluster=twins", "batch_size=8", "steps=2")
    command = [sys.executable, "-m", "lightning_hetpipe", "train", *words, "format=json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert set(json.loads(done.stdout)) == {"step_s_predicted", "step_s_measured"}
    assert "analytic" not in done.stderr
