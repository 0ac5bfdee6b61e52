"""The simulated engine as a process: SGLang's HTTP API over `SimulatedModel` and `HeldWeights`.

    python -m services.rollout.adapters.simulated_server --model-path DIR --port P [--settings JSON]

Up in about a second: torch is imported when the first weight group is joined. Answers have SGLang 0.5.23's
shape, errors its status codes. Stop strings are accepted and never met: the text is random.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse

from services.rollout.adapters.checkpoint import model_config
from services.rollout.adapters.simulated_model import Request as Sample
from services.rollout.adapters.simulated_model import SimulatedModel, SimulatedSettings
from services.rollout.adapters.simulated_recordings import recording
from services.rollout.adapters.simulated_weights import HeldWeights
from services.rollout.receiver import server as receiver

SAMPLING_KEYS = {
    "max_new_tokens",
    "stop",
    "stop_token_ids",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "min_new_tokens",
    "n",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
    "sampling_seed",
    "stop_regex",
    "json_schema",
    "regex",
    "ebnf",
    "logit_bias",
    "custom_params",
    "spaces_between_special_tokens",
    "beam_width",
    "structural_tag",
    "stream_interval",
}
"""Keys of sampling_params that SGLang knows; any other is an error there too."""
RANGES = {
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("in (0, 1]", lambda value: 0 < value <= 1),
    "top_k": ("-1 (off) or at least 1", lambda value: value == -1 or value >= 1),
    "min_p": ("in [0, 1]", lambda value: 0 <= value <= 1),
}
"""Values outside are errors there too."""


class SimulatedServer:
    """Routes and what they act on."""

    def __init__(
        self, model_path: Path, context_length: int | None, group_timeout: float, settings: SimulatedSettings
    ) -> None:
        config = model_config(model_path)
        self._config = config
        self.model_path = model_path
        self.settings = settings
        self.vocab_size = config["vocab_size"]
        self.context_length = context_length or config["max_position_embeddings"]
        eos = config.get("eos_token_id")
        self.eos = eos[0] if isinstance(eos, list) else (eos if eos is not None else self.vocab_size - 1)
        self.model = SimulatedModel(settings, self.vocab_size)
        self.weights = HeldWeights(model_path, group_timeout)
        self._tokenizer = _tokenizer(model_path)
        self.app = FastAPI(lifespan=self._lifespan, openapi_url=None)
        self._routes()

    @contextlib.asynccontextmanager
    async def _lifespan(self, _app: FastAPI):
        decoding = asyncio.create_task(self.model.run(), name="decoding loop")
        yield
        decoding.cancel()

    def _routes(self) -> None:
        post = {
            "/generate": self.generate,
            "/pause_generation": self.pause,
            "/continue_generation": self.resume,
            "/abort_request": self.abort,
            "/flush_cache": self.flush,
            "/init_weights_update_group": self._weights_call(lambda body: self.weights.join(body)),
            "/destroy_weights_update_group": self._weights_call(lambda body: self.weights.leave(body["group_name"])),
            "/begin_weight_update": self._weights_call(lambda _: self.weights.begin()),
            "/end_weight_update": self._weights_call(lambda _: self.weights.end()),
            "/update_weights_from_distributed": self.receive,
            "/update_weights_from_tensor": self.load,
            "/update_weights_from_disk": self._weights_call(lambda body: self.weights.load_files(body)),
            "/update_weight_version": self.set_version,
            "/weights_checker": self.check,
        }
        get = {
            "/health": self.health,
            "/health_generate": self.health,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/v1/models": self.models,
            "/v1/loads": self.loads,
        }
        for path, handler in post.items():
            self.app.add_route(path, handler, methods=["POST"])
        for path, handler in get.items():
            self.app.add_route(path, handler, methods=["GET"])

    async def generate(self, request: Request) -> JSONResponse:
        body = await request.json()
        ids, params = body.get("input_ids"), body.get("sampling_params") or {}
        problem = self._problem(ids, params)
        if problem:
            return _error(problem)
        if params.get("max_new_tokens") == 0:
            return JSONResponse(self._prompt_answer(body))
        count = params.get("n", 1)
        begun = time.monotonic()
        # A sample that is asked for alone has its number behind the id of the request.
        _, _, number = str(body.get("rid") or "").partition("#")
        indexes = [int(number)] if number.isdigit() and count == 1 else range(count)
        samples = await asyncio.gather(*(self.model.submit(tuple(ids), i, params, self.eos) for i in indexes))
        answers = [self._answer(body.get("rid"), sample, begun) for sample in samples]
        for answer in answers:
            answer["meta_info"] |= recording(body, answer["output_ids"], self._config)
        return JSONResponse(answers if count > 1 else answers[0])

    def _problem(self, ids: Any, params: dict[str, Any]) -> str:
        if not ids or not all(isinstance(token, int) for token in ids):
            return "input_ids must be a non-empty list of integers; this engine takes no text and no batches."
        unknown = set(params) - SAMPLING_KEYS
        if unknown:
            return f"Unexpected sampling parameters: {', '.join(sorted(unknown))}."
        for key, (allowed, holds) in RANGES.items():
            if params.get(key) is not None and not holds(params[key]):
                return f"{key} must be {allowed}, got {params[key]}."
        wanted = params.get("max_new_tokens", 128)
        if len(ids) + (128 if wanted is None else wanted) > self.context_length:
            return f"The request of {len(ids)} input tokens exceeds the context of {self.context_length} tokens."
        if not all(0 <= token < self.vocab_size for token in ids):
            return f"input_ids must be below the vocabulary size {self.vocab_size}."
        return ""

    def _answer(self, rid: Any, sample: Sample, begun: float) -> dict[str, Any]:
        tokens = [int(token) for part in sample.tokens for token in part]
        log_probs = [float(value) for part in sample.log_probs for value in part]
        return {
            "text": self._text(tokens),
            "output_ids": tokens,
            "meta_info": {
                "id": rid or sample.key,
                "finish_reason": sample.done.result(),
                "prompt_tokens": len(sample.input_ids),
                "completion_tokens": len(tokens),
                "cached_tokens": sample.cached,
                "num_retractions": sample.retractions,
                "weight_version": self.model.version,
                "weight_versions": [{"version": v, "start": start, "end": end} for v, start, end in sample.spans],
                "input_token_logprobs": [],
                "output_token_logprobs": [[p, token, None] for p, token in zip(log_probs, tokens, strict=True)],
                "output_token_logprobs_length": len(tokens),
                "e2e_latency": time.monotonic() - begun,
            },
        }

    def _prompt_answer(self, body: dict[str, Any]) -> dict[str, Any]:
        """Nothing is generated: log-probs of the input from `logprob_start_len` on, as SGLang lists them."""
        ids, first = body["input_ids"], body.get("logprob_start_len", -1)
        first, top_k = len(ids) if first < 0 else first, body.get("top_logprobs_num", 0)
        sampled, top_ids, top = self.model.prompt_log_probs(tuple(ids), first, top_k)
        rows = [[p, token, None] for p, token in zip(sampled, ids[first:], strict=True)]
        tops = [[[p, token, None] for p, token in zip(*row, strict=True)] for row in zip(top, top_ids, strict=True)]
        if rows:  # nothing comes before the first token, so nothing is said of it
            rows[0][0], tops[0] = None, None
        meta = {
            "id": body.get("rid") or "prompt",
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "cached_tokens": 0,
            "weight_version": self.model.version,
            "input_token_logprobs": rows,
            "output_token_logprobs": [],
        }
        if top_k:
            meta |= {"input_top_logprobs": tops, "output_top_logprobs": []}
        return {"text": "", "output_ids": [], "meta_info": meta}

    def _text(self, tokens: list[int]) -> str:
        if self._tokenizer is None:
            return " ".join(map(str, tokens))
        return self._tokenizer.decode(tokens, skip_special_tokens=True)

    async def pause(self, request: Request) -> JSONResponse:
        raw = await request.body()
        if not raw:
            return _error("A body with a mode is required.")
        self.model.pause((await request.json()).get("mode", "abort"))
        return JSONResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, _request: Request) -> JSONResponse:
        self.model.resume()
        return JSONResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: Request) -> PlainTextResponse:
        body = await request.json()
        if body.get("abort_all"):
            self.model.abort_all()
        return PlainTextResponse("")

    async def flush(self, _request: Request) -> PlainTextResponse:
        if self.model.flush():
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("The cache cannot be flushed while requests run.\n", status_code=400)

    def _weights_call(self, action):
        async def handler(request: Request) -> JSONResponse:
            body = await request.json()
            try:
                await asyncio.to_thread(action, body)
            except ValueError as error:
                return JSONResponse({"success": False, "message": str(error)}, status_code=400)
            return JSONResponse({"success": True, "message": "Succeeded."})

        return handler

    async def receive(self, request: Request) -> JSONResponse:
        self.model.freeze(True)
        try:
            return await self._weights_call(self.weights.receive)(request)
        finally:
            self.model.freeze(False)

    async def load(self, request: Request) -> JSONResponse:
        """SGLang's extension point: no tensors, and the receiver called with what holds the weights."""
        self.model.freeze(True)
        try:
            return await self._weights_call(self._call_receiver)(request)
        finally:
            self.model.freeze(False)

    def _call_receiver(self, body: dict[str, Any]) -> None:
        if body.get("load_format") != receiver.PATH:
            raise ValueError(f"Unknown load_format={body.get('load_format')}")
        self.weights.require_open()
        receiver.load(self.weights, [])

    async def set_version(self, request: Request) -> JSONResponse:
        body = await request.json()
        if body.get("abort_all_requests", True):
            self.model.abort_all()
        follows_weights = self.settings.tokens_follow == "weights"
        fingerprint = await asyncio.to_thread(self.weights.fingerprint) if follows_weights else ""
        self.model.set_version(str(body["new_version"]), fingerprint)
        return JSONResponse({"success": True, "message": "Version set.", "new_version": self.model.version})

    async def check(self, _request: Request) -> JSONResponse:
        ranks = [{"checksums": await asyncio.to_thread(self.weights.checksums)}]
        return JSONResponse({"success": True, "message": "Success.", "ranks": ranks})

    async def health(self, _request: Request) -> PlainTextResponse:
        return PlainTextResponse("")

    async def server_info(self, _request: Request) -> JSONResponse:
        return JSONResponse(
            {
                "version": "simulated",
                "model_path": str(self.model_path),
                "context_length": self.context_length,
                "max_running_requests": self.settings.max_running_requests,
                "dtype": "auto",
                "tp_size": 1,
                "dp_size": 1,
                "internal_states": [{}],
            }
        )

    async def model_info(self, _request: Request) -> JSONResponse:
        path = str(self.model_path)
        return JSONResponse(
            {"model_path": path, "served_model_name": path, "weight_version": self.model.version, "is_generation": True}
        )

    async def models(self, _request: Request) -> JSONResponse:
        return JSONResponse({"object": "list", "data": [{"id": str(self.model_path), "object": "model"}]})

    async def loads(self, _request: Request) -> JSONResponse:
        load = {
            "dp_rank": 0,
            "num_running_reqs": len(self.model.running),
            "num_waiting_reqs": len(self.model.waiting),
        }
        return JSONResponse({"timestamp": time.time(), "loads": [load]})


def _error(message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status_code=400)


def _tokenizer(model_path: Path):
    path = model_path / "tokenizer.json"
    if not path.exists():
        return None
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path))


def main() -> None:
    parser = argparse.ArgumentParser(description="Simulated inference engine with SGLang's HTTP API.")
    parser.add_argument("--model-path", type=Path, required=True, help="checkpoint: its config, tokenizer and tensors")
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, required=True, help="port to bind")
    parser.add_argument("--context-length", type=int, help="longest prompt and response; the model's own if not given")
    parser.add_argument("--group-timeout", type=float, default=60.0, help="seconds to wait for a weight group")
    parser.add_argument("--settings", default="{}", help="SimulatedSettings as JSON")
    options = parser.parse_args()
    settings = SimulatedSettings.model_validate_json(options.settings)
    server = SimulatedServer(options.model_path, options.context_length, options.group_timeout, settings)
    uvicorn.run(server.app, host=options.host, port=options.port, log_level="warning", access_log=False)


if __name__ == "__main__":
    main()
