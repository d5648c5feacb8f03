from __future__ import annotations

import pytest

from tests.loadtests.clients.test_tls import SECRET, locust


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--tls-ca", "/nowhere/ca.pem"], 'TLS authority "/nowhere/ca.pem" cannot be read'),
        (["--token-env", "TAILGATE_TEST_TOKEN"], "TAILGATE_TEST_TOKEN, which is not set"),
        (["--token-env", "s3cret-T0ken"], "token_env is not the name of an environment variable"),
        (["--client-key", "k.pem"], "tls_key is set alone"),
    ],
)
def test_bad_security_settings_end_locust_with_one_line_and_code_2(arguments: list[str], text: str) -> None:
    done = locust("https://127.0.0.1:1", *arguments)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert SECRET not in done.stderr
