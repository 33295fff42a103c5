from __future__ import annotations

import pytest

from shardway.errors import UserError
from shardway.launch.hosts import Target, parse_target


@pytest.mark.parametrize(
    ("text", "host", "site"),
    [
        ("jureca-dc", "", "jureca-dc"),
        ("login:jureca-dc", "login", "jureca-dc"),
        (" alice@login.example.org:my-site ", "alice@login.example.org", "my-site"),
        ("alice@login.example.org", "alice@login.example.org", ""),
        ("login:", "login", ""),
        ("a@b@login:x", "a@b@login", "x"),
        ("alice@[2001:db8::1]:x", "alice@2001:db8::1", "x"),
        ("[::1]:x", "::1", "x"),
        ("./sites/mine.toml", "", "./sites/mine.toml"),
        ("/sites/odd:name.toml", "", "/sites/odd:name.toml"),
        ("login:/sites/mine.toml", "login", "/sites/mine.toml"),
        ("login:./mine.toml", "login", "./mine.toml"),
    ],
)
def test_a_target_is_a_host_and_a_site(text: str, host: str, site: str) -> None:
    assert parse_target(text) == Target(host, site)


@pytest.mark.parametrize(
    "text",
    [
        "-oProxyCommand=id:x",
        "a@-oProxyCommand=id:x",
        "a b:x",
        "$(id)@host:x",
        "a;b:x",
        "ssh://host:22",
        "a@:x",
        "@",
        "a\nb:x",
    ],
)
def test_what_ssh_would_take_for_something_else_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="--on"):
        parse_target(text)
