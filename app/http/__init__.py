"""The HTTP application: endpoints, headers, problems. Knows no torch."""
