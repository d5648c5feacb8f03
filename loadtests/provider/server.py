"""The answers of a run over HTTP: `/v1/judgement` for a web metric of Argo Rollouts, `/v1/flagger/<hook>` for webhooks
of Flagger, `/healthz` for probes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import urlsplit

from tailgate.analysis.records.documents import parse_json
from tailgate.analysis.records.plain_values import mapping
from tailgate.loadtests.page.serving import Handler, Server, is_loopback
from tailgate.loadtests.provider import TOKEN_VARIABLE
from tailgate.loadtests.provider.answers import GOALS, HOOKS, Answer, Evidence, Goal, answer, hook_answer
from tailgate.servers.address import host_port, joined
from tailgate.servers.clock import now_ns
from tailgate.servers.complaint import ConfigError, one_line
from tailgate.servers.security import secret_in

JUDGEMENT, FLAGGER, HEALTH = "/v1/judgement", "/v1/flagger", "/healthz"
_LARGEST_BODY: Final = 64 << 10
_IDLE_S: Final = 10.0  # that a connection may say nothing
_KNOWN: Final = f"there is GET {JUDGEMENT}, POST {FLAGGER}/<{'|'.join(HOOKS)}> and GET {HEALTH}"


class ProviderServer(Server):
    """Listens at `address`, "host:port", from now on, and answers from `evidence` between `open` and `close`.

    Without a token in TAILGATE_PROVIDER_TOKEN only this machine is answered, under its own names. `note` receives a
    line for each answer that differs from the one before it. Raises ConfigError.
    """

    def __init__(self, address: str, *, note: Callable[[str], None]) -> None:
        host, port = host_port(address, listens=True)
        token = secret_in(TOKEN_VARIABLE)
        if not token and not is_loopback(host):
            raise ConfigError(
                f'users.provider is "{address}", which others reach: set {TOKEN_VARIABLE} to a token for those who may '
                "ask, made with `openssl rand -hex 16`"
            )
        try:
            super().__init__(host, port, _Handler, token=token)
        except OSError as error:
            reason = error.strerror or "no such host"
            raise ConfigError(
                f'users.provider is "{joined(host, port)}", which cannot be used ({reason}): give another address'
            ) from None
        self.evidence = Evidence()  # replaced as a whole by the run
        self._note = note
        self._asking = threading.Lock()
        self._given: dict[str, str] = {}
        self._increased = False  # whether the candidate got its first traffic

    @property
    def judgement_url(self) -> str:
        """Return the address of the judgement for a web metric."""
        return f"http://{joined(str(self.server_address[0]), self.port)}{JUDGEMENT}"

    def judged(self, goal: Goal) -> dict[str, Any]:
        """Return the answer now and what it rests on, as JSON has it."""
        with self._asking:
            evidence, at_ns = self.evidence, now_ns()
            found = answer(evidence, goal, now_ns=at_ns)
            self._tell(goal, found.verdict, found)
        return {
            "verdict": found.verdict,
            "reasons": [one_line(reason) for reason in found.reasons],
            "candidate": evidence.limits.candidate,
            "for": goal,
            "run": evidence.run,
            "at": datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds"),
            "requests": evidence.standing.requests,
            "interim": evidence.interim,
        }

    def hooked(self, hook: str) -> tuple[bool, Answer]:
        """Return (whether Flagger goes on, why) for a hook."""
        with self._asking:
            yes, found = hook_answer(hook, self.evidence, first=not self._increased, now_ns=now_ns())
            self._increased |= yes and hook == "confirm-traffic-increase"
            self._tell(hook, f"{yes} {found.verdict}", found)
        return yes, found

    def _tell(self, request: str, given: str, found: Answer) -> None:
        if self._given.get(request) != given:
            self._given[request] = given
            self._note(one_line(f"{request}: {found}"))


class _RefusalError(Exception):
    """Why a request is not answered, with the status that says so."""

    def __init__(self, status: HTTPStatus, why: str) -> None:
        super().__init__(why)
        self.status = status


class _Handler(Handler):
    server: ProviderServer
    timeout = _IDLE_S

    def do_GET(self) -> None:  # noqa: N802  (http.server's name)
        self._handle(self._get)

    def do_POST(self) -> None:  # noqa: N802
        self.close_connection = True  # the body of a refused request is not read
        self._handle(self._post)

    def _handle(self, respond: Callable[[str, str], None]) -> None:
        try:
            if not self.server.knows_host(self.headers.get("Host", "")):
                raise _RefusalError(HTTPStatus.FORBIDDEN, "this is served to this machine alone, under its own names")
            address = urlsplit(self.path)
            respond(address.path, address.query)
        except _RefusalError as refusal:
            self._write(refusal.status, str(refusal))
        except (ConfigError, ValueError) as error:
            self._write(HTTPStatus.BAD_REQUEST, str(error))

    def _get(self, path: str, query: str) -> None:
        if path == HEALTH:
            self._write(HTTPStatus.OK, "ok")
            return
        if path != JUDGEMENT:
            raise _RefusalError(HTTPStatus.NOT_FOUND, _KNOWN)
        self._check_token()
        self.answer(HTTPStatus.OK, json.dumps(self.server.judged(_goal(query))) + "\n", Content_Type="application/json")

    def _post(self, path: str, _: str) -> None:
        place, _, hook = path.rpartition("/")
        if place != FLAGGER or hook not in HOOKS:
            raise _RefusalError(HTTPStatus.NOT_FOUND, _KNOWN)
        # Flagger sends no header of the user's, so its token comes as its own documentation shows: in the metadata.
        self._check_token(str(mapping(self._body().get("metadata")).get("token", "")))
        yes, found = self.server.hooked(hook)
        self._write(HTTPStatus.OK if yes else HTTPStatus.CONFLICT, str(found))

    def _check_token(self, token: str = "") -> None:
        if not self.server.allows(self.headers.get("Authorization", ""), token):
            why = "the bearer token is missing or wrong: send Authorization: Bearer TOKEN"
            raise _RefusalError(HTTPStatus.UNAUTHORIZED, why)

    def _body(self) -> Mapping[str, Any]:
        """Return the JSON object that was sent. Raises ConfigError for anything else."""
        length, body = self.headers.get("Content-Length", ""), None
        with suppress(ValueError):
            if 0 < int(length) <= _LARGEST_BODY:
                body = parse_json(self.rfile.read(int(length)).decode())
        if not isinstance(body, dict):
            raise ConfigError(
                f"the body is no JSON object, or its Content-Length is not 1 to {_LARGEST_BODY}: send what Flagger "
                "sends: name, namespace, phase, metadata"
            )
        return body

    def _write(self, status: HTTPStatus, text: str) -> None:
        self.answer(status, one_line(text) + "\n")


def _goal(query: str) -> Goal:
    """Return the goal that an address asks about. Raises ConfigError for anything else in it."""
    goals: dict[str, Goal] = {f"for={goal}": goal for goal in GOALS}
    if query and query not in goals:
        raise ConfigError(f'the query is "{query[:80]}": {JUDGEMENT} takes {" or ".join(goals)}')
    return goals[query or "for=promotion"]
