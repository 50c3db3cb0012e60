"""AWS Lambda's entry: the event is the payload, the reply is what this returns."""

from rollart_handler import load, make_handler

lambda_handler = make_handler(load("$target"), $options)
