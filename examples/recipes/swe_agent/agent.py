"""mini-swe-agent repairs a repository in a container; the reward is 1 if the task's own tests pass afterwards.

    pip install 'mini-swe-agent>=2.4,<3'

Tasks are lines of a file, task.options.tasks, each with `instance_id`, `problem_statement`, `image_name`, and
`eval_script`, which exits with 0 if the problem is solved. The last tenth is held out.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
AGENT = "swebench_backticks"
"""The settings of mini-swe-agent: its prompts for SWE-bench, with commands in code blocks."""
EVALUATION_S = 600
"""Seconds that the tests of a task may take."""


def run(base_url: str, key: str, task: Any) -> float:
    """Play one task. task.options: `tasks`, a file; `steps`, the most commands; `environment`, settings of
    mini-swe-agent's, such as {"environment_class": "docker", "executable": "podman"}."""
    from litellm.exceptions import ContextWindowExceededError
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.config import get_config_from_spec
    from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel

    instance = instance_of(task)
    settings = get_config_from_spec(AGENT)
    own = {key: value for key, value in settings["model"].items() if key in ("observation_template", "action_regex")}
    model = LitellmTextbasedModel(
        model_name="openai/policy", model_kwargs={"api_base": base_url, "api_key": key}, cost_tracking="ignore_errors",
        **own,
    )  # fmt: skip
    limits = {"step_limit": task.options.get("steps", 20), "cost_limit": 0}
    agent = DefaultAgent(model, container(instance, task.options), **(settings["agent"] | limits))
    try:
        patch = agent.run(instance["problem_statement"]).get("submission", "")
    except ContextWindowExceededError:  # the episode's limit of tokens or turns
        return 0.0
    return solved(patch, instance, task.options) if patch.strip() else 0.0


def instance_of(task: Any) -> dict[str, Any]:
    """The line of the file that a task is."""
    lines = Path(task.options["tasks"]).read_text().splitlines()
    held_out = max(1, len(lines) // 10)
    pool = lines[-held_out:] if task.held_out else lines[:-held_out]
    instance: dict[str, Any] = json.loads(pool[task.index % len(pool)])
    return instance


def container(instance: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
    """A new container of the task's image, or what else the options name."""
    from minisweagent.environments import get_environment

    settings = {"environment_class": "docker", "cwd": "/testbed", **options.get("environment", {})}
    if settings["environment_class"] == "docker":
        settings["image"] = instance["image_name"]
    return get_environment(settings)


def solved(patch: str, instance: Mapping[str, Any], options: Mapping[str, Any]) -> float:
    """Whether the task's tests pass in a new container with this patch."""
    fresh = container(instance, options)
    end = f"END_{uuid.uuid4().hex}"
    applied = fresh.execute({"command": f"git apply <<'{end}'\n{patch.rstrip()}\n{end}"})
    if applied["returncode"] != 0:
        return 0.0
    tests = fresh.execute({"command": f"bash <<'{end}'\n{instance['eval_script']}\n{end}"}, timeout=EVALUATION_S)
    return float(tests["returncode"] == 0)
