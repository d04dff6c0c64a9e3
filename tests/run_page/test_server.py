"""The run page's server: responses, rejected requests, and no tracebacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from staleflow.stores.trajectories.derived_branches import BranchRewards, derive_rewards
from staleflow.stores.trajectories.versioned import VersionedStore
from tests.run_page.page_client import Page
from tests.support.stored_runs import Response, StoredRun


def stored_run(folder: Path) -> StoredRun:
    stored = StoredRun(folder)
    stored.train([("one plus one", [Response("two", 1.0), Response("three", 0.0)])])
    stored.train(
        [("two plus two", [Response("four", 1.0, versions=(0, 1)), Response("five", 0.5, parts={"form": 0.5})])]
    )
    return stored


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a run that no test changes."""
    return Page(stored_run(tmp_path_factory.mktemp("page")).run_dir)


@pytest.fixture
def run(tmp_path: Path) -> StoredRun:
    return stored_run(tmp_path)


@pytest.mark.parametrize(
    "path", ["/", "/step/1", "/group/0", "/trajectories", "/trajectory/3", "/lanes", "/compare", "/job"]
)
def test_every_page_address_can_be_opened(page: Page, path: str) -> None:
    answer = page.get(path)
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/html")
    assert b'<script type="module" src="/static/main.js">' in answer.body


def test_the_content_security_policy_allows_no_remote_or_inline_script(page: Page) -> None:
    policy = page.get("/").headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy
    for name in ("index.html", "main.js", "charts.js", "page.css"):
        body = page.get(f"/static/{name}").body.decode()
        assert "https:" not in body
        assert "innerHTML" not in body
        assert "eval(" not in body


def test_every_script_is_preloaded(page: Page) -> None:
    scripts = {p.name for p in Path("pipeline/run_page/static").glob("*.js")}
    index = page.get("/").body.decode()
    assert {name for name in scripts if f'href="/static/{name}"' in index} == scripts - {"main.js"}
    assert all(page.get(f"/static/{name}").headers["content-type"].startswith("text/javascript") for name in scripts)


def test_only_host_names_of_this_machine_are_served(page: Page) -> None:
    for host in ("127.0.0.1:1", "localhost:8799", "LOCALHOST", "[::1]:80", "box", "192.168.1.4:9"):
        assert page.get("/api/overview", host=host).status == 200, host
    for host in ("evil.example", "evil.example:8799", "127.0.0.1.evil.example", "localhost.evil.example", "", "[evil]"):
        answer = page.get("/api/overview", host=host)
        assert answer.status == 421, host
        assert b"--host" in answer.body
        assert b"page" not in answer.body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS"])
def test_only_get_and_head_are_allowed(page: Page, method: str) -> None:
    assert page.get("/api/overview", method=method).status == 405


def test_files_outside_the_static_folder_are_not_served(page: Page) -> None:
    for path in (
        "/static/../server.py",
        "/static/%2e%2e/server.py",
        "/static/..%2fserver.py",
        "/static//etc/passwd",
        "/no",
    ):
        assert page.get(path).status == 404, path


def test_the_run_api_has_name_state_and_steps(page: Page) -> None:
    run = page.ask("overview")
    assert (run["name"], run["state"], run["num_steps"], run["steps"]) == ("page", "interrupted", 2, 3)
    assert run["eta"] == 1
    assert run["ended"] == {"consumed": 4}
    assert run["branches"] == ["main"]


def test_summary_notes_are_shown_and_an_unreadable_summary_is_ignored(run: StoredRun) -> None:
    page = Page(run.run_dir)
    summary = run.run_dir / "summary.json"
    summary.write_text('{"stopped": "", "losses": ["rollout-0: killed"], "notes": ["200 prompts are held out"]}')
    assert page.ask("overview")["notes"] == ["lost: rollout-0: killed", "200 prompts are held out"]
    for garbage in ("", "{", "[]", '{"losses": 3, "diagnosis": "x", "notes": null}', "\x00"):
        summary.write_text(garbage)
        assert page.ask("overview")["notes"] == []


def test_the_summary_of_an_earlier_start_is_not_shown(run: StoredRun) -> None:
    page = Page(run.run_dir)
    starts = [{"version": 0, "end": "stopped: Ctrl-C"}, {"version": 1}]
    (run.run_dir / "summary.json").write_text(json.dumps({"stopped": "Ctrl-C", "starts": starts[:1]}))
    (run.run_dir / "starts.json").write_text(json.dumps(starts[:1]))
    assert page.ask("overview")["notes"] == ["stopped: Ctrl-C"]
    (run.run_dir / "starts.json").write_text(json.dumps(starts))
    assert page.ask("overview")["notes"] == []
    (run.run_dir / "summary.json").write_text(json.dumps({"notes": ["new"], "starts": starts}))
    assert page.ask("overview")["notes"] == ["new"]


def test_steps_that_follow_undone_ones_ask_the_page_to_reload(run: StoredRun) -> None:
    page = Page(run.run_dir)
    known = page.ask("steps")["snapshot"]
    run.train([("more", [Response("x", 0.0), Response("y", 1.0)])])
    assert page.ask("steps", first=2, after=known)["step"] == [2]
    assert page.ask("steps", first=99)["step"] == []
    VersionedStore.rewind(run.run_dir / "store", 1)
    run.store, run.step = VersionedStore.open(run.run_dir / "store"), 1
    for _ in range(2):
        run.train([("another", [Response("x", 0.0), Response("y", 1.0)])])
    assert page.ask("steps", first=2, after=known) == {"reload": True}
    assert page.ask("steps", first=0)["step"] == [0, 1, 2]


def test_groups_of_a_step_list_their_members(page: Page) -> None:
    answer = page.ask("groups", step=1)
    assert (answer["total"], answer["pages"], answer["metrics"]["reward"]) == (1, 1, 0.75)
    (group,) = answer["groups"]
    assert group["prompt"] == "two plus two"
    assert [(m["trajectory"], m["text"], m["reward"], m["advantage"]) for m in group["members"]] == [
        (2, "four", 1.0, 0.25), (3, "five", 0.5, -0.25),
    ]  # fmt: skip
    assert group["members"][0]["segments"] == [[0, "rollout-0", 2], [1, "rollout-1", 2]]


def test_a_batch_has_one_value_per_trajectory(page: Page) -> None:
    batch = page.ask("batch", step=1)
    assert batch == {
        "read_share": 1.0, "lives": [[], []], "trajectory": [2, 3], "reward": [1.0, 0.5], "response_tokens": [4, 4],
        "staleness": [1, 1], "finish": ["stop", "stop"],
    }  # fmt: skip
    assert page.ask("batch", step=7)["trajectory"] == []


def test_a_trajectory_has_its_tokens_and_its_siblings(page: Page) -> None:
    response = page.ask("trajectory", id=2)
    assert response["tokens"]["text"] == ["f", "o", "u", "r"]
    assert response["tokens"]["version"] == [0, 0, 1, 1]
    assert response["tokens"]["ratio"] is None
    assert [s["trajectory"] for s in response["siblings"]] == [2, 3]
    assert response["story"] == []
    assert response["timings"]["sampled_s"] == 3.0
    assert page.ask("trajectory", id=3)["reward_parts"] == {"form": 0.5}


def test_excerpts_are_returned_for_the_requested_trajectories(page: Page) -> None:
    texts = page.ask("excerpts", ids="3 0")["texts"]
    assert texts == {
        "3": {"prompt": "two plus two", "response": "five"},
        "0": {"prompt": "one plus one", "response": "two"},
    }


@pytest.mark.parametrize(
    ("endpoint", "query", "line"),
    [
        (
            "groups",
            {"step": 1, "where": "rewad > 0"},
            "'rewad > 0': there is no column 'rewad'; did you mean 'reward'?",
        ),
        ("groups", {"step": 1, "order": "size"}, "groups cannot be ordered by 'size'"),
        ("groups", {"step": 9}, "step 9 is not stored; there are 2 steps"),
        ("groups", {"step": "one"}, "step = 'one' is not a whole number"),
        ("group", {"group": 77}, "no stored group 77"),
        ("trajectories", {"where": "reward >"}, "'reward >': cannot be read"),
        ("trajectories", {"where": "__import__('os')"}, "is not supported"),
        ("trajectories", {"sort": "tokens"}, "cannot be sorted by 'tokens'"),
        ("trajectories", {"where": "reward > 0 and " * 1000}, "the address has more than 4000 characters"),
        ("trajectory", {"id": 77}, "no stored trajectory 77"),
        ("trajectory", {"id": "9" * 40}, "is not a whole number"),
        ("distribution", {"column": "fate"}, "'fate' is not a column of numbers"),
        ("excerpts", {"ids": "77"}, "no stored trajectory 77"),
        ("lanes", {"begin_s": "x"}, "begin_s = 'x' is not a number"),
        ("lanes", {"begin_s": "nan"}, "begin_s = 'nan' is not a number"),
        ("steps", {"branch": "better"}, "no branch 'better'"),
        ("compare", {"first": "main", "second": "other"}, "no branch 'other'"),
        ("story", {"id": 0}, "no recorded events"),
    ],
)
def test_an_invalid_request_gets_a_one_line_error(page: Page, endpoint: str, query: dict[str, Any], line: str) -> None:
    answer = page.get(f"/api/{endpoint}", **query)
    assert answer.status == 400
    assert line in answer.json["error"]
    assert len(answer.json["error"].splitlines()) == 1


def test_two_branches_are_compared_and_a_group_is_shown_under_both(run: StoredRun) -> None:
    page = Page(run.run_dir)
    new = BranchRewards(
        rewards=np.asarray([1.0, 0.0, 0.0, 1.0], np.float32),
        advantages=np.asarray([0.5, -0.5, -0.5, 0.5], np.float32),
        loss_mask=np.ones(4, np.bool_),
        errors={2: "no answer"},
    )
    derive_rewards(
        VersionedStore.open(run.run_dir / "store"), run.run_dir / "store", "better", new, {"reward": "mine.py:f"}
    )
    assert page.ask("overview")["branches"] == ["main", "better"]
    result = page.ask("compare", first="main", second="better")
    assert (result["changed"], result["order_changed"], result["groups"]) == (2, [1], 2)
    assert result["by_step"] == {"step": [0, 1], "means": [[0.5, 0.75], [0.5, 0.5]]}
    assert result["lineage"]["better"]["reward"] == "mine.py:f"
    (group,) = page.ask("group", group=1, branch="better")["groups"]
    assert [(m["reward"], m["error"]) for m in group["members"]] == [(0.0, "no answer"), (1.0, "")]
    assert page.ask("trajectories", branch="better", where="reward == 0")["total"] == 2
    assert page.ask("trajectories", where="reward == 0")["total"] == 1


def test_a_branch_of_undone_steps_is_compared_on_common_trajectories(run: StoredRun) -> None:
    """A resumed run has other trajectories from there on, whose rewards are not comparable."""
    page = Page(run.run_dir)
    VersionedStore.rewind(run.run_dir / "store", 1)
    (undone,) = VersionedStore.open(run.run_dir / "store").branches()
    run.store = VersionedStore.open(run.run_dir / "store")
    run.train([("another", [Response("x", 0.0), Response("y", 1.0)])])
    result = page.ask("compare", first="main", second=undone)
    assert (result["trajectories"], result["groups"], result["changed"], result["order_changed"]) == (2, 1, 0, [])


def test_many_or_long_siblings_are_truncated_to_keep_a_page_small(tmp_path: Path) -> None:
    wide = StoredRun(tmp_path, group=64)
    wide.train([("p" * 9_000, [Response("long answer " * 900, float(i % 2)) for i in range(64)])])
    answer = Page(wide.run_dir).get("/api/groups", step=0)
    assert len(answer.body) < 600_000
    (group,) = answer.json["groups"]
    assert group["prompt_cut"]
    assert all(m["cut"] and len(m["text"]) > 1_000 for m in group["members"])
    assert len(Page(wide.run_dir).ask("trajectory", id=5)["text"]) == 900 * 12


def test_settings_of_the_job_are_listed_with_their_defaults(page: Page) -> None:
    rows = {row["key"]: row for row in page.ask("settings")["settings"]}
    assert rows["batch.group_size"]["value"] == "2" != rows["batch.group_size"]["default"]
    assert rows["training.loss.name"]["value"] == rows["training.loss.name"]["default"] == '"decoupled_ppo"'
    assert all(row["doc"] and row["other"] is None for row in rows.values())


def test_an_audit_without_verified_weights_is_not_shown_as_clean(page: Page) -> None:
    answer = page.ask("audit")
    assert not answer["proves"]
    assert answer["verdict"] == "NOT VERIFIED: the weights of no instance were verified"
    assert any(line.split() == ["bound", "holds"] for line in answer["lines"])


def test_a_corrupt_store_is_named_by_the_audit(run: StoredRun) -> None:
    page = Page(run.run_dir)
    run.train([("late", [Response("1", 1.0, versions=(0,)), Response("2", versions=(0,))])])
    run.train([("late", [Response("1", 1.0, versions=(0,)), Response("2", versions=(0,))])])
    answer = page.ask("audit")
    assert (answer["verdict"], answer["proves"]) == ("BROKEN", False)
    assert any("bound" in line and "BROKEN" in line for line in answer["lines"]), answer


def test_a_second_run_is_shown_beside_the_first(run: StoredRun, tmp_path: Path) -> None:
    longer = StoredRun(tmp_path / "second", group=3, eta=0)
    for _ in range(run.step + 1):
        longer.train([("p", [Response("a", 1.0), Response("b"), Response("c")])], loss=-0.5)
    page = Page(run.run_dir, longer.run_dir)
    assert page.ask("overview")["other"] == {
        "name": str(longer.run_dir), "folder": str(longer.run_dir), "snapshot": longer.store.snapshot
    }, "of equal names"  # fmt: skip
    steps = page.ask("steps", run="other")
    assert steps["step"] == [*range(run.step + 1)]
    assert steps["lines"]["loss"] == [-0.5] * (run.step + 1) != page.ask("steps")["lines"]["loss"]
    settings = page.ask("settings")["settings"]
    differing = {row["key"]: (row["value"], row["other"]) for row in settings if row["value"] != row["other"]}
    assert differing.pop("staleness.eta") == ("1", "0")
    assert differing.keys() == {"batch.group_size", "runs_dir", "model.path"}
    difference, time = page.ask("result_tables")["tables"]
    assert difference["title"].endswith(", on the same prompts") and difference["rows"][0][0].startswith("training")
    assert time["columns"][1:] == [run.config.name, str(longer.run_dir)] and time["rows"][0][0] == "seconds"


def test_without_a_second_run_its_steps_are_empty(page: Page) -> None:
    assert page.ask("overview")["other"] is None
    assert page.ask("steps", run="other")["step"] == []
    assert page.ask("result_tables")["tables"] == []
