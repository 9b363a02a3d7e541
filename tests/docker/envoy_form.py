"""`python envoy_form.py < FILE`: reads a configuration of Envoy into Envoy's own messages; what they do not have is an error.

With `.cache/envoy` on the path (`.ci/fetch-types envoy`), in a process of its own: what lies there has names that other packages have too.
"""

from __future__ import annotations

import importlib
import sys

import yaml
from google.protobuf import json_format

# What defines the types that a file may name in "@type"; any other is refused as unknown.
for module in (
    "filters.http.router.v3.router",
    "filters.network.http_connection_manager.v3.http_connection_manager",
    "retry.host.previous_hosts.v3.previous_hosts",
    "upstreams.http.v3.http_protocol_options",
):
    importlib.import_module(f"envoy.extensions.{module}_pb2")
bootstrap = importlib.import_module("envoy.config.bootstrap.v3.bootstrap_pb2")
try:
    json_format.ParseDict(yaml.safe_load(sys.stdin), bootstrap.Bootstrap())
except json_format.ParseError as error:
    sys.exit(str(error))
