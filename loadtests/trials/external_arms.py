"""Wait for the arms that tailgate does not start, and find their processes where they run on this host."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from dataclasses import asdict
from ipaddress import ip_address

import psutil

from tailgate.analysis.arrays import Ints
from tailgate.analysis.wording import counted
from tailgate.loadtests.external.addresses import Address, parse_address
from tailgate.loadtests.external.answers import TOKENS, FailedError, Probe, wait_ready
from tailgate.loadtests.external.arms import ExternalArm
from tailgate.loadtests.trials.context import RunError, TrialContext

_ANY = {"0.0.0.0", "::"}  # a server on all of the host's addresses
_FORWARDERS = ("docker-proxy", "rootlessport")  # they listen for a server in a container, which does the work


def find_external_arms(trial: TrialContext, tokens: Ints) -> None:
    """Wait until every replica of every external arm answers a short request and has the context for the load.

    `tokens` has the length of each request with its answer. Otherwise RunError.
    """
    for number, arm in enumerate(trial.experiment.arms):
        if not isinstance(arm, ExternalArm):
            continue
        trial.status.phase = "finding external arms"
        named = zip(arm.replica_names, arm.address, strict=True)
        trial.facts.arms[number]["probe"] = [
            asdict(_probe(trial, arm, name, address, tokens)) for name, address in named
        ]
    trial.write_facts()


def local_servers(trial: TrialContext) -> Iterator[tuple[str, str, int | None]]:
    """Yield (replica, arm, process id) of each external server on this host: it is an arm, and no other work.

    The process is the one that listens on the address; None where it cannot be seen, as in a container.
    """
    for arm in trial.experiment.external_arms:
        for name, text in zip(arm.replica_names, arm.address, strict=True):
            address = parse_address(text, arm.kind)
            ips = _own_ips(address)
            if ips:
                yield name, arm.name, _listener(address, ips)


def _own_ips(address: Address) -> set[str]:
    """Return those of its IP addresses that are this host's."""
    try:
        rows = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
        own = {str(entry.address).partition("%")[0] for entries in psutil.net_if_addrs().values() for entry in entries}
    except OSError:
        return set()
    found = {ip_address(str(row[4][0]).partition("%")[0]) for row in rows}
    return {str(ip) for ip in found if ip.is_loopback or ip.is_unspecified or str(ip) in own}


def _listener(address: Address, ips: set[str]) -> int | None:
    """Return the only process that listens there, without workers that share its socket; None where it is not known."""
    try:
        rows = psutil.net_connections("tcp")
        listening = [row for row in rows if row.status == psutil.CONN_LISTEN and row.laddr.port == address.port]
        pids = {row.pid for row in listening if row.laddr.ip.removeprefix("::ffff:") in ips | _ANY}
        if None in pids:
            return None
        servers = [process for process in map(psutil.Process, pids) if process.ppid() not in pids]
        known = len(servers) == 1 and servers[0].name() not in _FORWARDERS
    except (psutil.Error, OSError, RuntimeError):  # RuntimeError: psutil cannot parse what this kernel lists
        return None
    return servers[0].pid if known else None


def _probe(trial: TrialContext, arm: ExternalArm, name: str, address: str, tokens: Ints) -> Probe:
    state = trial.status.replicas[name]
    state.stage = "asking"
    limit = trial.experiment.trials.ready_timeout_s
    remedy = f"start the server, correct arms.{arm.name}.address, or change trials.ready_timeout_s"

    def not_yet(why: str) -> None:
        if state.stage == "asking":
            trial.status.note(f"{name}: {address} is not ready ({why}); waiting up to {limit:g} s: {remedy}")
        state.stage = f"not ready: {why}"

    try:
        probe = wait_ready(arm, address, timeout_s=limit, check=trial.check, not_yet=not_yet)
    except FailedError as error:
        if not error.not_yet:
            raise RunError(f'arm "{arm.name}": {address} cannot be used: {error}') from None
        raise RunError(f'arm "{arm.name}": {address} was not ready after {limit:g} s ({error}): {remedy}') from None
    if probe.context is not None and (over := tokens[tokens > probe.context]).size:
        have = "has" if over.size == 1 else "have"
        raise RunError(
            f'arm "{arm.name}": {address} takes {probe.context} tokens for a prompt and its answer, and {over.size} of '
            f"{counted(tokens.size, 'request')} {have} more, {over.max()} at most: serve it with a longer "
            "context, or lower engine.max_prompt_tokens or engine.max_new_tokens"
        )
    state.stage = "ready"
    if probe.tokens is None:
        trial.status.note(
            f"{name} does not count its tokens: pieces of text are counted instead, and TPOT, ITL and token rates "
            "are per piece"
        )
    elif probe.tokens < TOKENS and trial.experiment.traffic.ignore_eos:
        trial.status.note(
            f"{name} answered {probe.tokens} of {TOKENS} tokens asked for: answers may end early, which "
            f"{arm.kind}.length_fields prevents where the server knows them"
        )
    return probe
