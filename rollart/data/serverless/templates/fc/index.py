"""Alibaba Function Compute's entry for an event function: the payload as bytes, the reply as JSON text."""

import json

from rollart_handler import load, make_handler

answer = make_handler(load("$target"), $options)


def handler(event, context):
    return json.dumps(answer(json.loads(event), context))
