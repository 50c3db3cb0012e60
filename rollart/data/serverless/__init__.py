"""Functions behind a URL: stateless work on elastic capacity (paper section 3, R3).

    registry.py   a URL -> a Function            function.py   the calling side: tries, limits, fallback, meter
    endpoint.py   what a scheme provides         handler.py    the inside of a function
    local.py child.py   local://                 http.py aws.py fc.py ray_tasks.py thread.py   the other schemes
    cloud.py            of all clouds            lanes.py       blocking calls on threads
    breaker.py limiter.py meter.py   PURE        server.py package.py   a function as a service

Kept empty: every cold start imports it.
"""
