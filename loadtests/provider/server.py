"""The judge of a rollout over HTTP: `/v1/judgement` for Argo Rollouts' web metric, `/v1/flagger/<hook>` for Flagger's
webhooks, `/healthz` for whoever starts it. Every question reads what is new in the run directory."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from analysis.records.documents import parse_json
from analysis.records.plain_values import mapping
from loadtests.page.serving import Handler, Server
from loadtests.provider.flagger import GOAL_OF, TELLS, answered
from loadtests.provider.judgement import Evidence, Judgement, judge
from loadtests.provider.observed import Observed
from loadtests.provider.question import KEYS, Question
from servers.address import joined
from servers.clock import now_ns
from servers.complaint import fault, one_line
from servers.fields import ConfigError

JUDGEMENT, FLAGGER, HEALTH = "/v1/judgement", "/v1/flagger", "/healthz"
_LARGEST_BODY = 64 << 10
_MOST_PARAMETERS = 16
_LONGEST_NAME = 253  # of anything in Kubernetes
_IDLE_S = 10.0  # that a connection may say nothing
_MOST_REMEMBERED = 256
_OF_HOOKS = ("arm", "gate", "window", "inconclusive")  # what a hook is for, it says itself
_JSON, _TEXT = "application/json; charset=utf-8", "text/plain; charset=utf-8"

Note = Callable[[str], None]


class ProviderServer(Server):
    """Listens on (host, port) from now on, and answers from `observed` once `serve_forever` runs.

    Without a `token` only this machine is answered, under its own names. `note` gets a line for each answer that is not
    as the one before it.
    """

    def __init__(self, observed: Observed, host: str, port: int, *, token: str, note: Note = lambda line: None) -> None:
        super().__init__(host, port, _Handler, token=token)
        self._observed = observed
        self._note = note
        self._asking = threading.Lock()
        self._told: dict[tuple[str, ...], str] = {}
        self._increased: set[tuple[str, ...]] = set()  # (run, namespace, canary) that got their first traffic

    @property
    def address(self) -> str:
        return joined(str(self.server_address[0]), self.port)

    def judged(self, question: Question) -> tuple[Judgement, Evidence]:
        """The judgement now, and on what it rests. ConfigError for a question that the run cannot be asked."""
        with self._asking:
            evidence = self._observed.evidence(question)
            found = judge(evidence, question)
            self._tell((question.goal, evidence.arm, question.gate), found.verdict, str(found))
        return found, evidence

    def hooked(self, hook: str, canary: tuple[str, str], question: Question) -> tuple[bool, Judgement]:
        """(whether Flagger goes on, why) for a hook of the canary (namespace, name)."""
        with self._asking:
            evidence = self._observed.evidence(question)
            key = (evidence.run, *canary)
            yes, found = answered(hook, evidence, question, first=key not in self._increased)
            if hook == "confirm-traffic-increase" and yes and len(self._increased) < _MOST_REMEMBERED:
                self._increased.add(key)
            self._tell((hook, evidence.arm, question.gate, *canary), f"{yes} {found.verdict}", str(found))
        return yes, found

    def _tell(self, asked: tuple[str, ...], answer: str, words: str) -> None:
        if self._told.get(asked) != answer and (asked in self._told or len(self._told) < _MOST_REMEMBERED):
            self._told[asked] = answer
            self._note(one_line(f"{' '.join(filter(None, asked))}: {words}"))


class _Handler(Handler):
    server: ProviderServer
    timeout = _IDLE_S

    def get(self) -> None:
        self._handle(self._get)

    def post(self) -> None:
        self.close_connection = True  # of what was refused the body was not read
        self._handle(self._post)

    def _handle(self, answer: Callable[[str, str], None]) -> None:
        address = urlsplit(self.path)
        if not self.server.knows_host(self.headers.get("Host", "")):
            self._refuse(HTTPStatus.FORBIDDEN, "this is served to this machine alone, under its own names")
            return
        try:
            answer(address.path, address.query)
        except ConfigError as error:
            self._refuse(HTTPStatus.BAD_REQUEST, str(error))
        except OSError:
            raise  # the client is gone
        except Exception as error:
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR, fault(error))

    def _get(self, path: str, query: str) -> None:
        if path == HEALTH:
            self._answer(HTTPStatus.OK, _TEXT, "ok\n")
            return
        if not self._is_allowed():
            return
        if path != JUDGEMENT:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is GET {JUDGEMENT}, POST {FLAGGER}/<hook> and GET {HEALTH}")
            return
        given = _parameters(query)
        unknown = next((key for key in given if key not in KEYS), None)
        if unknown is not None:
            raise ConfigError(f'"{unknown}" is no parameter of {JUDGEMENT}: give some of {", ".join(KEYS)}')
        question = Question.of(given)
        found, evidence = self.server.judged(question)
        self._answer(HTTPStatus.OK, _JSON, json.dumps(_document(found, evidence, question)) + "\n")

    def _post(self, path: str, query: str) -> None:
        place, _, hook = path.rpartition("/") if path != FLAGGER else (FLAGGER, "", "")
        if place != FLAGGER:
            self._refuse(HTTPStatus.NOT_FOUND, f"there is POST {FLAGGER}/<hook>, and GET {JUDGEMENT}")
            return
        body = self._body()
        if body is None:
            return
        metadata = {key: value for key, value in mapping(body.get("metadata")).items() if isinstance(value, str)}
        # Flagger sends no header of the user's, so its token comes as its own documentation shows: in the metadata.
        if not self._is_allowed(metadata.get("token", "")):
            return
        given = {**metadata, **_parameters(query)}
        hook = hook or metadata.get("hook", "")
        if hook not in GOAL_OF:
            raise ConfigError(f'hook "{hook}" is none of Flagger: post to {FLAGGER}/<{"|".join(GOAL_OF)}>')
        known = {key: value for key, value in given.items() if key in _OF_HOOKS}
        question = Question.of(known, goal=GOAL_OF[hook])
        if hook == "rollback" and question.inconclusive == "fail":
            raise ConfigError(
                "inconclusive=fail at the hook rollback would roll back what nobody has seen: leave it out"
            )
        canary = tuple(str(body.get(key, ""))[:_LONGEST_NAME] for key in ("namespace", "name"))
        if hook in TELLS:
            self._answer(HTTPStatus.OK, _TEXT, "noted\n")
            return
        yes, found = self.server.hooked(hook, (canary[0], canary[1]), question)
        self._answer(HTTPStatus.OK if yes else HTTPStatus.CONFLICT, _TEXT, one_line(str(found)) + "\n")

    def _is_allowed(self, token: str = "") -> bool:
        authorization = self.headers.get("Authorization", "")
        if self.server.is_token(token) or self.server.allows(authorization=authorization):
            return True
        self._refuse(HTTPStatus.UNAUTHORIZED, "the bearer token is missing or wrong: send Authorization: Bearer TOKEN")
        return False

    def _body(self) -> Mapping[str, Any] | None:
        """The JSON object that was sent; None where a refusal was the answer. ConfigError for what is none."""
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
            raise ConfigError(
                "the body is no JSON object: send what Flagger sends, name, namespace, phase and metadata"
            )
        return body

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        self._answer(status, _TEXT, one_line(why) + "\n")

    def _answer(self, status: HTTPStatus, kind: str, text: str) -> None:
        self.answer(status, text, Content_Type=kind)


def _parameters(query: str) -> dict[str, str]:
    """The parameters of an address. ConfigError for too many, or for one that comes twice."""
    try:
        pairs = parse_qsl(query, keep_blank_values=True, max_num_fields=_MOST_PARAMETERS)
    except ValueError:
        raise ConfigError(f"the address has more than {_MOST_PARAMETERS} parameters: give fewer") from None
    given = dict(pairs)
    if len(given) != len(pairs):
        twice = next(key for key, _ in pairs if [name for name, _ in pairs].count(key) > 1)
        raise ConfigError(f'"{twice}" comes twice in the address: give it once')
    return given


def _document(found: Judgement, evidence: Evidence, question: Question) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "reasons": [one_line(reason) for reason in found.reasons],
        "candidate": evidence.arm,
        "for": question.goal,
        "gate": question.gate or None,
        "run": evidence.run,
        "at": datetime.fromtimestamp(now_ns() / 1e9, UTC).isoformat(timespec="milliseconds"),
        "window": f"{question.window_s:g}s",
        "requests": evidence.requests,
        "interim": mapping(evidence.look).get("number"),
    }
