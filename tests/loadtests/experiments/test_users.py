from __future__ import annotations

import pytest

from loadtests.experiments.reading import from_table, load_table
from loadtests.experiments.users import UsersConfig, of_users
from servers.fields import ConfigError


def test_the_traffic_of_users_is_not_made_up_and_keeps_what_judges_it() -> None:
    table = load_table("demo", settings=["traffic.block_s=3", "traffic.timeout_s=7"])
    traffic = from_table(of_users(table)).traffic
    assert (traffic.arrivals, traffic.design, traffic.block_s, traffic.timeout_s) == ("users", "split", 3.0, 7.0)
    assert traffic.rate == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"admin": "9901"}, 'users.admin is "9901": give host:port, or the path of a socket'),
        ({"admin": "/tmp/a\nb"}, "give host:port, or the path of a socket"),
        ({"route": "chat"}, 'users.route is "chat": give NAMESPACE/NAME of a GRPCRoute'),
        ({"api": "127.0.0.1:8001"}, "users.route is empty: name the route"),
        ({"replicas": ("eager",)}, 'users.replicas holds "eager": write ARM=HOST:PORT,HOST:PORT'),
        ({"replicas": ("a=h:1", "a=h:2")}, "users.replicas names an arm twice"),
        ({"moved_by": "me"}, "users.moved_by is 'me': use one of tailgate, others"),
    ],
)
def test_what_cannot_be_used_is_told_in_one_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        UsersConfig(**settings)  # type: ignore[arg-type]
    assert message in str(error.value)


def test_somebody_must_say_where_the_traffic_flows_and_what_is_moved() -> None:
    with pytest.raises(ConfigError, match="nothing says where users' traffic flows"):
        UsersConfig().check()
    with pytest.raises(ConfigError, match="no weights can be moved"):
        UsersConfig(access_log="requests.log").check()
    UsersConfig(access_log="requests.log", moved_by="others").check()
    UsersConfig(admin="127.0.0.1:9901").check()
