"""Rules, losses and advantages of a user file: loaded, checked, stored with the run and used again by a resume."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from staleflow.pipeline.config import loading, user_files
from staleflow.pipeline.config.factories import make_coordinator, make_strategies
from staleflow.pipeline.config.knob_tree import to_toml
from staleflow.pipeline.config.schema import RunConfig
from staleflow.pipeline.coordination.commands import Route
from staleflow.pipeline.coordination.events import GroupsArrived, InstanceJoined
from staleflow.pipeline.jobs.job_driver import Submission, configure_for_cluster
from staleflow.pipeline.recovery.run_folder import load_job, prepare_run_dir, write_code
from staleflow.pipeline.strategies.routing import UserRouting
from staleflow.stores.errors import ConfigError
from staleflow.stores.in_flight.in_flight_state import NewGroup
from staleflow.stores.trajectory import GroupId, InstanceId, PolicyVersion
from staleflow.tasks.training.advantage import UserAdvantage
from staleflow.tasks.training.loss import LOSSES, Tokens

MINE = '''
from dataclasses import dataclass
import numpy as np
from staleflow.tasks.emulation.cost_model import CostModel
from staleflow.tasks.settings.knobs import knob
from staleflow.tasks.training.loss import TokenLoss

@dataclass
class Fullest:
    """The fullest instance with room, as long as a share of the cap is free."""
    cost: CostModel
    rng: np.random.Generator
    share: float = knob(0.5, "share", low=0, high=1)

    def choose(self, work, loads, fitting):
        return int(np.where(fitting, loads.running, -1.0).argmax())

class Plain:
    def choose(self, work, loads, fitting): return int(self.row)

class First(Plain):
    row = 0

class Far(Plain):
    row = 99

class Negative(Plain):
    row = -1

class Text(Plain):
    def choose(self, work, loads, fitting): return "the first"

class Raises(Plain):
    def choose(self, work, loads, fitting): return 1 // 0

class Leaves(Plain):
    def choose(self, work, loads, fitting): raise SystemExit(0)

class Odd(Plain):
    class Row:
        def __index__(self): raise ValueError("no")
    def choose(self, work, loads, fitting): return self.Row()

class Idle(Plain):
    def choose(self, work, loads, fitting): return None

class Meddles(Plain):
    def choose(self, work, loads, fitting):
        loads.running[:] = 0

class Half:
    row = 0

class Undecorated(Plain):
    share: float = knob(0.5, "share")

@dataclass
class Unread(Plain):
    table: "Nothing"

class Greedy(Plain):
    def __init__(self, cost, network): pass

class Broken(Plain):
    def __init__(self): raise RuntimeError("not\\ntoday")

@dataclass
class Linear:
    slope: float = knob(1.0, "slope", above=0)
    needs_proximal = False

    def token_loss(self, logprobs, proximal, behaviour, advantage):
        return TokenLoss(loss=-self.slope * advantage * logprobs, clipped=logprobs.detach() > 0)

class Sees:
    needs_proximal = False
    trains_zero_advantage = True
    is_tokenwise = True

    def token_loss(self, tokens):
        return TokenLoss(loss=-tokens.logprobs * tokens.lags * tokens.sampled, clipped=~tokens.sampled)

@dataclass
class Torn(Linear):
    def token_loss(self, logprobs, proximal, behaviour, advantage):
        return logprobs + logprobs.new_zeros(5)

@dataclass
class Summed(Linear):
    def token_loss(self, logprobs, proximal, behaviour, advantage):
        return TokenLoss(loss=logprobs.sum(), clipped=logprobs.detach() > 0)

def best(rewards, valid):
    return (rewards == rewards.max(axis=1, keepdims=True)).astype(float)

def short(rewards, valid):
    return rewards.mean(axis=1)

def endless(rewards, valid):
    return rewards / 0.0 if False else np.full(rewards.shape, np.inf)
'''


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def job(*overrides: str) -> RunConfig:
    return loading.load("examples/dryrun.toml", overrides)


def test_a_rule_from_a_file_gets_its_knobs_and_parameters(user_file: Path) -> None:
    config = job(f"rollout.routing={user_file}:Fullest", "rollout.routing.share=0.25")
    rule = make_strategies(config).routing
    assert isinstance(rule, UserRouting)
    assert rule.code.share == 0.25  # the user's class
    other = make_strategies(config).routing  # the same
    assert isinstance(other, UserRouting)
    assert other.code.rng.integers(2**60) == rule.code.rng.integers(2**60)  # by the job's seed
    assert config.uses_cost_model


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.routing={dir}/none.py:Fullest", r"cannot be loaded: .*none.py: no such file"),
        ("rollout.routing={mine}:Missing", "has no class Missing"),
        ("rollout.routing={mine}:best", "has no class best"),
        ("rollout.routing={mine}:Half", "it lacks choose; docs/extending.md has an example"),
        ("rollout.routing={mine}:Undecorated", "it declares knobs but is not a dataclass; write @dataclass above"),
        ("rollout.routing={mine}:Unread", "its type hints cannot be read: NameError: name 'Nothing' is not defined"),
        ("rollout.routing={mine}:Greedy", "unknown parameter network; available: cost, eta, rng"),
        ("rollout.routing={mine}:Broken", "cannot be constructed: RuntimeError: not today"),
        ("rollout.routing={mine}:Fullest rollout.routing.shre=1", "you mean rollout.routing.share?"),
        ("rollout.routing={mine}:Fullest rollout.routing.share=2", "rollout.routing.share = 2.0 is out"),
        ("rollout.routing={mine}:First rollout.routing.a=2", "rollout.routing.a; known here: none"),
        ("rollout.routing.share=1", "the routing rule deadline has no such knob; it has none"),
        ("training.loss.a=1", "the loss decoupled_ppo has no such knob; it has clip_low, clip_high, weight_cap"),
        (
            "training.loss.tau=1",
            "training.loss.tau: a knob of kimi; training.loss.name is decoupled_ppo, which has clip_low",
        ),
        ("training.loss.name={mine}:First", "it lacks needs_proximal, token_loss"),
        ("training.loss.name={mine}:Linear training.loss.slope=0", "training.loss.slope = 0.0 is out of range"),
        ("training.advantage={mine}:none", "has no function none"),
        ("training.advantage={mine}:short", "; it must return ("),
        ("training.advantage={mine}:endless", "returned a number that is not finite"),
        ("tracking.tracker={mine}:First", "has no method step and no close; a tracker has step(step, metrics)"),
        ("training.advantage=gpro", "did you mean 'grpo'?"),
        ("rollout.synchronization={mine}:First", "must be one of greedy, staggered"),
    ],
)
def test_each_mistake_gives_a_one_line_error(user_file: Path, override: str, message: str) -> None:
    written = override.replace("{mine}", str(user_file)).replace("{dir}", str(user_file.parent))
    with pytest.raises(ConfigError) as caught:
        user_files.check_user_code(job(*written.split()))
    assert message.replace(r".*none.py", f"{user_file.parent}/none.py") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_executed_gives_a_one_line_error(tmp_path: Path) -> None:
    for text, message in (
        ("a = = 1", "invalid syntax"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys\nsys.exit(0)\n", "cannot be loaded: SystemExit: 0"),
    ):
        (tmp_path / "bad.py").write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            user_files.check_user_code(job(f"rollout.routing={tmp_path}/bad.py:Rule"))
        assert "\n" not in str(caught.value)


def coordinator_commands(config: RunConfig) -> tuple[Any, list[Any]]:
    """Return a coordinator with one instance and one arrived group, and its commands."""
    coordinator = make_coordinator(config, validate_every_event=True)
    coordinator.handle(
        InstanceJoined(instance=InstanceId("a"), version=PolicyVersion(0), kv_capacity=9999, max_running=4), 0.0
    )
    arrived = GroupsArrived(groups=(NewGroup(group=GroupId(0), prompt_tokens=10),))
    return coordinator, coordinator.handle(arrived, 1.0)


@pytest.mark.parametrize("name", ["Far", "Negative"])
def test_an_unfitting_instance_is_refused_with_a_reason(user_file: Path, name: str) -> None:
    coordinator, commands = coordinator_commands(job(f"rollout.routing={user_file}:{name}"))
    assert not [c for c in commands if isinstance(c, Route)]
    assert coordinator.snapshot().refusals == {"the routing rule chose an instance that does not fit": 1}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Text", "choose returned 'the first'; it must return an instance's index or None"),
        ("Odd", "choose returned .*; it must return an instance's index or None"),
        ("Raises", "choose raised ZeroDivisionError: integer division or modulo by zero"),
        ("Meddles", "choose raised ValueError: assignment destination is read-only"),
        ("Leaves", "choose raised SystemExit: 0"),
    ],
)
def test_an_error_of_a_rule_names_the_rule(user_file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        coordinator_commands(job(f"rollout.routing={user_file}:{name}"))
    assert re.fullmatch(re.escape(f"rollout.routing = '{user_file}:{name}': ") + message, str(caught.value))


def test_explain_waiting_names_a_rule_that_declines(user_file: Path) -> None:
    coordinator, commands = coordinator_commands(job(f"rollout.routing={user_file}:Idle"))
    assert not [c for c in commands if isinstance(c, Route)]
    assert "waits: declined by the routing rule" in coordinator.explain_waiting()


def test_a_rule_that_returns_valid_rows_is_followed(user_file: Path) -> None:
    _, commands = coordinator_commands(job(f"rollout.routing={user_file}:First"))
    assert len([c for c in commands if isinstance(c, Route)]) == 4


def test_a_loss_from_a_file_has_its_knobs_and_must_return_a_number_per_token(user_file: Path) -> None:
    logprobs, whole = torch.full((2, 3), -1.0), torch.ones((2, 3), dtype=torch.bool)
    tokens = Tokens(
        logprobs=logprobs, proximal=logprobs, behaviour=logprobs, advantage=torch.tensor([[2.0], [0.5]]), sampled=whole,
        lags=whole.long(),
    )  # fmt: skip
    config = job(f"training.loss.name={user_file}:Linear", "training.loss.slope=3").training.loss
    result = LOSSES.make(config).token_loss(tokens)
    assert result.loss.tolist() == [[6.0] * 3, [1.5] * 3]
    sees = LOSSES.make(job(f"training.loss.name={user_file}:Sees").training.loss)
    assert sees.token_loss(tokens).loss.tolist() == [[1.0] * 3] * 2
    assert [loss.trains_zero_advantage for loss in (sees, LOSSES.make(config))] == [True, False]
    assert [loss.is_tokenwise for loss in (sees, LOSSES.make(config))] == [True, False]
    assert [loss.needs_proximal for loss in (sees, LOSSES.make(config))] == [False, False]
    summed = LOSSES.make(job(f"training.loss.name={user_file}:Summed").training.loss)
    with pytest.raises(ConfigError, match=r"returned loss of shape \(\); it must be \(2, 3\), one number per token"):
        summed.token_loss(tokens)
    torn = LOSSES.make(job(f"training.loss.name={user_file}:Torn").training.loss)
    with pytest.raises(ConfigError, match=r":Torn': token_loss raised: RuntimeError: The size of tensor") as caught:
        torn.token_loss(tokens)
    assert "\n" not in str(caught.value)


def test_an_advantage_from_a_file_must_return_a_number_per_trajectory(user_file: Path) -> None:
    rewards, valid = np.array([[1.0, 0.0], [3.0, 3.0]]), np.array([[True, True], [True, False]])
    assert UserAdvantage(name=f"{user_file}:best").advantages(rewards, valid).tolist() == [[1.0, 0.0], [1.0, 0.0]]
    with pytest.raises(ConfigError, match=r"returned shape \(2,\); it must return \(2, 2\) finite numbers"):
        UserAdvantage(name=f"{user_file}:short").advantages(rewards, valid)
    with pytest.raises(ConfigError, match="returned a number that is not finite"):
        UserAdvantage(name=f"{user_file}:endless").advantages(rewards, valid)


OWN = (
    "rollout.routing=mine.py:Fullest",
    "training.advantage=mine.py:best",
    "training.loss.name=mine.py:Linear",
    "training.loss.slope=2",
)


def test_a_builtin_function_is_an_advantage_that_fails_in_one_line() -> None:
    from staleflow.tasks.training.advantage import ADVANTAGES

    advantage = ADVANTAGES.make(job("training.advantage=math:fsum").training.advantage)
    with pytest.raises(ConfigError, match=r"training.advantage = 'math:fsum' raised: TypeError"):
        advantage.advantages(np.zeros((1, 2)), np.ones((1, 2), np.bool_))


def test_files_named_by_a_job_are_packed_with_it(
    user_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    examples = Path("examples").resolve()
    monkeypatch.chdir(user_file.parent)
    here = loading.load(examples / "dryrun.toml", (*OWN, f"runs_dir={tmp_path}/there"))
    config, code = user_files.collect_code(user_files.with_absolute_paths(here))
    assert code == dict.fromkeys(("routing_mine.py", "advantage_mine.py", "loss_mine.py"), MINE)
    user_file.unlink()
    there = configure_for_cluster(Submission(id="x", job_toml=to_toml(config), code=code), "tcp://far:8786")
    write_code(there.run_dir, code)
    assert there.rollout.routing.name == f"{there.run_dir}/code/routing_mine.py:Fullest"
    user_files.check_user_code(there)
    again, same = user_files.collect_code(there)  # gone on with from its folder
    assert (again.rollout.routing, same) == (config.rollout.routing, code)


def test_a_run_keeps_its_rules_when_its_folder_moves(user_file: Path, tmp_path: Path) -> None:
    config = user_files.with_absolute_paths(job(f"rollout.routing={user_file}:First", f"runs_dir={tmp_path}/runs"))
    kept, code = user_files.collect_code(config, user_files.copied_code_keys(config))
    kept = user_files.with_code_in(kept, config.run_dir / "code", code)
    run_dir = prepare_run_dir(kept, code)
    user_file.write_text("")
    stored = loading.load(run_dir / "config.toml")
    user_files.check_user_code(stored)
    elsewhere = run_dir.rename(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="no such file"):
        make_coordinator(stored)
    make_coordinator(load_job(elsewhere))


def test_an_edited_file_is_loaded_again_and_an_unchanged_one_once(tmp_path: Path) -> None:
    from staleflow.tasks.settings.user_code import load

    path = tmp_path / "edited.py"
    path.write_text("def f(): return 1\n")
    first = load(f"{path}:f", "key")
    assert load(f"{path}:f", "key") is first
    path.write_text("def f(): return 2   \n")
    assert load(f"{path}:f", "key")() == 2
