"""Components of the tests' NVFlare jobs: a trainer that answers as it is told, and a server that keeps what it receives.

NVFlare copies this file into a job, so it imports nothing of the tests.
"""

from __future__ import annotations

import os
import pickle
import uuid
from typing import Any

from nvflare.apis.dxo import DXO, DataKind, from_shareable
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_component import FLComponent
from nvflare.apis.fl_constant import FLContextKey, ReturnCode
from nvflare.apis.shareable import make_reply


class Trainer(Executor):
    """Adds a number to every array of the model, in place, as NVFlare's NPTrainer does.

    Args:
        step: the number. how: "weights", "difference", or what goes wrong.
    """

    def __init__(self, step: float = 1000.0, how: str = "weights") -> None:
        super().__init__()
        self.step, self.how = step, how

    def execute(self, task_name: str, shareable: Any, fl_ctx: Any, abort_signal: Any) -> Any:
        model = from_shareable(shareable).data if "DXO" in shareable else {}
        for value in model.values():
            value += self.step
        if self.how == "raises":
            raise ValueError("secret 1234.5")
        if self.how == "failed":
            failed = make_reply(ReturnCode.EXECUTION_EXCEPTION)
            failed["secret"] = 1234.5
            return failed
        meta = {"NUM_STEPS_CURRENT_ROUND": 217, "initial_metrics": {"accuracy": 0.8125}}
        kind = DataKind.WEIGHT_DIFF if self.how == "difference" else DataKind.WEIGHTS
        data = {name: value * 0 + self.step for name, value in model.items()} if self.how == "difference" else model
        if self.how == "more":
            data = {**data, "hessian": data["numpy_key"]}
        answer = DXO(kind, data, meta).to_shareable()
        answer["secret"] = 1234.5
        answer.set_header("secret", 1234.5)
        return answer


class Received(FLComponent):
    """Writes every result that the server receives, before anything at the server handles it, to a file of its own.

    Args:
        folder: of the files.
    """

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def handle_event(self, event_type: str, fl_ctx: Any) -> None:
        if event_type != EventType.BEFORE_TASK_RESULT_FILTER:
            return
        result = fl_ctx.get_prop(FLContextKey.TASK_RESULT)
        headers = {key: value for key, value in result["__headers__"].items() if key not in ("__peer_ctx__", "fl_client")}
        body = {key: value for key, value in result.items() if key != "__headers__"}
        kept = {"site": fl_ctx.get_peer_context().get_identity_name(), "task": headers["__task_name__"], "headers": headers}
        with open(os.path.join(self.folder, uuid.uuid4().hex), "wb") as file:
            pickle.dump({**kept, "rc": result.get_return_code(), "body": body}, file)
