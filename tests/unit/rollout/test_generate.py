"""Completer and generate functions: retries, continuation, user functions of both signatures."""

import asyncio
import sys
import textwrap
import time

import pytest

from services.common.errors import Code, ServiceError
from services.common.records import SampleStatus, VersionSpan
from services.rollout.core.completer import Completer
from services.rollout.core.counters import Counters
from services.rollout.core.generate import check_function, make_generator
from tests.unit.rollout.parts import SAMPLING, UNAVAILABLE, Chars, ScriptedRouter, make_prompt, make_run, piece
from tests.unit.rollout.parts import serving_fleet as fleet_of


def completer_of(script) -> Completer:
    return Completer(fleet_of(ScriptedRouter(script)), Chars(), Counters())


@pytest.fixture
def user_module(tmp_path, monkeypatch):
    """Writes a module of the user and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(body: str, name: str = "user_generate_under_test") -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(body))
        sys.modules.pop(name, None)
        return name

    return write


async def test_an_engine_that_went_away_is_retried():
    completer = completer_of([UNAVAILABLE, UNAVAILABLE, [piece("ab"), piece("c")]])
    done = await completer.complete([1, 2], SAMPLING, 2, time.monotonic() + 5)
    assert [generation.text for generation in done] == ["ab", "c"]
    assert completer.counters.generated_token_count == 3


async def test_an_aborted_completion_goes_on_from_its_tokens():
    completer = completer_of([[piece("ab", "abort", 1)], [piece("", "abort", 1)], [piece("cd", "stop", 2)]])
    (done,) = await completer.complete([120], SAMPLING, 1, time.monotonic() + 5)
    assert done.text == "abcd"
    assert done.versions == (VersionSpan(1, 0, 2), VersionSpan(2, 2, 4))
    last = completer.fleet.router.requests[-1]
    assert last.input_ids == (120, 97, 98)
    assert last.sampling.max_new_tokens == 6


async def test_every_try_says_the_oldest_version_it_can_meet():
    completer = completer_of([lambda _: _newer(completer), [piece("ab")]])
    completer.fleet.slots[0].version = 7
    await completer.complete([1], SAMPLING, 1, time.monotonic() + 5)
    assert [request.oldest_version for request in completer.fleet.router.requests] == [7, 8]


def _newer(completer):
    completer.fleet.slots[0].version += 1
    return UNAVAILABLE


async def test_a_refused_request_is_not_retried():
    error = ServiceError(Code.INVALID_ARGUMENT, "PROMPT_TOO_LONG", "too long")
    completer = completer_of([error])
    with pytest.raises(ServiceError, match="too long"):
        await completer.complete([1], SAMPLING, 1, time.monotonic() + 5)
    assert len(completer.fleet.router.requests) == 1


async def test_without_an_engine_the_deadline_ends_the_wait():
    completer = completer_of([[piece("a")]])
    completer.fleet._serving.clear()
    with pytest.raises(ServiceError) as caught:
        await completer.complete([1], SAMPLING, 1, time.monotonic() + 0.1)
    assert caught.value.reason == "NO_ENGINE_READY"


async def test_the_context_bounds_new_tokens():
    completer = Completer(fleet_of(ScriptedRouter([[piece("a")]])), Chars(), Counters(), max_context_length=5)
    await completer.complete([1, 2, 3], SAMPLING, 1, time.monotonic() + 1)
    assert completer.fleet.router.requests[0].sampling.max_new_tokens == 2


async def test_native_two_turns(user_module):
    name = user_module(
        """
        async def generate(context, prompt, sampling):
            trajectory = context.start(prompt)
            trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
            trajectory.append_environment(context.tokenizer.encode("="), seconds=0.25)
            trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
            trajectory.metadata["index"] = context.index
            return trajectory
        """
    )
    run = make_run(generate_path=f"{name}.generate", max_turns=2)
    generator = make_generator(completer_of([[piece("ab")]]), run)
    one, two = await generator.generate(make_prompt(), SAMPLING, 2)
    generator.close()
    assert one.loss_mask.tolist() == [1, 1, 0, 1, 1]
    assert (one.turn_count, one.tool_seconds) == (2, 0.25)
    assert [one.metadata, two.metadata] == [{"index": 0}, {"index": 1}]


async def test_max_turns_ends_a_sample_as_truncated(user_module):
    name = user_module(
        """
        async def generate(context, prompt, sampling):
            trajectory = context.start(prompt)
            while True:
                trajectory.append_generation(await context.generate(trajectory.input_ids, sampling))
        """
    )
    generator = make_generator(completer_of([[piece("a")]]), make_run(generate_path=f"{name}.generate", max_turns=3))
    (sample,) = await generator.generate(make_prompt(), SAMPLING, 1)
    generator.close()
    assert (sample.turn_count, sample.status) == (3, SampleStatus.TRUNCATED)


async def test_slime_signature(user_module):
    name = user_module(
        """
        async def generate(args, sample, sampling_params):
            assert args.sglang_router_port == 9 and args.rollout_max_response_len == 8
            assert sampling_params["max_new_tokens"] == 8
            prompt = [ord(c) for c in sample.prompt]
            sample.tokens = prompt + [97, 98, 99]
            sample.response_length = 3
            sample.loss_mask = [1, 0, 1]
            sample.rollout_log_probs = [-0.5, 0.0, -0.25]
            sample.status = type(sample).Status.COMPLETED
            sample.reward = 0.5
            return sample
        """
    )
    generator = make_generator(completer_of([[piece("a")]]), make_run(generate_path=f"{name}.generate"))
    (sample,) = await generator.generate(make_prompt(), SAMPLING, 1)
    generator.close()
    assert sample.loss_mask.tolist() == [1, 0, 1]
    assert sample.log_probs.tolist() == [-0.5, 0.0, -0.25]
    assert sample.versions == (VersionSpan(1, 0, 3),)
    assert (sample.reward, sample.turn_count) == (0.5, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("sample.rollout_log_probs = None", "rollout_log_probs is missing"),
        ("sample.loss_mask = [1]", "loss_mask has 1 entries for 2"),
        ("sample.status = 'odd'", "status is 'odd'"),
        ("sample.status = 'failed'", "set the status to failed"),
        ("sample.response_length = 9", "response_length is 9"),
        ("sample = []", "returned no sample"),
        ("sample.reward = float('nan')", "reward is nan"),
        ("raise SystemExit(3)", "raised SystemExit: 3"),
    ],
)
async def test_slime_results_that_cannot_be_used(user_module, body, message):
    name = user_module(
        f"""
        async def generate(args, sample, sampling_params):
            sample.tokens, sample.response_length = [1, 97, 98], 2
            sample.rollout_log_probs, sample.status = [-0.5, -0.5], "completed"
            {body}
            return sample
        """
    )
    generator = make_generator(completer_of([[piece("a")]]), make_run(generate_path=f"{name}.generate"))
    with pytest.raises(ServiceError, match=message):
        await generator.generate(make_prompt(), SAMPLING, 1)
    generator.close()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("generate", "has no module part"),
        ("no_such_package.module.generate", "there is no module 'no_such_package'"),
        ("json.generate", "module json has no function 'generate'"),
        ("json.dumps", "not an async function"),
    ],
)
def test_bad_import_paths_are_one_sentence(path, message):
    with pytest.raises(ServiceError, match=message) as caught:
        check_function(make_run(generate_path=path))
    assert "custom_generate_function_path" in str(caught.value)
    assert path in str(caught.value)


def test_an_unknown_signature_lists_both(user_module):
    name = user_module("async def generate(one, two): ...")
    with pytest.raises(ServiceError, match=r"\(one, two\); use \(context, prompt, sampling\) or \(args"):
        check_function(make_run(generate_path=f"{name}.generate"))


async def test_a_wrong_return_value_and_a_missing_model_turn_are_named(user_module):
    name = user_module(
        """
        async def nothing(context, prompt, sampling): return None
        async def silent(context, prompt, sampling): return context.start(prompt)
        """
    )
    for function, message in (("nothing", "returned NoneType"), ("silent", "without any token of the model")):
        generator = make_generator(completer_of([[piece("a")]]), make_run(generate_path=f"{name}.{function}"))
        with pytest.raises(ServiceError, match=message):
            await generator.generate(make_prompt(), SAMPLING, 1)
        generator.close()
    await asyncio.sleep(0)
