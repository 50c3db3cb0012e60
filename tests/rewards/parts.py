"""Rewards that the tests put together."""

from rollart.types import RewardRequest


def length(request: RewardRequest) -> float:
    return float(len(request.responses[0]))


async def polite(request: RewardRequest) -> bool:
    return "please" in request.responses[0]


def broken(request: RewardRequest) -> float:
    raise KeyError("nothing here")


def nothing(request: RewardRequest) -> None:
    return None


class Times:
    def __init__(self, factor: float) -> None:
        self._factor = factor

    def __call__(self, request: RewardRequest) -> float:
        return self._factor * len(request.responses[0])


def request(response: str, **info: object) -> RewardRequest:
    return RewardRequest("t", 0, ["the question"], [response], info=dict(info))
