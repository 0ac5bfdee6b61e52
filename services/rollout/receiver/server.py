"""The receiver: takes weights into an engine's own process while the engine serves.

SGLang calls `load(model, [])` on the scheduler's thread of every tensor-parallel rank (`--custom-weight-loader` with
this path, then `/update_weights_from_tensor` with it as `load_format`); the simulated engine does the same. The first
call starts the receiver: a thread that answers at a Unix socket, a JSON object a line. Later calls activate what was
staged, if the node has said so before (`arm`). Knows the node's commands and no engine.

Invariants: `load` never raises, as an error there would end the scheduler: the node asks for the `result`. What is
activated was received completely for the epoch that `arm` names. One of reserve, receive and activate at a time.
"""

from __future__ import annotations

import contextlib
import gc
import hmac
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.common import fault_points

PATH = "services.rollout.receiver.server.load"
"""Import path of `load`, as engines are told it."""
DIRECTORY, TOKEN = "TETRARCH_RECEIVER_DIR", "TETRARCH_RECEIVER_TOKEN"
"""Environment of an engine: where its sockets are, what a caller must know."""
_ENGINE_ID = "TETRARCH_ENGINE_ID"
"""Its name in fault points."""
_BUSY_SECONDS = 10.0
_SWITCH_SECONDS = 0.0002
"""The scheduler never rests, and Python would let a thread that receives wait 5 ms for it each time."""

_receiver: Receiver | None = None


def load(model: Any, _tensors: object) -> None:
    """Starts the receiver for `model`, or activates what is armed. Never raises."""
    global _receiver
    try:
        if _receiver is None:
            _receiver = Receiver(model, _rank())
            _receiver.start()
        else:
            _receiver.activate(model)
    except Exception as error:  # the node finds no socket, or no result
        print(f"weight receiver: {type(error).__name__}: {error}", file=sys.stderr, flush=True)


def socket_path(directory: str, rank: int) -> Path:
    """Socket of one tensor-parallel rank."""
    return Path(directory) / f"{rank}.sock"


class Refused(Exception):
    """A command that cannot be done. `reason`: in capitals."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Receiver:
    """Answers the node's commands.

    Args:
        model: has `load_weights(iterable of (name, tensor))`.
        rank: among the engine's tensor-parallel ranks.
    """

    def __init__(self, model: Any, rank: int) -> None:
        self._model = model
        self._rank = rank
        self._engine_id = os.environ.get(_ENGINE_ID, "")
        self._token = os.environ[TOKEN]
        self._path = socket_path(os.environ[DIRECTORY], rank)
        self._busy = threading.Lock()
        self._parts_lock = threading.Lock()
        self._parts: tuple[Any, Any] | None = None
        self._staged_epoch: int | None = None
        self._armed: dict[str, Any] | None = None
        """What the next `load` does: the command `arm`."""
        self._result: dict[str, Any] | None = None
        self._commands: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "status": self._status,
            "warm": self._warm,
            "reserve": self._reserve,
            "join": self._join,
            "receive": self._receive,
            "fill": self._fill,
            "leave": self._leave,
            "drop": self._drop,
            "arm": self._arm,
            "result": self._take_result,
        }

    def start(self) -> None:
        """Listens. Raises OSError."""
        sys.setswitchinterval(_SWITCH_SECONDS)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(self._path))
        listener.listen(64)
        threading.Thread(target=self._accept, args=(listener,), daemon=True, name="weight receiver").start()
        # Where the engine has no torch yet, its import takes seconds: now, not while the first update waits.
        threading.Thread(target=self._get_parts, daemon=True, name="weight receiver parts").start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=self._serve, args=(connection,), daemon=True, name="receiver call").start()

    def _serve(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError), connection.makefile("rwb") as stream:
            for line in stream:
                stream.write(json.dumps(self._answer(line)).encode() + b"\n")
                stream.flush()

    def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            if not hmac.compare_digest(str(request.get("token")), self._token):
                return {"ok": False, "reason": "DENIED", "message": "the token is not this engine's"}
            return {"ok": True} | self._commands[request["do"]](request)
        except Refused as error:
            return {"ok": False, "reason": error.reason, "message": str(error)}
        except Exception as error:
            return {"ok": False, "reason": "FAILED", "message": f"{type(error).__name__}: {error}"}

    def _get_parts(self) -> tuple[Any, Any]:
        """Groups and staging memory."""
        with self._parts_lock:
            if self._parts is None:
                from services.rollout.receiver.groups import Groups
                from services.rollout.receiver.held import device_of
                from services.rollout.receiver.staging import Staging

                device = device_of(self._model)
                self._parts = Groups(device), Staging(device)
            return self._parts

    @contextlib.contextmanager
    def _alone(self, seconds: float):
        if not self._busy.acquire(timeout=seconds):
            raise Refused("BUSY", "another transfer or activation is under way")
        try:
            yield
        finally:
            self._busy.release()

    def _forget(self) -> None:
        """What was staged is not activated any more, not even by a call of `load` that comes late."""
        self._staged_epoch = self._armed = None

    def _status(self, _request: dict[str, Any]) -> dict[str, Any]:
        groups = self._parts[0].names if self._parts else []
        return {"engine_id": self._engine_id, "pid": os.getpid(), "groups": groups, "staged_epoch": self._staged_epoch}

    def _warm(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Answers when nothing has to be imported or built any more."""
        self._get_parts()
        from services.checksums import compute
        from services.rollout.receiver.held import device_of

        compute.prepare(device_of(self._model))
        gc.freeze()  # flushing the cache collects garbage on a CPU, and would look through every module for 50 ms
        return {}

    def _reserve(self, request: dict[str, Any]) -> dict[str, Any]:
        from services.rollout.receiver.staging import NoMemory

        plan = [[(name, dtype, tuple(shape)) for name, dtype, shape in bucket] for bucket in request["buckets"]]
        with self._alone(_BUSY_SECONDS):
            self._forget()
            try:
                self._get_parts()[1].reserve(plan)
            except NoMemory as error:
                raise Refused("NO_MEMORY", str(error)) from error
        return {}

    def _join(self, request: dict[str, Any]) -> dict[str, Any]:
        from services.rollout.receiver.groups import Meeting

        group = request["group"]
        meeting = Meeting(**{**group, "rank": group["rank"] + self._rank})
        try:
            self._get_parts()[0].join(meeting, request["seconds"])
        except (RuntimeError, OSError) as error:
            raise Refused("NOT_JOINED", f"group {meeting.name} was not joined: {error}") from error
        return {}

    def _receive(self, request: dict[str, Any]) -> dict[str, Any]:
        groups, staging = self._get_parts()
        with self._alone(_BUSY_SECONDS):
            self._forget()
            begun = time.perf_counter()
            try:
                groups.receive(request["group"], staging.buffers, request["seconds"], self._before_bucket)
            except (RuntimeError, OSError) as error:
                staging.give_up()
                raise Refused("NOT_RECEIVED", str(error)) from error
            self._staged_epoch = request["epoch"]
            return {"seconds": time.perf_counter() - begun}

    def _fill(self, request: dict[str, Any]) -> dict[str, Any]:
        """As `_receive`, from files."""
        from services.rollout.receiver.files import fill

        staging = self._get_parts()[1]
        with self._alone(_BUSY_SECONDS):
            self._forget()
            begun = time.perf_counter()
            try:
                fill(staging.buffers, request["pieces"], request["seconds"], self._before_bucket)
            except (RuntimeError, OSError) as error:
                raise Refused("NOT_RECEIVED", str(error)) from error
            self._staged_epoch = request["epoch"]
            return {"seconds": time.perf_counter() - begun}

    def _before_bucket(self, index: int) -> None:
        fault_points.reach("engine.bucket", engine=self._engine_id, bucket=str(index))

    def _leave(self, request: dict[str, Any]) -> dict[str, Any]:
        """Also ends what is received over the group; answers when that has come to its end."""
        if self._parts is not None:
            self._parts[0].leave(request["group"])
            with self._alone(_BUSY_SECONDS):
                self._forget()
        return {}

    def _drop(self, _request: dict[str, Any]) -> dict[str, Any]:
        """Gives the memory back."""
        if self._parts is not None:
            with self._alone(_BUSY_SECONDS):
                self._forget()
                self._parts[1].give_up()
        return {}

    def _arm(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._staged_epoch is None or self._staged_epoch != request["epoch"]:
            raise Refused("NOT_STAGED", f"staged is epoch {self._staged_epoch}, not {request['epoch']}")
        self._result, self._armed = None, request
        return {}

    def activate(self, model: Any) -> None:
        """On the scheduler's thread; the outcome is the `result`."""
        armed, self._armed = self._armed, None
        if armed is None:
            return
        try:
            self._result = self._activate(model, armed)
        except Exception as error:
            self._result = {"error": f"{type(error).__name__}: {error}"}

    def _activate(self, model: Any, armed: dict[str, Any]) -> dict[str, Any]:
        from services.rollout.receiver import held

        with self._alone(0.0):
            if self._staged_epoch != armed["epoch"]:
                raise Refused("NOT_STAGED", f"epoch {armed['epoch']} is not staged any more")
            how = self._get_parts()[1].activate(model, repeat=armed["repeat"])
            return {"how": how, "checksums": held.checksums(model, armed["names"], armed["algorithm"])}

    def _take_result(self, _request: dict[str, Any]) -> dict[str, Any]:
        if self._result is None:
            raise Refused("NOT_ACTIVATED", "the engine did not call the receiver")
        if "error" in self._result:
            raise Refused("NOT_ACTIVATED", self._result["error"])
        return self._result


def _rank() -> int:
    """The engine's own rank: its world is its tensor-parallel ranks. An engine without torch has one."""
    distributed = sys.modules.get("torch.distributed")
    ready = distributed is not None and distributed.is_available() and distributed.is_initialized()
    return distributed.get_rank() if ready else 0
