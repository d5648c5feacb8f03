"""Locust's own page and the live page of a run lead to each other, where --live-page says that they belong together."""

from __future__ import annotations

import html
import logging
import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, Self

from locust.env import Environment
from locust.web import WebUI

from analysis.records.documents import content_of, write_document
from servers.address import joined
from servers.fields import ConfigError

logger = logging.getLogger("tailgate")

LOCUST_PAGE: Final = "locust-page.json"  # in the run directory: where Locust's own page is
_ADDRESS = re.compile(r"https?://[!-~]+")
_INDEX: Final = "locust.index"  # the view of its page, in Locust 2.47
_STYLE = "margin:0;padding:8px 16px;font:14px/1.4 system-ui,sans-serif;background:#1d4ed8;color:#fff"


class LiveLink:
    """The way between both pages. The live page is at `address`, or where the run in `run_dir` says at any time."""

    def __init__(self, *, address: str = "", run_dir: Path | None = None) -> None:
        self._address = address
        self._run_dir = run_dir

    @classmethod
    def of(cls, text: str) -> Self:
        """The link to an address or a run directory, as --live-page has it. Raises ConfigError."""
        if _ADDRESS.fullmatch(text):
            if "token=" in text:
                raise ConfigError(
                    "--live-page holds a token, which whoever opens Locust's page would get: leave out ?token=…"
                )
            return cls(address=text)
        if not (Path(text) / "experiment.toml").is_file():
            raise ConfigError(
                f'--live-page "{text}" is no run directory, as it holds no experiment.toml: give one, or an address '
                "such as http://127.0.0.1:8080/"
            )
        return cls(run_dir=Path(text))

    @property
    def url(self) -> str:
        """The live page's address; empty while the run serves none."""
        if self._run_dir is None:
            return self._address
        url = content_of(self._run_dir / "page.json").get("url")
        return url if isinstance(url, str) and _ADDRESS.fullmatch(url) else ""

    def join(self, environment: Environment) -> None:
        """Locust's page shows the way to the live page, and the other way round until Locust quits.

        Raises ConfigError where Locust has no page.
        """
        page = environment.web_ui
        if page is None:
            raise ConfigError("--live-page is a link on Locust's web page, which --headless leaves out: give one alone")
        views: dict[str, Any] = page.app.view_functions if page.app is not None else {}
        index = views.get(_INDEX)
        if index is None:
            logger.warning("this version of Locust has no place for a link to the live page")
        else:
            views[_INDEX] = lambda: self._with_link(index())
        if self._run_dir is None:
            return
        path = self._run_dir / LOCUST_PAGE
        with suppress(OSError):
            write_document(path, {"url": address_of(page), "pid": os.getpid()})

        def leave(**_: Any) -> None:
            path.unlink(missing_ok=True)

        quitting: Any = environment.events.quitting
        quitting.add_listener(leave)

    def _with_link(self, answer: Any) -> Any:
        """Locust's template has no place for words of others: they go before all that it shows. An answer that is not
        its page, such as the way to a login, stays as it is."""
        if isinstance(answer, str) and (url := self.url):
            link = f'<a href="{html.escape(url)}" target="_blank" rel="noopener noreferrer" style="color:inherit">'
            words = f'<p style="{_STYLE}">This load belongs to a run of tailgate: {link}its live page</a></p>'
            return answer.replace("<body>", f"<body>{words}", 1)
        return answer


def address_of(page: WebUI) -> str:
    """Where Locust's page is; with the host * where it listens on all addresses of this machine."""
    options = page.environment.parsed_options
    host = page.host if page.host not in ("", "0.0.0.0", "::") else "*"
    scheme = "https" if page.tls_cert else "http"
    base = (getattr(options, "web_base_path", None) or "").strip("/")
    return f"{scheme}://{joined(host, page.port)}/" + (f"{base}/" if base else "")
