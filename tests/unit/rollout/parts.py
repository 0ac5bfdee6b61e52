"""Small in-memory ports for tests of the core: a router with a script, a buffer, a scorer, a tokenizer."""

from __future__ import annotations

import asyncio

import numpy as np

from services.common.errors import Code, ServiceError
from services.common.records import Prompt, SamplingParams, VersionSpan
from services.rollout.core.engine_port import Generation, LaunchSpec
from services.rollout.core.fleet import Fleet
from services.rollout.core.ports import Lease, PutResult, Score
from services.rollout.core.run_settings import FleetSettings, RunSettings, ScoreSettings

SAMPLING = SamplingParams(temperature=1.0, max_new_tokens=8)


def make_run(**changes) -> RunSettings:
    values = {
        "run_id": "r",
        "checkpoint": "/nowhere",
        "sft": False,
        "sampling": SAMPLING,
        "eval_sampling": SAMPLING,
        "score": ScoreSettings("exact_match", timeout=1.0),
        "fleet": FleetSettings("simulated", LaunchSpec("/nowhere"), 1, "round_robin"),
        "samples_per_prompt": 2,
        "generate_timeout": 5.0,
        "keys": {"n_samples_per_prompt": 2, "rollout_max_response_len": 8},
    }
    return RunSettings(**(values | changes))


def make_prompt(text: str = "12", group_id: str = "g", **changes) -> Prompt:
    tokens = np.array([ord(char) for char in text], np.int32)
    return Prompt(group_id, 0, 0, 0, text, changes.pop("label", "3"), tokens, **changes)


class Chars:
    """Token id = code point."""

    eos_token_id = 0

    def encode(self, text):
        return [ord(char) for char in text]

    def decode(self, token_ids):
        return "".join(chr(token) for token in token_ids if token)


def piece(text: str, finish="stop", version=1) -> Generation:
    ids = np.array([ord(char) for char in text], np.int32)
    spans = (VersionSpan(version, 0, len(ids)),) if len(ids) else ()
    return Generation(text, ids, np.full(len(ids), -1.0, np.float32), finish, spans, engine_url="http://e")


class ScriptedRouter:
    """Answers each request with the next entry of a script: an exception, or one generation per sample."""

    url = "http://127.0.0.1:9"

    def __init__(self, script):
        self.script = list(script)
        self.requests = []

    async def generate(self, request, timeout):
        self.requests.append(request)
        entry = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        if callable(entry):
            entry = entry(request)
        if isinstance(entry, Exception):
            raise entry
        return list(entry)

    async def remove_worker(self, url):
        pass


def serving_fleet(router) -> Fleet:
    fleet = Fleet("n", 1, router)
    fleet._serving.set()
    fleet._routed.add("n-0")
    fleet.slots[0].version = 1
    return fleet


UNAVAILABLE = ServiceError(Code.UNAVAILABLE, "ENGINE_UNAVAILABLE", "an engine went away")


class ListBuffer:
    """Prompts from a list; remembers what was put, released and evicted."""

    def __init__(self, prompts):
        self.pending = [(prompt, 0) for prompt in prompts]
        self.put, self.evicted, self.released, self.extended = {}, {}, [], 0
        self._leased = {}
        self.put_errors, self.release_errors = [], []
        self.partials, self.unharmed = {}, 0
        self.lost = set()

    async def lease_prompts(self, run_id, max_count, max_wait, ttl):
        batch, self.pending = self.pending[:max_count], self.pending[max_count:]
        if not batch:
            await asyncio.sleep(min(max_wait, 0.02))
        leases = [
            Lease(f"{p.group_id}#{attempt}", p, attempt, self.partials.pop(p.group_id, None)) for p, attempt in batch
        ]
        self._leased |= {lease.lease_id: lease for lease in leases}
        return leases

    async def extend_leases(self, run_id, lease_ids, ttl):
        self.extended += 1
        return self.lost & set(lease_ids)

    async def release_leases(self, run_id, lease_ids, evict_reason="", *, unharmed=False, partials=None):
        if self.release_errors:
            raise self.release_errors.pop(0)
        for lease_id in lease_ids:
            lease = self._leased[lease_id]
            if evict_reason:
                self.evicted[lease.prompt.group_id] = evict_reason
            else:
                self.released.append(lease_id)
                self.pending.append((lease.prompt, lease.attempt + (not unharmed)))
                self.unharmed += unharmed
        self.partials |= {lease_id.partition("#")[0]: group for lease_id, group in (partials or {}).items()}

    async def put_groups(self, run_id, groups):
        if self.put_errors:
            raise self.put_errors.pop(0)
        self.put |= {group.group_id: group for _, group in groups}
        return [PutResult(group.group_id, "STORED") for _, group in groups]


class FixedScorer:
    """One answer for all items; exceptions in `errors` come first."""

    def __init__(self, score=None, errors=()):
        self.answer, self.errors, self.calls = score or Score(1.0), list(errors), []

    async def score(self, call, items):
        self.calls.append((call, list(items)))
        if self.errors:
            raise self.errors.pop(0)
        return [self.answer] * len(items)
