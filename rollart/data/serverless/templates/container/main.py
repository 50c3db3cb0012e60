"""The container's entry: an HTTP function that takes an event as JSON and answers a reply as JSON."""

import json

import functions_framework
from rollart_handler import load, make_handler

answer = make_handler(load("$target"), $options)
JSON = {"Content-Type": "application/json"}


@functions_framework.http
def reward(request):
    if request.method != "POST":
        return "send an event with POST\n", 405, {"Allow": "POST"}
    try:
        event = json.loads(request.get_data())
    except ValueError as error:
        return json.dumps({"error": {"type": "BadRequest", "message": str(error)}}), 400, JSON
    return json.dumps(answer(event)), 200, JSON
