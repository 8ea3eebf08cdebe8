"""The lab: a simulated inference engine, workloads and replays. It may import ``extproc``, never the reverse."""
