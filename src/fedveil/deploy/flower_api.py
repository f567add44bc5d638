"""Uses of Flower's internal modules: the programs it starts, and the tasks taken from them.

Flower's SuperLink (`fedveil.deploy.superlink`) and SuperNode run as programs that start nothing themselves. Their tasks are taken
and done here, in the process that has the configuration, the data and the ledger. So no code from the network is ever run, and
nothing is imported again for each message.

Written for flwr 1.41; `tests/deploy` runs it with the installed version.
"""

from __future__ import annotations

import hashlib
import logging
import time
from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from fedveil.deploy.programs import require_flower
from fedveil.deploy.strict_grid import StrictGrid
from fedveil.deploy.wire_format import WireError, parts_of, record
from fedveil.errors import ConfigError

_log = logging.getLogger(__name__)

_UNSTORED = 60.0
"""Seconds that a SuperNode has to store the message of a task that it has given out."""
PUBLISHER, NAME = "fedveil", "fedveil"
_BUNDLE = {
    "pyproject.toml": f"""\
[project]
name = "{NAME}"
version = "1.0.0"
description = "Rounds of fedveil; both apps run in fedveil's own processes, and nothing of this bundle does."
dependencies = []
license = "Apache-2.0"

[tool.flwr.app]
publisher = "{PUBLISHER}"

[tool.flwr.app.components]
serverapp = "app:server"
clientapp = "app:client"
""",
    "app.py": """\
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

server = ServerApp()
client = ClientApp()
""",
}


FLEET_UPLOADS = ("/v1/fleet/push-object", "/v1/fleet/push-messages")
FLEET_ROUTES = frozenset(
    {
        *FLEET_UPLOADS,
        "/v1/fleet/activate-node",
        "/v1/fleet/deactivate-node",
        "/v1/fleet/send-node-heartbeat",
        "/v1/fleet/pull-messages",
        "/v1/fleet/get-run",
        "/v1/fleet/get-fab",
        "/v1/fleet/pull-object",
        "/v1/fleet/confirm-message-received",
    }
)
"""Routes that a SuperNode needs from a SuperLink that admits keys."""


def require_fleet_routes() -> None:
    """Refuse a version of Flower whose machines do not meet at one HTTP port.

    Raises:
        ConfigError: Flower is not installed, or in another version.
    """
    require_flower()
    import flwr

    try:
        from flwr.superlink.routers.fleet.router import router

        missing = FLEET_ROUTES - {route.path for route in router.routes}
    except ImportError:
        missing = FLEET_ROUTES
    if missing:
        raise ConfigError(
            f"flwr {flwr.__version__} is installed, which has no route {min(missing)}: several machines need 1.40 to 1.42, so "
            f"pip install 'flwr>=1.40,<1.43'"
        )


def superlink_app(secret: bytes) -> Any:
    """Return the app of a SuperLink, with its state in memory; it starts no program and opens no port.

    Args:
        secret: shared with the processes that may take its tasks.
    """
    from flwr.common.constant import TRANSPORT_TYPE_GRPC_RERE
    from flwr.supercore.constant import FLWR_IN_MEMORY_DB_NAME
    from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin
    from flwr.superlink.config_loader import SuperLinkLifespanConfig
    from flwr.superlink.main import create_app

    config = SuperLinkLifespanConfig(
        control_address="",
        host="",
        port=0,
        insecure=True,
        superexec_auth_secret=secret,
        authn_plugin=NoOpControlAuthnPlugin(),
        enable_event_log=False,
        enable_supernode_auth=True,
        fleet_api_type=TRANSPORT_TYPE_GRPC_RERE,
        simulation=False,
        database=FLWR_IN_MEMORY_DB_NAME,
        isolation="process",
        runtime_dependency_install=False,
        health_server_address=None,
        certificates=None,
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        artifact_provider=None,
        fleet_api_address=None,
        ssl_ca_certfile=None,
        ssl_certfile=None,
        ssl_keyfile=None,
    )
    logging.getLogger("flwr").setLevel(logging.WARNING)  # below that level it logs digests of messages
    return create_app(config, _Nothing)


class _Nothing:
    """Program that a SuperLink starts alongside its app: none."""

    def __init__(self, config: Any, states: Any) -> None: ...

    def startup(self) -> None: ...

    def shutdown(self) -> None: ...


def signer(headers: Mapping[bytes, bytes]) -> bytes:
    """Return the public key (PEM) that a SuperNode's request claims to be signed with, or empty bytes."""
    from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER

    with suppress(ValueError):
        return b64decode(headers.get(FLEET_HTTP_PUBLIC_KEY_HEADER.encode(), b""), validate=True)
    return b""


def is_signed_by(key: bytes, headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the request is signed with that key; Flower checks the age of the signature."""
    from flwr.common.constant import TIMESTAMP_HEADER
    from flwr.supercore.constant import FLEET_HTTP_SIGNATURE_HEADER
    from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature

    with suppress(ValueError):
        signature = b64decode(headers.get(FLEET_HTTP_SIGNATURE_HEADER.encode(), b""), validate=True)
        return bool(verify_signature(bytes_to_public_key(key), headers.get(TIMESTAMP_HEADER.encode(), b""), signature))
    return False


def clock_ahead(headers: Mapping[bytes, bytes], now: float) -> float:
    """Return by how many seconds the signer's clock is ahead, if Flower would refuse the request for that; else 0.

    Args:
        now: local time, in seconds since 1970.
    """
    from flwr.common.constant import TIMESTAMP_HEADER

    with suppress(ValueError, UnicodeDecodeError, OverflowError):
        ahead = datetime.fromisoformat(headers.get(TIMESTAMP_HEADER.encode(), b"").decode("ascii")).timestamp() - now
        early, late = clock_tolerance()
        return 0.0 if -late < ahead < early else ahead
    return 0.0


def clock_tolerance() -> tuple[float, float]:
    """Return the seconds that a client's clock may be ahead and behind."""
    from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE

    return float(SYSTEM_TIME_TOLERANCE), float(TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE)


def carried(path: str, body: bytes) -> bytes:
    """Return an identifier for the content of a body of `FLEET_UPLOADS`; content that is sent again has the same."""
    from flwr.proto.message_pb2 import PushObjectRequest
    from google.protobuf.message import DecodeError

    if path == FLEET_UPLOADS[0]:
        with suppress(DecodeError):
            return str(PushObjectRequest.FromString(body).object_id).encode()
    return hashlib.sha256(body).digest()


def has_message(path: str, content: bytes) -> bool:
    """Return whether an answer to a SuperNode contains a message."""
    from flwr.proto.fleet_pb2 import PullMessagesResponse
    from google.protobuf.message import DecodeError

    with suppress(DecodeError):
        return path == "/v1/fleet/pull-messages" and len(PullMessagesResponse.FromString(content).messages_list) > 0
    return False


def bundle() -> bytes:
    """Return the app bundle that Flower requires for each run; its code is never run."""
    from flwr.cli.build import build_fab_from_disk

    with TemporaryDirectory() as folder:
        for name, text in _BUNDLE.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        made: bytes = build_fab_from_disk(Path(folder))
    return made


@dataclass(frozen=True)
class Endpoint:
    """Address of a SuperLink or SuperNode.

    Args:
        address: host:port, or the path of a socket on this machine. authority: PEM of the authority that signed its certificate;
            None without TLS, for this machine. secret: shared with the processes that may take its tasks.
    """

    address: str | Path
    authority: bytes | None
    secret: bytes

    @property
    def host(self) -> str:
        """Return the host name of connections."""
        return "superlink" if isinstance(self.address, Path) else self.address

    def client(self, *interceptors: Any) -> Any:
        """Return a client of the runtime interface."""
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient

        made = RuntimeHttpClient.from_server_address(
            server_address=self.host,
            insecure=self.authority is None,
            root_certificates=self.authority,
            interceptors=[RuntimeVersionHttpInterceptor(component_name="fedveil"), *interceptors],
            retry_invoker=_retries(),
        )
        return self.through(made)

    def through(self, client: Any) -> Any:
        """Return a client of Flower's after connecting it to this address."""
        if isinstance(self.address, Path):
            import httpx

            client._client.close()
            client._client = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.address)), timeout=30.0)
        return client


def _retries() -> Any:
    """Return Flower's retries, without its SIGINT to our own process if a token has become unknown, as after a restart.

    Flower does not retry any error with ssl in its name, such as a handshake that was late on a busy machine; here it is retried.
    """
    import httpx
    from flwr.supercore.retry import make_simple_http_retry_invoker

    invoker = make_simple_http_retry_invoker()
    otherwise = invoker.should_giveup

    def gives_up(problem: Exception) -> bool:
        return _unauthorized(problem) or (
            not isinstance(problem, httpx.TimeoutException) and bool(otherwise and otherwise(problem))
        )

    invoker.should_giveup = gives_up
    return invoker


def _heartbeat(client: Any) -> Any:
    """Return Flower's heartbeat of a task, without its SIGINT to our own process if the task is abandoned, as after a late one.

    The waiting code learns of that by its own requests.
    """
    from flwr.proto.runtime_pb2 import SendTaskHeartbeatRequest
    from flwr.supercore.heartbeat import HeartbeatSender

    def beat() -> bool:
        try:
            client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
        except Exception as problem:  # a connection error: the next heartbeat comes sooner
            _log.info("a heartbeat was lost: %s", problem)
            return False
        return True

    return HeartbeatSender(beat)


def _unauthorized(problem: Exception) -> bool:
    return getattr(getattr(problem, "response", None), "status_code", None) == 401


class TaskQueue:
    """Queue of the tasks of a SuperLink (its server app's) or a SuperNode (its client app's)."""

    def __init__(self, endpoint: Endpoint, kind: Literal["flwr-serverapp", "flwr-clientapp"]) -> None:
        from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor

        methods = frozenset({"/flwr.proto.Runtime/AcquireTask"})
        self._endpoint, self._kind = endpoint, kind
        self._client = endpoint.client(SuperExecAuthHttpInterceptor(master_secret=endpoint.secret, protected_methods=methods))

    def take(self, run: int | None = None) -> str | None:
        """Take the oldest task and return its token, or None; with `run`, tasks of other runs are dropped."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest

        try:
            answer = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._kind]))
        except Exception as problem:  # a connection error, such as a request that a busy machine sent too late
            _log.warning("tasks cannot be asked for now: %s", str(problem).splitlines()[0])
            return None
        token = answer.HasField("task") and answer.token
        return str(answer.token) if token and run in (None, answer.task.run_id) else None

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


@contextmanager
def server_grid(endpoint: Endpoint, token: str) -> Iterator[Any]:
    """Yield the grid of a run whose server task was taken; it raises RunLost, and the run ends with the block."""
    from flwr.common.constant import SubStatus
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.run import RunNotRunningException
    from flwr.superlink.grid import HttpGrid

    grid = HttpGrid(endpoint.host, endpoint.authority is None, endpoint.authority, token=token)
    grid._retry_invoker = _retries()
    endpoint.through(grid._runtime_client)
    heartbeat = _heartbeat(grid._runtime_client)
    heartbeat.start()
    status, details = SubStatus.FAILED, "the server ended before the run did"
    try:
        task = grid._runtime_client.PullTaskInput(PullTaskInputRequest())
        _identify(task)
        grid.set_run(run_from_proto(task.run))
        yield StrictGrid(grid, _lost)
        status, details = SubStatus.COMPLETED, ""
    finally:
        grid._retry_invoker.max_tries = 1
        with suppress(RunNotRunningException, Exception):  # if the run has ended, nobody asks how
            grid._runtime_client.PushTaskOutput(PushTaskOutputRequest(sub_status=status, details=details))
        with suppress(RuntimeError):
            heartbeat.stop()
        grid.close()


def _lost(problem: BaseException) -> bool:
    """Return whether an error means that a SuperLink does not know the run (any more)."""
    from flwr.supercore.run import RunNotRunningException

    return isinstance(problem, RunNotRunningException) or (isinstance(problem, Exception) and _unauthorized(problem))


def node_keys(grid: Any) -> dict[int, bytes]:
    """Return the public key of each node that is online, by its number."""
    return {node.node_id: bytes(node.public_key) for node in grid.get_nodes()}


def answer_message(endpoint: Endpoint, token: str, expected_bundle: str, answer: Callable[[list[bytes]], bytes]) -> str:
    """Take the message of a client task, and push the result of `answer` on its parts; the run's bundle is not touched.

    Args:
        expected_bundle: SHA-256 of the only bundle whose runs are answered.

    Returns:
        The reason why the message was refused, or an empty string.
    """
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode, SubStatus
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    client = endpoint.client(RuntimeTokenHttpInterceptor(token))
    heartbeat = _heartbeat(client)
    heartbeat.start()
    context, details, reason = None, "no answer", ""
    try:
        message, context, _, fab = pull_task_input(_RetryingClient(client))
        if hashlib.sha256(fab.content).hexdigest() != expected_bundle:
            reason = "a foreign app bundle, which is not run here: both sides need the same fedveil"
            reply = Message(Error(code=ErrorCode.INVALID_FAB, reason=reason), reply_to=message)
        else:
            try:
                reply = Message(record([answer(parts_of(message.content))]), reply_to=message)
            except WireError as problem:
                reason = str(problem)
                reply = Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)
        push_message(client, reply, context)
        details = ""
        return reason
    finally:
        try:
            push_task_output(client, context, SubStatus.FAILED if details else SubStatus.COMPLETED, details)
        finally:
            with suppress(RuntimeError):  # it has ended: the SuperNode no longer knows the task
                heartbeat.stop()
            client.close()


class _RetryingClient:
    """Client of a SuperNode that asks again for a task's message, because tasks are given out before messages are stored.

    Flower's own client apps start too slowly to notice. Without its message a task ends unanswered, and the SuperNode waits for
    the answer forever.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def PullMessages(self, request: Any) -> Any:
        end = time.monotonic() + _UNSTORED
        while not (answer := self._client.PullMessages(request)).messages_list and time.monotonic() < end:
            time.sleep(0.1)
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)


class Control:
    """Client of a SuperLink's control interface: admits keys and starts runs."""

    def __init__(self, endpoint: Endpoint) -> None:
        from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        made = ControlHttpClient.from_server_address(
            server_address=endpoint.host,
            insecure=endpoint.authority is None,
            root_certificates=endpoint.authority,
            interceptors=[CliClientHttpInterceptor(), RuntimeVersionHttpInterceptor(component_name="flwr CLI")],
        )
        self._client = endpoint.through(made)

    def register(self, key: bytes, name: str) -> None:
        """Let the client with this public key (PEM) join; nothing happens if it is already registered."""
        from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest

        nodes = self._client.ListNodes(ListNodesRequest()).nodes_info
        if key not in {bytes(node.public_key) for node in nodes if node.status != "unregistered"}:
            self._client.RegisterNode(RegisterNodeRequest(public_key=key, name=name))

    def start_run(self) -> int:
        """Start a run of Flower and return its number; its server task can then be taken."""
        from flwr.common.serde import fab_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content = bundle()
        answer = self._client.StartRun(StartRunRequest(fab=fab_to_proto(Fab(hashlib.sha256(content).hexdigest(), content, {}))))
        return int(answer.run_id)

    def close(self) -> None:
        """Close the connection."""
        self._client.close()


def _identify(task: Any) -> None:
    """Set the run and sender that Flower's messages use."""
    from flwr.supercore.task_identity import TaskIdentity

    TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = task.task_id, task.run.run_id, task.context.node_id
