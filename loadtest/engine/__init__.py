"""A simulated inference engine: a pure core in virtual time, and an HTTP front that looks like vLLM."""
