"""Contexts of tokens in conversations with branches, against a model that stores every context."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from staleflow.stores.context_branches import (
    ContextBranch,
    context_positions,
    context_ranges,
    longest_shared_prefix,
    training_sequences,
)


@dataclass
class NaiveConversation:
    """A conversation. contexts: for each token, the positions of all tokens before it."""

    prompt: int
    branches: list[ContextBranch] = field(default_factory=list)
    contexts: list[list[int]] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    now: list[int] = field(default_factory=list)
    """Positions of the current context."""

    def add(self, sampled: bool) -> None:
        self.contexts.append(list(self.now))
        self.sampled.append(sampled)
        self.now.append(len(self.contexts) - 1)

    def leave(self, after: int) -> None:
        self.branches.append(ContextBranch(len(self.contexts), after))
        self.now = [*self.contexts[after - 1], after - 1] if after else []


@st.composite
def conversations(draw: st.DrawFn) -> NaiveConversation:
    result = NaiveConversation(prompt=draw(st.integers(1, 4)))
    for _ in range(result.prompt):
        result.add(False)
    for turn in range(draw(st.integers(1, 6))):
        if turn:
            if draw(st.booleans()):
                result.leave(draw(st.integers(0, len(result.contexts) - 1)))
            for _ in range(draw(st.integers(0 if result.now else 1, 2))):
                result.add(False)
        for _ in range(draw(st.integers(1, 3))):
            result.add(True)
    return result


@given(conversations())
def test_the_context_of_a_branch_is_that_of_its_parent_token(conversation: NaiveConversation) -> None:
    for place, context in enumerate(conversation.contexts):
        before = [branch for branch in conversation.branches if branch.start <= place]
        assert context_positions(before, place).tolist() == context
    assert context_positions(conversation.branches, len(conversation.contexts)).tolist() == conversation.now


@given(conversations())
def test_each_sampled_token_is_trained_once_with_its_context(conversation: NaiveConversation) -> None:
    trained = np.asarray(conversation.sampled)
    seen: list[int] = []
    parts = training_sequences(conversation.branches, trained)
    for path, own in parts:
        for n, (place, here) in enumerate(zip(path.tolist(), own.tolist(), strict=True)):
            assert conversation.contexts[place] == path[:n].tolist()
            seen += [place] if here else []
    assert sorted(seen) == np.flatnonzero(trained).tolist()
    # No two could be one: none is the beginning of another.
    paths = [path.tolist() for path, _ in parts]
    assert not any(a == b[: len(a)] for i, a in enumerate(paths) for j, b in enumerate(paths) if i != j)
    if not conversation.branches:
        assert len(parts) == 1


@given(conversations(), st.data())
def test_a_branch_starts_where_its_ids_differ_from_every_context(
    conversation: NaiveConversation, data: st.DataObject
) -> None:
    ids = np.asarray(
        data.draw(st.lists(st.integers(0, 1), min_size=len(conversation.contexts), max_size=len(conversation.contexts)))
    )
    wanted = np.asarray(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=8)))
    count, after = longest_shared_prefix(conversation.branches, ids, wanted)
    whole = [[*context, place] for place, context in enumerate(conversation.contexts)]
    agreeing = [path for path in whole if ids[path].tolist() == wanted[: len(path)].tolist()]
    assert count == max(map(len, agreeing), default=0)
    assert after in ([path[-1] + 1 for path in agreeing if len(path) == count] or [0])


def test_a_side_conversation_ends_and_the_main_one_continues() -> None:
    # 0 1 prompt, 2 3 sampled; beside: 4 given, 5 sampled; again after 3: 6 given, 7 sampled.
    branches = [ContextBranch(4, 0), ContextBranch(6, 4)]
    assert context_ranges(branches, 8) == [(0, 4), (6, 8)]
    trained = np.asarray([False, False, True, True, False, True, False, True])
    parts = training_sequences(branches, trained)
    assert [path.tolist() for path, _ in parts] == [[4, 5], [0, 1, 2, 3, 6, 7]]
