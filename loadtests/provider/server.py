"""The answers of a run over HTTP: `/v1/judgement` for a web metric of Argo Rollouts, `/v1/flagger/<hook>` for webhooks
of Flagger, `/healthz` for probes."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from analysis.records.documents import parse_json
from analysis.records.plain_values import mapping
from loadtests.page.serving import Handler, Server, is_loopback, token_in
from loadtests.provider import TOKEN_VARIABLE
from loadtests.provider.answers import GOALS, HOOKS, Answer, Evidence, Goal, answer, hook_answer
from servers.address import host_port, joined
from servers.clock import now_ns
from servers.complaint import ConfigError, fault, one_line

JUDGEMENT, FLAGGER, HEALTH = "/v1/judgement", "/v1/flagger", "/healthz"
_LARGEST_BODY: Final = 64 << 10
_MOST_PARAMETERS: Final = 16
_IDLE_S: Final = 10.0  # that a connection may say nothing
_MOST_CANARIES: Final = 256
_LONGEST_NAME: Final = 253  # of anything in Kubernetes
_JSON, _TEXT = "application/json; charset=utf-8", "text/plain; charset=utf-8"


class ProviderServer(Server):
    """Listens at `address`, "host:port", from now on, and answers from `evidence` between `open` and `close`.

    Without a token in TAILGATE_PROVIDER_TOKEN only this machine is answered, under its own names. `note` receives a
    line for each answer that differs from the one before it. Raises ConfigError.
    """

    def __init__(self, address: str, *, note: Callable[[str], None]) -> None:
        host, port = host_port(address, f'users.provider is "{address}": give HOST:PORT', lowest=0)
        token = token_in(os.environ, TOKEN_VARIABLE)
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
        self._increased: set[tuple[str, str]] = set()  # canaries (namespace, name) that got their first traffic

    @property
    def judgement_url(self) -> str:
        """The address of the judgement for a web metric."""
        return f"http://{joined(str(self.server_address[0]), self.port)}{JUDGEMENT}"

    def judged(self, goal: Goal) -> tuple[Answer, Evidence]:
        """Return the answer now, and its evidence."""
        with self._asking:
            evidence = self.evidence
            found = answer(evidence, goal, now_ns=now_ns())
            self._tell(goal, found.verdict, found)
        return found, evidence

    def hooked(self, hook: str, canary: tuple[str, str]) -> tuple[bool, Answer]:
        """Return (whether Flagger goes on, why) for a hook of the canary (namespace, name)."""
        with self._asking:
            first = canary not in self._increased
            yes, found = hook_answer(hook, self.evidence, first=first, now_ns=now_ns())
            if hook == "confirm-traffic-increase" and yes and len(self._increased) < _MOST_CANARIES:
                self._increased.add(canary)
            self._tell(hook, f"{yes} {found.verdict}", found)
        return yes, found

    def _tell(self, asked: str, given: str, found: Answer) -> None:
        if self._given.get(asked) != given:
            self._given[asked] = given
            self._note(one_line(f"{asked}: {found}"))


class _Handler(Handler):
    server: ProviderServer
    timeout = _IDLE_S

    def get(self) -> None:
        self._handle(self._get)

    def post(self) -> None:
        self.close_connection = True  # the body of a refused request is not read
        self._handle(self._post)

    def _handle(self, respond: Callable[[str, str], None]) -> None:
        if not self.server.knows_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this is served to this machine alone, under its own names")
            return
        try:
            address = urlsplit(self.path)
            respond(address.path, address.query)
        except (ConfigError, ValueError) as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except OSError:
            raise  # the client is gone
        except Exception as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, fault(error))

    def _get(self, path: str, query: str) -> None:
        if path == HEALTH:
            self.answer(HTTPStatus.OK, "ok\n", Content_Type=_TEXT)
        elif path != JUDGEMENT:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is GET {JUDGEMENT}, POST {FLAGGER}/<hook> and GET {HEALTH}")
        elif self._is_allowed():
            goal = _goal(query)
            document = _document(*self.server.judged(goal), goal)
            self.answer(HTTPStatus.OK, json.dumps(document) + "\n", Content_Type=_JSON)

    def _post(self, path: str, _: str) -> None:
        place, _, hook = path.rpartition("/")
        if place != FLAGGER or hook not in HOOKS:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is POST {FLAGGER}/<{'|'.join(HOOKS)}>, and GET {JUDGEMENT}")
            return
        body = self._body()
        if body is None:
            return
        # Flagger sends no header of the user's, so its token comes as its own documentation shows: in the metadata.
        if not self._is_allowed(str(mapping(body.get("metadata")).get("token", ""))):
            return
        canary = (str(body.get("namespace", ""))[:_LONGEST_NAME], str(body.get("name", ""))[:_LONGEST_NAME])
        yes, found = self.server.hooked(hook, canary)
        status = HTTPStatus.OK if yes else HTTPStatus.CONFLICT
        self.answer(status, one_line(str(found)) + "\n", Content_Type=_TEXT)

    def _is_allowed(self, token: str = "") -> bool:
        if self.server.is_token(token) or self.server.allows(self.headers.get("Authorization", "")):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "the bearer token is missing or wrong: send Authorization: Bearer TOKEN")
        return False

    def _body(self) -> Mapping[str, Any] | None:
        """Return the JSON object that was sent; None where a refusal was the answer. Raises ValueError."""
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED, "the request has no Content-Length: send the length of its body")
            return None
        if len(length) > 12 or int(length) > _LARGEST_BODY:
            self._refuse(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
                f"the body has {length[:12]} bytes; the limit is {_LARGEST_BODY}: send what Flagger sends",
            )
            return None
        try:
            body = parse_json(self.rfile.read(int(length)).decode())
        except ValueError:
            body = None
        if not isinstance(body, dict):
            raise ConfigError("the body is no JSON object: send what Flagger sends: name, namespace, phase, metadata")
        return body

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self.answer(status, one_line(why) + "\n", Content_Type=_TEXT)


def _goal(query: str) -> Goal:
    """Return the goal that an address asks about. Raises ConfigError for anything else in it."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)
    except ValueError:
        raise ConfigError(f"the address has more than {_MOST_PARAMETERS} parameters: give fewer") from None
    key, wanted = pairs[0] if pairs else ("for", "promotion")
    if key != "for" or len(pairs) > 1:
        raise ConfigError(f'"{pairs[-1][0]}" is one parameter too many: {JUDGEMENT} takes for={" or for=".join(GOALS)}')
    goal = next((name for name in GOALS if name == wanted), None)
    if goal is None:
        raise ConfigError(f'for is "{wanted}": give {" or ".join(GOALS)}')
    return goal


def _document(found: Answer, evidence: Evidence, goal: Goal) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "reasons": [one_line(reason) for reason in found.reasons],
        "candidate": evidence.candidate,
        "for": goal,
        "run": evidence.run,
        "at": datetime.fromtimestamp(now_ns() / 1e9, UTC).isoformat(timespec="milliseconds"),
        "requests": evidence.requests,
        "interim": evidence.interim,
    }
