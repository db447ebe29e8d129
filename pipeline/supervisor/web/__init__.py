"""HTTP: /metrics, /healthz, /readyz and the page.

access       token, TLS and host checks
connections  the bound on open connections
server       the routes
static       the page: HTML, CSS and JavaScript
"""
