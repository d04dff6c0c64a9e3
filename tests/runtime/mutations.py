"""Deliberate faults in driver, link and actors. The check named with each, over in-process actors, must detect it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from staleflow.pipeline.processes import background
from staleflow.pipeline.recovery import role_recovery
from staleflow.pipeline.runtime import actors, commit_queue, driver, instance_link, membership, scoring
from tests.runtime import test_actors as on_actors
from tests.runtime import test_committing as on_commits
from tests.runtime import test_driver as on_driver
from tests.runtime import test_driver_losses as on_losses
from tests.runtime import test_driver_stops as on_stops
from tests.runtime import test_evaluating as on_evaluating
from tests.runtime import test_instance_link as on_link
from tests.runtime import test_membership as on_membership
from tests.runtime import test_restoring as on_restoring
from tests.runtime import test_transfers as on_transfers
from tests.support.bodies import Body, Runtime

MODULES = {
    "background": background,
    "restoring": role_recovery,
    "actors": actors,
    "instance_link": instance_link,
    "committing": commit_queue,
    "scoring": scoring,
    "membership": membership,
    "driver": driver,
}
"""In the order in which they import each other."""
Check = Callable[[Body], Any]


def check(test: Callable[..., Any], *args: Any) -> Check:
    """A test of a body, with its other arguments."""
    return lambda body: test(body, *args)


@dataclass(frozen=True)
class Mutation:
    """Replaces `old` by `new` in the source of `module`; `breaks` says which promise that gives up, `check` notices."""

    name: str
    module: str
    breaks: str
    old: str
    new: str
    check: Check


MUTATIONS = (
    # -- the driver ----------------------------------------------------------------------------------------------
    Mutation(
        name="announced_before_commit",
        module="driver",
        breaks="a step is queued for commit before its version is announced",
        old="        self._commits.put(record)\n",
        new="        asyncio.get_running_loop().call_later(0.01, self._commits.put, record)\n",
        check=check(on_driver.test_a_step_is_queued_for_commit_before_its_version_is_announced),
    ),
    Mutation(
        name="ledger_of_after",
        module="driver",
        breaks="a step is stored with the ledger of before its version: the event is handled first",
        old="                item = self._after_training(item)\n",
        new=(
            "                self._handle(VersionPublished(version=item.version))\n"
            "                self._after_training(item)\n"
            "                item = Tick()\n"
        ),
        check=check(on_driver.test_a_run_without_faults_does_its_steps_and_keeps_its_promises),
    ),
    Mutation(
        name="retirement_forgotten",
        module="driver",
        breaks="conservation: trajectories end and are not stored",
        old="            case Discard():\n                self._commits.put(command)\n",
        new="            case Discard():\n                pass\n",
        check=check(on_driver.test_a_step_is_queued_for_commit_before_its_version_is_announced),
    ),
    Mutation(
        name="scores_dropped",
        module="scoring",
        breaks="every answer is passed on: some rewards are not",
        old="            for trajectory, reward, error in scored:\n",
        new="            for trajectory, reward, error in scored[1:]:\n",
        check=check(on_driver.test_a_run_without_faults_does_its_steps_and_keeps_its_promises),
    ),
    Mutation(
        name="scored_batch_lost",
        module="scoring",
        breaks="what a lost reward worker held is scored again",
        old="                    self._queue.put_nowait(trajectory)\n                continue\n",
        new="                    pass\n                continue\n",
        check=check(on_losses.test_a_reward_worker_that_dies_is_replaced_and_scores_again_what_it_held, "before"),
    ),
    Mutation(
        name="lost_once_a_task",
        module="membership",
        breaks="a loss is one event: each task of the link sees it, and none cancels the others",
        old=(
            "                if instance.id in self._actors.instances:  # else another of its tasks saw it first\n"
            "                    for task in instance.tasks:\n"
            "                        if task is not asyncio.current_task():\n"
            "                            task.cancel()\n"
        ),
        new="                if True:\n",
        check=check(on_losses.test_an_instance_that_dies_in_the_middle_of_a_call_is_replaced, "report", "before"),
    ),
    Mutation(
        name="loss_not_told",
        module="membership",
        breaks="a lost instance is an event",
        old="                    self._tell(InstanceLost(instance=instance.id, why=str(lost)))\n",
        new="",
        check=check(on_losses.test_an_instance_that_dies_in_the_middle_of_a_call_is_replaced, "route", "after"),
    ),
    Mutation(
        name="not_replaced",
        module="membership",
        breaks="a lost instance is replaced",
        old="                    self._fill(instance.index)\n",
        new="",
        check=check(on_losses.test_a_lost_instances_trajectories_are_sampled_again_from_their_tokens),
    ),
    Mutation(
        name="stuck_for_ever",
        module="driver",
        breaks="a run that makes no progress ends: the deadline is forgotten",
        old="        if still_s > limit_s:\n",
        new="        if still_s > limit_s * 1000:\n",
        check=check(on_driver.test_a_stuck_run_says_what_it_waits_for_and_its_knob),
    ),
    Mutation(
        name="stuck_while_training",
        module="driver",
        breaks="a training step may take train_s",
        old='"train_s" if self._coordinator.training else "stuck_s"',
        new='"stuck_s"',
        check=check(on_driver.test_a_long_training_step_is_no_stuck_run),
    ),
    Mutation(
        name="training_without_deadline",
        module="actors",
        breaks="a trainer that never answers is replaced after train_s, and that is said",
        old='trajectories, versions, deadline="train_s"',
        new="trajectories, versions, within_s=1e9",
        check=check(on_restoring.test_a_trainer_that_never_answers_is_replaced_after_train_s),
    ),
    Mutation(
        name="deaf_to_stops",
        module="driver",
        breaks="a stop is heard between steps",
        old="                if self._stop_requested:  #",
        new="                if False:  #",
        check=check(on_stops.test_a_stop_is_heard_although_the_next_step_could_begin_at_once),
    ),
    Mutation(
        name="second_stop_waits",
        module="driver",
        breaks="a second stop does not wait for the training step",
        old="(self._stop_requested or not self.training)",
        new="not self.training",
        check=check(on_stops.test_a_second_stop_does_not_wait_for_the_training_step),
    ),
    Mutation(
        name="first_stop_does_not_wait",
        module="driver",
        breaks="a stop lets the training step finish",
        old="(self._stop_requested or not self.training)",
        new="True",
        check=check(on_stops.test_a_stop_while_it_trains_lets_the_step_finish_and_stores_it),
    ),
    Mutation(
        name="last_commit_not_waited_for",
        module="driver",
        breaks="the run has ended well only if everything is stored",
        old="                    done.cancel()\n                    raise item\n",
        new="                    done.cancel()\n                    return\n",
        check=check(on_driver.test_a_commit_that_fails_after_the_last_step_ends_the_run_too),
    ),
    Mutation(
        name="last_version_not_evaluated",
        module="driver",
        breaks="a run ends only once what is due is evaluated",
        old=" or self._evaluating.pending:",
        new=":",
        check=check(on_evaluating.test_a_run_is_evaluated_before_and_after_by_default),
    ),
    Mutation(
        name="background_left",
        module="driver",
        breaks="close leaves no task behind",
        old="        return [*self._background, ",
        new="        return [",
        check=check(on_driver.test_a_run_without_faults_does_its_steps_and_keeps_its_promises),
    ),
    Mutation(
        name="training_runs_away",
        module="committing",
        breaks="at most two trained steps wait for their commit",
        old="        if self._num_uncommitted < MOST_UNCOMMITTED:\n",
        new="        if True:\n",
        check=check(
            on_commits.test_a_run_killed_while_commits_fall_behind_has_a_resume_point_that_the_store_has_reached
        ),
    ),
    # -- what has failed -----------------------------------------------------------------------------------------
    Mutation(
        name="who_asks_is_not_waited_for",
        module="actors",
        breaks="who failed is heard of before who asked counts as silent",
        old="            allowed_s += self._config.deadlines.call_s\n",
        new="            pass\n",
        check=check(on_losses.test_a_server_that_is_slow_once_is_lost_to_nobody_and_neither_is_who_asked, "payloads"),
    ),
    Mutation(
        name="later_point_used",
        module="restoring",
        breaks="a trainer goes on from what the run has seen published",
        old="if v <= version), default",
        new="), default",
        check=check(on_restoring.test_a_trainer_that_dies_goes_on_from_its_resume_point, 3, "after"),
    ),
    Mutation(
        name="other_weights_under_one_version",
        module="actors",
        breaks="a version has one fingerprint",
        old="        if result.fingerprint != self._trained[result.version]:\n",
        new="        if not result.fingerprint:\n",
        check=check(on_restoring.test_a_step_that_gives_other_weights_when_trained_again_ends_the_run),
    ),
    Mutation(
        name="server_begins_anew",
        module="restoring",
        breaks="a trajectory server that is back has what the one before it acknowledged",
        old="self._actors.place_server(elapsed_s(), resumed=True)",
        new="self._actors.place_server(elapsed_s(), resumed=False)",
        check=check(
            on_restoring.test_a_server_that_dies_in_the_middle_of_a_call_goes_on_from_store_and_spool,
            "deliver",
            "before",
        ),
    ),
    Mutation(
        name="restored_for_each_caller",
        module="restoring",
        breaks="a role is restored once for each loss, however many saw it",
        old="        if self._done_s.get(role, -1.0) >= asked_s:\n",
        new="        if False:\n",
        check=check(on_restoring.test_who_hears_of_a_loss_after_it_is_made_good_only_asks_again),
    ),
    Mutation(
        name="idle_rank_unseen",
        module="restoring",
        breaks="the loss of a trainer's rank that nobody calls is noticed",
        old='                *(self._actors.ask(rank, "ping", deadline="silent_s") for rank in self._ranks),\n',
        new="",
        check=check(on_restoring.test_the_loss_of_an_idle_rank_is_noticed),
    ),
    Mutation(
        name="rank_is_nobodys",
        module="restoring",
        breaks="the loss of a rank is that of the trainer",
        old="        role = role_of(lost.who)\n",
        new="        role = lost.who\n",
        check=check(on_restoring.test_the_loss_of_any_rank_while_it_trains_is_that_of_the_group, "trainer-1", "before"),
    ),
    Mutation(
        name="retired_with_its_work",
        module="membership",
        breaks="a retired instance has handed over its tokens before it is closed",
        old="        while not self._has_left(instance.id):\n",
        new="        while False:\n",
        check=check(on_membership.test_what_a_retired_instance_ran_goes_on_elsewhere_and_nothing_is_lost),
    ),
    Mutation(
        name="idle_trainer_unseen",
        module="restoring",
        breaks="the loss of a trainer that nobody calls is noticed",
        old='                self._actors.ask("trainer", "version", deadline="silent_s"),\n',
        new="",
        check=check(on_restoring.test_the_loss_of_an_idle_trainer_is_noticed),
    ),
    # -- the link ------------------------------------------------------------------------------------------------
    Mutation(
        name="answer_dropped",
        module="instance_link",
        breaks="every result is passed on",
        old="            for o in outcomes:\n",
        new="            for o in outcomes[:1]:\n",
        check=check(on_link.test_results_are_passed_on_as_the_instance_gives_them, lambda answer: answer),
    ),
    Mutation(
        name="answer_twice",
        module="instance_link",
        breaks="every result is passed on once",
        old="                self._tell(event)\n",
        new="                self._tell(event)\n                self._tell(event)\n",
        check=check(on_link.test_every_result_is_passed_on_once_under_its_epoch),
    ),
    Mutation(
        name="wrong_epoch",
        module="instance_link",
        breaks="a result belongs to the routing that it answers",
        old="event: Event = TrajectorySampled(\n"
        "                    trajectory=o.trajectory, route_number=o.route_number,",
        new="event: Event = TrajectorySampled(\n                    trajectory=o.trajectory, route_number=1,",
        check=check(on_link.test_every_result_is_passed_on_once_under_its_epoch),
    ),
    Mutation(
        name="commands_swapped",
        module="instance_link",
        breaks="commands leave in order: one that waits is overtaken",
        old="            command = pending or await outbox.get()\n            pending = None\n",
        new=(
            "            command = await outbox.get() if pending is None or not outbox.empty() else pending\n"
            "            if pending is not None and command is not pending:\n"
            "                outbox.put_nowait(pending)\n"
            "            pending = None\n"
        ),
        check=check(on_link.test_commands_leave_in_order_and_those_of_a_kind_together),
    ),
    Mutation(
        name="pulls_together",
        module="instance_link",
        breaks="each pull is carried out: two in a row become one",
        old="            if not isinstance(command, Pull):\n",
        new="            if True:\n",
        check=check(on_link.test_commands_leave_in_order_and_those_of_a_kind_together),
    ),
    Mutation(
        name="routes_do_not_wait",
        module="instance_link",
        breaks="a Route after a Pull finds the new weights",
        old="            await self._carry_out(batch)\n",
        new="            asyncio.ensure_future(self._carry_out(batch))\n",
        check=check(on_link.test_a_command_waits_until_the_one_before_it_is_answered),
    ),
    Mutation(
        name="pull_not_told",
        module="instance_link",
        breaks="every answer is passed on: that a pull has finished",
        old="                self._tell(PullFinished(instance=instance, version=version))\n",
        new="",
        check=check(on_link.test_a_command_waits_until_the_one_before_it_is_answered),
    ),
    Mutation(
        name="interrupted_not_told",
        module="instance_link",
        breaks="every answer is passed on: what an interrupt gave back",
        old='for o in await self._actors.ask(self._name, "interrupt", SERVER, ids):\n',
        new='for o in (await self._actors.ask(self._name, "interrupt", SERVER, ids))[1:]:\n',
        check=check(on_link.test_an_interrupted_response_is_told_with_its_tokens),
    ),
    Mutation(
        name="poll_without_deadline",
        module="instance_link",
        breaks="silence is a loss at the deadline",
        old="        within_s = self._deadlines.call_s + POLL_S  #",
        new="        within_s = 1e9  #",
        check=check(on_link.test_silence_is_a_loss_at_the_deadline_of_the_call, "next_events"),
    ),
    Mutation(
        name="standing_still_unseen",
        module="instance_link",
        breaks="an engine that stands still is lost after sample_s",
        old="            if still_s:\n",
        new="            if still_s > 1e9:\n",
        check=check(on_link.test_an_engine_that_stands_still_is_lost_after_sample_s_although_every_call_is_answered),
    ),
    Mutation(
        name="idle_is_still",
        module="instance_link",
        breaks="an engine without work does not stand still",
        old="        if sign != self._seen or not load.running or loading:\n",
        new="        if sign != self._seen or loading:\n",
        check=check(on_link.test_an_engine_without_work_does_not_stand_still),
    ),
    # -- the actors ----------------------------------------------------------------------------------------------
    Mutation(
        name="same_name_again",
        module="actors",
        breaks="a replacement has a name of its own",
        old='(f".{attempt}" if attempt else "")',
        new='""',
        check=check(on_actors.test_a_replacement_has_a_name_of_its_own_and_the_newest_version),
    ),
    Mutation(
        name="replaced_for_ever",
        module="actors",
        breaks="no more than REPLACEMENTS",
        old="        if len(recent) > REPLACEMENTS:\n",
        new="        if len(recent) > REPLACEMENTS + 1:\n",
        check=check(on_actors.test_the_fourth_loss_of_one_instance_is_too_many_and_others_do_not_count),
    ),
    Mutation(
        name="replacement_serves_the_base_model",
        module="actors",
        breaks="a replacement holds the newest version before it joins",
        old="        if self._published:\n            await self.pull",
        new="        if False:\n            await self.pull",
        check=check(on_actors.test_a_replacement_has_a_name_of_its_own_and_the_newest_version),
    ),
    Mutation(
        name="version_before_it_is_loaded",
        module="actors",
        breaks="an instance serves a version once it holds it",
        old="        path = await self._fetch(instance.placed, version)\n",
        new="        instance.version = version\n        path = await self._fetch(instance.placed, version)\n",
        check=check(on_actors.test_an_instance_serves_a_version_once_it_has_pulled_it),
    ),
    Mutation(
        name="refused_and_served",
        module="actors",
        breaks="an instance whose weights or logprobs are wrong serves nothing",
        old="            raise WeightsRefused(refused, instance.id)\n",
        new="            instance.version = version\n",
        check=check(on_actors.test_an_instance_whose_logprobs_are_off_is_out_of_service_and_named),
    ),
    Mutation(
        name="served_versions_pruned",
        module="actors",
        breaks="versions that are served are kept",
        old="        used = wanted | {i.version for i in self.instances.values()}\n",
        new="        used = set(wanted)\n",
        check=check(on_actors.test_versions_that_are_served_or_wanted_are_kept_on_every_host),
    ),
    Mutation(
        name="parameter_server_not_replaced",
        module="actors",
        breaks="a host whose parameter server is gone gets another",
        old="                await self._place_parameters(actor)  #",
        new="                await asyncio.sleep(0)  #",
        check=check(on_actors.test_a_host_whose_parameter_server_went_with_a_lost_process_gets_another),
    ),
    Mutation(
        name="carrier_taken_for_asker",
        module="actors",
        breaks="a stopped process that carries a parameter server is not taken for the instance that asked it",
        old="                if server.address == placed.address:\n",
        new="                if server.address:\n",
        check=check(on_transfers.test_a_stopped_instance_that_carries_the_hosts_parameter_server_is_not_who_asked),
    ),
    Mutation(
        name="own_process_asked_for_ever",
        module="actors",
        breaks="an instance whose own process does not answer is lost",
        old="                if server.address == placed.address:\n",
        new="                if not server.address:\n",
        check=check(on_transfers.test_an_instance_whose_own_process_does_not_answer_is_lost),
    ),
    Mutation(
        name="weights_not_waited_for",
        module="actors",
        breaks="nobody is lost while those that have the weights do not answer",
        old='                logger.warning("%s waits for weights: %s", placed.name, failed)\n',
        new="                raise\n",
        check=check(on_transfers.test_nobody_is_lost_while_those_that_have_the_weights_do_not_answer),
    ),
    Mutation(
        name="load_within_a_short_call",
        module="actors",
        breaks="loading may take as long as its bytes",
        old="        within_s = self._transfers.within_s(version)\n",
        new="        within_s = self._config.deadlines.call_s\n",
        check=check(on_transfers.test_loading_may_take_as_long_as_its_bytes),
    ),
    Mutation(
        name="others_start_on",
        module="background",
        breaks="where one actor cannot start, the others are not waited for",
        old="        for task in tasks:\n            task.cancel()\n        await asyncio.gather",
        new="        await asyncio.gather",
        check=check(on_driver.test_an_actor_that_cannot_start_ends_the_run_at_once),
    ),
    Mutation(
        name="closing_raises",
        module="actors",
        breaks="closing never raises",
        old="            with contextlib.suppress(Exception, asyncio.CancelledError):\n",
        new="            with contextlib.suppress(ValueError):\n",
        check=check(on_actors.test_closing_does_not_raise_whatever_is_gone),
    ),
    Mutation(
        name="closing_waits",
        module="actors",
        breaks="closing waits for nobody for ever",
        old='await self.ask(placed.name, "close", within_s=CLOSE_S)',
        new='await self.ask(placed.name, "close", deadline="train_s")',
        check=check(on_driver.test_closing_never_raises_and_waits_for_nobody_for_ever, "trainer", "silent"),
    ),
    Mutation(
        name="other_weights_resumed",
        module="actors",
        breaks="a run is resumed from the weights its step published",
        old="        if not initial.as_recorded:\n",
        new="        if initial is None:\n",
        check=check(on_driver.test_weights_that_are_not_those_of_the_stored_step_are_refused),
    ),
    Mutation(
        name="limit_unnamed",
        module="actors",
        breaks="a missed deadline names its knob",
        old='f"deadlines.{knob}" if',
        new='"" if',
        check=check(on_actors.test_a_call_has_a_deadline_and_names_its_knob, {}, 3, on_actors.SILENT_SERVER),
    ),
)


def mutated_runtime(mutation: Mutation) -> Runtime:
    """The modules of a runtime, rebuilt from their sources with one of them mutated."""
    built: dict[str, Any] = {}
    kept = {module.__name__: module for module in MODULES.values()}
    try:
        for key, module in MODULES.items():
            path = module.__file__
            assert path is not None
            source = Path(path).read_text()
            if key == mutation.module:
                matches = source.count(mutation.old)
                assert matches == 1, f"{mutation.name}: the source has changed, {matches} matches"
                source = source.replace(mutation.old, mutation.new)
            fresh = ModuleType(module.__name__)
            sys.modules[module.__name__] = fresh  # those after it import it, and dataclasses look theirs up
            exec(compile(source, path, "exec"), fresh.__dict__)
            built[key] = fresh
    finally:
        sys.modules.update(kept)
    return Runtime(**{name: built[name] for name in ("actors", "instance_link", "driver")})
