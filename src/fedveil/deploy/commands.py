"""Commands for several machines: net init, key, admit, list, remove, rotate, renew, demo; serve; join."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedveil.accounting.types import at_most
from fedveil.cli.command_options import (
    AsJson,
    NewDirectory,
    OptionalConfig,
    Overrides,
    Preset,
    checked,
    configuration,
    print_json,
)
from fedveil.experiment.given_paths import require_configuration, require_new, require_output_folder

if TYPE_CHECKING:
    from fedveil.experiment.result import Result
    from fedveil.federation.history import Row

net_app = typer.Typer(help="Several machines: keys and certificates, and a demonstration on one.", no_args_is_help=True)

serve_app, join_app = typer.Typer(), typer.Typer()

Network = Annotated[Path, typer.Option("--dir", help="Folder of the network.")]
LogFormat = Annotated[
    Literal["text", "json"], typer.Option(help="Lines as text, or as JSON with time, level, run, round, client.")
]
Metrics = Annotated[str, typer.Option(help="HOST:PORT for Prometheus, such as 127.0.0.1:9100 (extra: metrics).")]
Number = Annotated[int, typer.Argument(min=0, help="The client's number (fedveil net list).")]


@net_app.command(epilog="Example: fedveil net init --host fl.example.org")
def init(
    host: Annotated[str, typer.Option(help="Name or address at which clients reach the server.")],
    port: Annotated[int, typer.Option(help="Port at which it answers.")] = 9700,
    folder: Network = Path("network"),
) -> None:
    """Make the server's folder: an authority of its own, a certificate for the host."""
    from fedveil.deploy.network_folder import make_network

    made = make_network(folder, host, port)
    typer.echo(f"network: {made.path} (give {made.authority} to every client; nothing else in there leaves this machine)")


@net_app.command(epilog="Example: fedveil net key ward-a")
def key(name: Annotated[Path, typer.Argument(help="File for the private key; the public one gets the ending .pub.")]) -> None:
    """Make a client's pair of keys, on the client's machine."""
    from fedveil.deploy.network_folder import make_client_key

    make_client_key(name)
    typer.echo(f"key: {name} (it stays here, and {name}.signing too; send {name}.pub to the server's operator)")


@net_app.command(epilog="Example: fedveil net admit ward-a.pub")
def admit(
    public: Annotated[Path, typer.Argument(help="The client's public key, NAME.pub.")], folder: Network = Path("network")
) -> None:
    """Admit a client to the network of this server; its number is its own from then on."""
    from fedveil.deploy.network_folder import open_network

    number = open_network(folder).admit(public)
    typer.echo(f"{public} is client {number} (a server that is running sees it when it is started again)")


@net_app.command(epilog="Example: fedveil net roster --out roster.toml")
def roster(
    folder: Network = Path("network"),
    out: Annotated[Path, typer.Option(help="File to write, for all institutions.")] = Path("roster.toml"),
) -> None:
    """Write the names and signing keys of all clients, and print the digest that institutions compare and pin."""
    from fedveil.deploy.network_folder import open_network
    from fedveil.ledger.files import write_output

    admitted = open_network(folder).roster
    write_output(out, admitted.text.encode())
    typer.echo(f"roster: {out} ({len(admitted.keys)} clients; give it to all of them)")
    typer.echo(f"digest: {admitted.digest.hex()} (institutions compare it among themselves, and pin it in consent.toml)")


@net_app.command(epilog="Example: fedveil net demo my.toml --clients 3")
def demo(
    config: OptionalConfig = None,
    preset: Preset = None,
    overrides: Overrides = None,
    clients: Annotated[int | None, typer.Option(min=1, help="Clients, each a process.")] = None,
    out: NewDirectory = None,
) -> None:
    """Server and clients on this machine as on several: TLS, keys, consent, ledgers; all but the run is removed again."""
    from fedveil.deploy.demo_network import demo as demonstrate
    from fedveil.deploy.demo_network import with_clients

    wanted = with_clients(configuration(config, preset, overrides, False), clients)
    result = demonstrate(wanted, out or Path("runs") / f"net-{wanted.method.name}", typer.echo, _row)
    typer.echo(f"run: {result.path} (fingerprint {result.closing})")


@net_app.command("list", epilog="Example: fedveil net list")
def list_clients(folder: Network = Path("network"), as_json: AsJson = False) -> None:
    """List clients, their keys and when they were seen, and the ends of the certificates."""
    from dataclasses import asdict
    from datetime import UTC, datetime

    from fedveil.deploy.membership import end_of, members
    from fedveil.deploy.network_folder import open_network

    network = open_network(folder)
    ends = {path.name: end_of(path) for path in (network.certificates[0], network.authority)}
    days = {name: f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d}" for name, end in ends.items()}
    if as_json:
        print_json({"clients": [asdict(member) for member in members(network)], "certificates": days})
        return
    for member in members(network):
        state = "removed" if member.removed else f"admitted {member.admitted}"
        seen = f"seen {member.seen}, fedveil {member.fedveil or 'unknown'}" if member.seen else "not seen yet"
        typer.echo(f"{member.number}  {member.name}  {member.fingerprint}  {state}, {seen}")
    for name, day in days.items():
        typer.echo(f"{name} ends on {day}")


@net_app.command(epilog="Example: fedveil net status --dir network")
def status(folder: Network = Path("network")) -> None:
    """Print the status of the server or client with this folder; exit 2 if its process has ended or hangs."""
    from fedveil.deploy.status import read_status

    print_json(read_status(folder))


@net_app.command(epilog="Example: fedveil net remove 1")
def remove(number: Number, folder: Network = Path("network")) -> None:
    """Admit a client no more; a server that is running turns it away within seconds."""
    from fedveil.deploy.membership import remove as removed
    from fedveil.deploy.network_folder import open_network

    removed(open_network(folder), number)
    typer.echo(f"client {number} is admitted no more; its number stays its own (fedveil net admit takes its key again)")


@net_app.command(epilog="Example: fedveil net rotate 1 ward-a-2.pub")
def rotate(
    number: Number,
    public: Annotated[Path, typer.Argument(help="The client's new public key, NAME.pub.")],
    folder: Network = Path("network"),
) -> None:
    """Replace a client's key; its number stays the same."""
    from fedveil.deploy.membership import rotate as rotated
    from fedveil.deploy.network_folder import open_network

    rotated(open_network(folder), number, public)
    typer.echo(f"{public} is client {number} now (a server that is running sees it when it is started again)")


@net_app.command(epilog="Example: fedveil net renew")
def renew(
    folder: Network = Path("network"),
    authority: Annotated[bool, typer.Option("--authority", help="Make a new authority, too.")] = False,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days for which the server's certificate is valid.")] = 365,
) -> None:
    """Replace the server's certificate; a server that is running uses the new one within seconds."""
    from fedveil.deploy.membership import renew as renewed
    from fedveil.deploy.network_folder import open_network

    network = open_network(folder)
    renewed(network, authority=authority, days=days)
    typer.echo(f"renewed: {network.certificates[0]}, for {days} days")
    if authority:
        typer.echo(f"give {network.authority} to every client: with the old one, clients do not connect any more")


def _require_configurations(path: Path) -> None:
    if not path.is_dir():
        require_configuration(path)


@serve_app.command("serve", epilog="Example: fedveil serve my.toml --wait 3 --out runs/net")
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="Configuration file (TOML), or a folder of them, run one after the other into --out; omit it with --preset.",
            callback=checked(_require_configurations),
        ),
    ] = None,
    preset: Preset = None,
    overrides: Overrides = None,
    out: Annotated[
        Path | None, typer.Option(help="Directory to write to, new or empty; for a folder of configurations, that of their runs.")
    ] = None,
    folder: Network = Path("network"),
    wait: Annotated[int, typer.Option(min=1, help="Clients that must have consented before the first round.")] = 1,
    resume: Annotated[Path | None, typer.Option(help="Continue the interrupted run in this directory.")] = None,
    log_format: LogFormat = "text",
    metrics: Metrics = "",
) -> None:
    """Train with the clients of a network, from the server's machine. Exit 0: ended, 2: refused, 3: the budget is spent."""
    from fedveil.deploy.network_folder import open_network
    from fedveil.deploy.queue import serve_queue, state_of
    from fedveil.deploy.serve import Serving
    from fedveil.deploy.serve import serve as train
    from fedveil.deploy.status import Status, printer

    queue = config if config is not None and config.is_dir() else None
    if out is not None:
        (require_new if queue is None else require_output_folder)(out)
    if queue is not None and (resume is not None or preset is not None):
        raise typer.BadParameter("a folder of configurations resumes its runs by itself; omit --resume and --preset")
    if resume is not None and config is None and preset is None:
        if state_of(resume) == "finished":
            typer.echo(f"run: {resume} has ended before")
            return
        config = resume / "config.toml"
    network = open_network(folder)
    with Status(network.path, network.certificates[0], metrics) as status:
        tell = printer(log_format, lambda: status.values)

        def on_round(row: Row) -> None:
            status.row(row)
            tell(_row_text(row))

        def start(file: Path | None, path: Path | None, resumed: bool) -> Result:
            wanted = configuration(file, preset, overrides, False)
            path = path or Path("runs") / f"net-{wanted.method.name}"
            return train(wanted, Serving(network, path, resumed, wait, tell, on_round, status.ready, status.update))

        if queue is not None:
            failed, ended = serve_queue(queue, out or Path("runs"), start, tell), ""
        else:
            result = start(config, resume or out, resume is not None)
            failed, ended = {}, result.ended
            tell(f"run: {result.path} (fingerprint {result.closing})")
    if failed or ended:
        raise typer.Exit(2 if failed else 3)


@join_app.command("join", epilog="Example: fedveil join fl.example.org:9700 --ca ca.pem --key ward-a --consent consent.toml")
def join(
    server: Annotated[str, typer.Argument(help="The server, HOST:PORT.")],
    ca: Annotated[Path, typer.Option(help="The authority's certificate, ca.pem, from the server's operator.")],
    private: Annotated[Path, typer.Option("--key", help="This client's private key (fedveil net key NAME).")],
    consent: Annotated[Path, typer.Option(help="What this client agrees to, consent.toml.")],
    folder: Annotated[Path, typer.Option("--dir", help="This client's own folder: ledgers and states.")] = Path("client"),
    check: Annotated[bool, typer.Option("--check", help="Show what is offered, and take no part.")] = False,
    log_format: LogFormat = "text",
    metrics: Metrics = "",
) -> None:
    """Take part in the runs of a server, as far as the consent allows. With --check: exit 0 if it fits, 1 if not."""
    from fedveil.deploy.consent import ConsentFile
    from fedveil.deploy.join import Joining
    from fedveil.deploy.join import join as take_part
    from fedveil.deploy.status import Status, printer
    from fedveil.ledger.files import owner_only_folder

    file, fits = ConsentFile(consent), False
    agreed = file.read()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with Status(owner_only_folder(folder), ca, metrics) as status:
        tell = printer(log_format)
        try:
            note = status.update
            fits = take_part(agreed, Joining(server, ca, private, folder, check, tell, changed=file.changed, note=note))
        except KeyboardInterrupt:
            tell("left; ledgers and states are on the disk")
    sys.stdout.flush()
    os._exit(int(check and not fits))  # Flower's threads that wait for a message which never arrives would block the exit


def _row(record: Row) -> None:
    typer.echo(_row_text(record))


def _row_text(record: Row) -> str:
    """Return one line for a round."""
    scores = "  ".join(f"{k} {v:.4g}" for k, v in record.items() if k.startswith(("test_", "noisy_")) and isinstance(v, float))
    spent = f"  epsilon {at_most(record['epsilon_spent'])}" if "epsilon_spent" in record else ""
    return f"round {record['round']}: {record['participants']} clients  {scores}{spent}  {record['seconds']:.1f} s"
