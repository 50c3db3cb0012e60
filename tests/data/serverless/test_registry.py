import pytest

from rollart.config import parse
from rollart.data.serverless.registry import check_urls
from rollart.errors import ConfigError

MODULE = "tests.data.serverless.user_functions"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("reward = 'htp://host/x'", "tasks.sorting.reward 'htp://host/x': scheme 'htp' .*http"),
        (
            "reward = 'local://'",
            "tasks.sorting.reward.* names no function",
        ),
        ("reward = 'http://host:99999/x'", "tasks.sorting.reward: .*Port out of range"),
        ("reward = 'https://[::1'", "tasks.sorting.reward: .*Invalid IPv6"),
        ("reward = 'http:///x'", "tasks.sorting.reward: .*write it as https://host/path"),
        ("reward = 'http://me:secret@host/x'", "tasks.sorting.reward: .*a token goes into token_env"),
        (f"reward = '{MODULE}:Uncallable'", "tasks.sorting.reward: .* cannot be called"),
        (
            "reward = 'http://host/x'\n[serverless.sorting]\ntoken_env = 'NOT_SET_ANYWHERE'",
            "tasks.sorting.reward: .*token_env names NOT_SET_ANYWHERE, which is not set",
        ),
        (
            f"reward = 'http://host/x'\n[serverless.sorting]\nfallback = '{MODULE}:nothing'",
            "serverless.sorting.fallback: .*has no 'nothing'",
        ),
        (
            f"reward = 'http://host/x'\n[serverless.default]\nfallback = '{MODULE}:Uncallable'",
            "tasks.sorting.reward: .*Uncallable.* cannot be called",
        ),
        ("reward = 'fc://x'", "tasks.sorting.reward: 'fc://x': write it as fc://ACCOUNT_ID/FUNCTION"),
    ],
)
def test_what_cannot_work_is_found_before_a_run(text, reason):
    with pytest.raises(ConfigError, match=reason):
        check_urls(parse(f"[tasks.sorting]\n{text}"))


def test_what_can_work_passes():
    for url in (f"local://{MODULE}:echo", f"{MODULE}:Scaled", "http://host/x", "https://host:8443/a?b=c"):
        check_urls(parse(f"[tasks.sorting]\nreward = '{url}'"))
