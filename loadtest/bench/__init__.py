"""What a request costs: ``python -m loadtest.bench``, or ``make bench``.

One run, one machine, the real Envoy: arms that differ in one thing each take turns in slices of a second or two, so
that whatever else the machine does hits all of them alike. Processes are the real ones (``tokenfleet serve``,
``tokenfleet collect``, Redis); only the engines are replaced, by a server that answers at once: their time is not ours.

``__main__``  the command line
``parts``     the processes, started and stopped
``meshes``    one Envoy configuration an arm
``upstream``  engines that answer at once, or never
``noop``      the baseline: an ext_proc server that reads and continues
``bodies``    chats of a given size, no two alike
``load``      the load generator, a process of its own
``slices``    who runs when; slices → figures
``held``      memory of requests held at the gateway
``report``    the table, the aims and the JSON
"""
