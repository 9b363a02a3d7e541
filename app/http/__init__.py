"""The HTTP application: endpoints, headers, problems. It knows no torch.

A request to /rank passes these stations in this order; a refusal raises a `ServiceError`, which `problems` answers.

| station | where | may refuse with |
|---|---|---|
| id, log line, metrics, span | `observe` | 500 for a fault of ours |
| route | `application.Application`; else HEAD as GET and FastAPI | 404, 405 |
| API key | `headers` | 401 |
| is the service open? | `Service.check_open` | 429, 503 |
| media type, deadline | `headers` | 406, 415, 422 |
| body | `server.connection` | 408, 413, 429 |
| JSON → values of known size | `request.codec`, else `request.body` | 400, 413 |
| admission | `Service.admit` | 429, 503, 504 |
| fields, features | `request.validate.check`, `request.features` | 422 |
| queue, forward | `Service.rank` | 500, 503, 504 |
| scores → reply | `request.reply`, `Ranking.headers` | |
"""
