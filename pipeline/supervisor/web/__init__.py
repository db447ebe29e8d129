"""HTTP: /metrics, /healthz, /readyz and the page.

access       token, TLS and host checks
port_holder  the process that holds a port in use
server       the routes
static       the page: HTML, CSS and JavaScript
"""
