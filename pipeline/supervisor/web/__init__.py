"""HTTP: /metrics, /healthz, /readyz and the page.

access       token, TLS and host checks
connections  the bound on open connections
port_holder  the process that holds a port in use
server       the routes
static       the page: HTML, CSS and JavaScript
"""
