"""The HTTP service around the model: schema, admission, batching, metrics, errors. Reads no checkpoint format itself."""

import os

DISTRIBUTION = "phoenix-ranking-server"
PROPAGATORS = "OTEL_PROPAGATORS"


def forget_unusable_propagators() -> None:
    """Remove `OTEL_PROPAGATORS` from the environment if it names one that is not installed: FastAPI's import would fail.

    The service itself reads `traceparent` and `tracestate` only.
    """
    if PROPAGATORS not in os.environ:
        return
    try:
        import opentelemetry.propagate  # noqa: F401  # it loads them
    except ImportError:
        return  # FastAPI then does without OpenTelemetry
    except Exception:
        del os.environ[PROPAGATORS]


forget_unusable_propagators()  # here, because every module of the application may be the first to import FastAPI
