"""WHEN: the class of a request, whether it runs now, waits at the gateway, or is refused."""
