"""Reward functions of users: forms, loading, returned values."""

import asyncio
import math

import pytest

from services.common.errors import ServiceError
from services.reward.core import custom
from services.reward.core.records import Item, Task, Unscored
from services.reward.core.rewards import to_outcome

MODULE = """
async def modern(item): return len(item.response)
def plain(item): return {"reward": 1, "length": len(item.response), "note": "x"}
def sets_reward(args, sample): sample.reward = args.bonus
async def pair(args, samples): return [float(s.label) for s in samples]
def ours_grouped(items): return [0.5] * len(items)
def short(items): return [1.0]
def reads_tokens(item): return item.tokens
class Judge:
    async def __call__(self, args, sample, **kwargs): return 1.0
judge = Judge()
def three(a, b, c): return 1
constant = 3
"""
ITEMS = (Item("0", "p", "ab", "1"), Item("1", "p", "abc", "2"))


@pytest.fixture
def module(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "user_rewards.py").write_text(MODULE)
    (tmp_path / "broken_rewards.py").write_text("value = 1 / 0\n")
    return "user_rewards"


def run(path, items, *, grouped=False, options=None):
    task = Task("custom", tuple(items), options or {}, path, grouped)
    with asyncio.Runner() as runner:
        samples, raw = custom.call(custom.load(path), task, lambda waiting: runner.run(_await(waiting)))
    return custom.outcomes(task, samples, raw, 0.0)


async def _await(waiting):
    return await waiting


def test_forms(module):
    assert run(f"{module}.modern", ITEMS[:1])[0].reward == 2.0
    outcome = run(f"{module}:plain", ITEMS[:1])[0]
    assert (outcome.reward, outcome.details) == (1.0, {"length": 2.0})
    assert run(f"{module}.sets_reward", ITEMS[:1], options={"bonus": 0.25})[0].reward == 0.25
    assert [o.reward for o in run(f"{module}.pair", ITEMS, grouped=True)] == [1.0, 2.0]
    assert [o.reward for o in run(f"{module}.ours_grouped", ITEMS, grouped=True)] == [0.5, 0.5]
    assert run(f"{module}.judge", ITEMS[:1])[0].reward == 1.0
    assert custom.load(f"{module}.judge").is_async
    assert not custom.load(f"{module}.plain").is_async


def test_a_group_answer_of_the_wrong_length_scores_nobody(module):
    outcomes = run(f"{module}.short", ITEMS, grouped=True)
    assert [o.reason for o in outcomes] == [Unscored.INVALID_REWARD] * 2


def test_an_unknown_attribute_names_the_known_ones(module):
    with pytest.raises(AttributeError, match=r"'tokens'.*response"):
        run(f"{module}.reads_tokens", ITEMS[:1])


@pytest.mark.parametrize(
    ("path", "named"),
    [
        ("score", "package.module.function"),
        ("no_such_module.score", "python_path"),
        ("broken_rewards.score", r"ZeroDivisionError.*broken_rewards.py:1"),
        ("user_rewards.plane", "Did you mean 'plain'"),
        ("user_rewards.constant", "not a function"),
        ("user_rewards.three", r"f\(item\)"),
    ],
)
def test_what_cannot_be_loaded_says_why(module, path, named):
    with pytest.raises(ServiceError, match=named) as caught:
        custom.load(path)
    assert caught.value.reason == "GRADER_NOT_LOADABLE"
    assert "\n" not in str(caught.value)
    assert str(caught.value).count(". ") == 0 or "Did you mean" in str(caught.value)


@pytest.mark.parametrize("raw", [math.nan, math.inf, None, "1.0", {}, {"reward": math.nan}, [1, 2], object()])
def test_no_reward_is_invalid_and_not_zero(raw):
    outcome = to_outcome(raw)
    assert outcome.reward is None
    assert outcome.reason is Unscored.INVALID_REWARD


@pytest.mark.parametrize(("raw", "reward"), [(True, 1.0), (2, 2.0), ({"score": 3, "acc": 1}, 3.0)])
def test_numbers_and_dicts(raw, reward):
    assert to_outcome(raw).reward == reward


def test_reward_key_picks_the_field():
    assert to_outcome({"a": 1.0, "b": 2.0}, reward_key="b").reward == 2.0
    assert "'c'" in to_outcome({"a": 1.0}, reward_key="c").message
